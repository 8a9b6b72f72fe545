"""Which strategy a run gets, what it sends, and which runs are refused: both numbers and the knob in every sentence."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fourfold.context import select
from fourfold.context.allgather import AllGather
from fourfold.context.hybrid import Hybrid
from fourfold.context.kernels.cpu import CpuKernel
from fourfold.context.kernels.plain import PlainKernel
from fourfold.context.local import Local
from fourfold.context.needed_only import NeededOnly
from fourfold.context.ring import Ring
from fourfold.context.strategy import AttentionShape, ContextStrategy
from fourfold.context.ulysses import Ulysses
from fourfold.context.work import unit
from fourfold.schema import TrainConfig
from tests.golden.composing import NAMED, typed

OPTIONS = {"ulysses_size": "4", "outer": "ring"}
MODELS = {"llama3_8b": (32, 8), "qwen3_32b_tp4": (16, 2), "llama3_405b": (128, 8), "mha": (32, 32), "smollm2": (9, 3)}


def model(heads: int, kv_heads: int, **more: Any) -> SimpleNamespace:
    hidden = heads * 128
    return SimpleNamespace(num_attention_heads=heads, num_key_value_heads=kv_heads, hidden_size=hidden, **more)


def config(*words: str) -> TrainConfig:
    return typed(*NAMED, "max_steps=1", *words)


def refusal(*words: str, of: SimpleNamespace) -> str:
    return " ".join(select.refusals(config(*words), model_config=of))


# words that are refused, heads, what the message holds, words that mend it
REFUSED = [
    (("cp_size=4", "seq_len=7"), (8, 2), ("seq_len=7", "cp_size=4", "8 chunks", "seq_len=8"), ("seq_len=8",)),
    (
        ("cp_size=6", "attention=ulysses"),
        (4, 2),
        ("attention=ulysses", "4 query heads", "cp_size=6", "cp_size=4 or less", "attention=ring"),
        ("cp_size=4",),
    ),
    (
        ("cp_size=4", "attention=hybrid", "attention.ulysses_size=3"),
        (8, 2),
        ("attention.ulysses_size=3", "cp_size=4", "8 query heads", "1, 2, 4"),
        ("attention.ulysses_size=2",),
    ),
    (
        ("cp_size=8", "attention=hybrid", "attention.ulysses_size=8"),
        (4, 2),
        ("attention.ulysses_size=8", "cp_size=8", "4 query heads", "auto or one of 1, 2, 4."),
        ("attention.ulysses_size=auto",),
    ),
    (
        ("cp_size=2", "attention=hybrid", "attention.outer=tree"),
        (8, 2),
        ("attention.outer=tree", "ring or allgather"),
        ("attention.outer=allgather",),
    ),
    (
        ("cp_size=2", "attention.balance=fair"),
        (8, 2),
        ("attention.balance=fair", "auto", "zigzag", "per_document"),
        ("attention.balance=greedy", "attention=ring"),
    ),
    (("attention.balance=fair",), (8, 2), ("attention.balance=fair", "zigzag"), ("attention.balance=zigzag",)),
    (
        ("cp_size=2", "attention=ulysses", "attention.balance=zigzag"),
        (8, 2),
        ("attention.balance=zigzag", "attention=ulysses", "auto or contiguous"),
        ("attention.balance=contiguous",),
    ),
    (
        ("cp_size=2", "model.attn_implementation=sdpa"),
        (8, 2),
        ("model.attn_implementation=sdpa", "cp_size=2", "attn_implementation=auto", "attention="),
        ("model.attn_implementation=auto",),
    ),
    (("attention=ring",), (8, 2), ("attention=ring", "cp_size=1", "cp_size=2 or more"), ("cp_size=2",)),
    (
        ("attention._target_=fourfold.context.ring.Ring",),
        (8, 2),
        ("attention=fourfold.context.ring.Ring", "cp_size=1"),
        ("cp_size=2",),
    ),
    (("cp_size=2", "attention=local"), (8, 2), ("attention=local", "cp_size=2", "attention=auto"), ("attention=auto",)),
    (
        ("cp_size=2", "attention._target_=nowhere.Ring"),
        (8, 2),
        ("attention._target_=nowhere.Ring", "cannot be imported", "nowhere"),
        ("attention._target_=fourfold.context.ring.Ring",),
    ),
    (
        ("cp_size=2", "attention._target_=pathlib.Path"),
        (8, 2),
        ("attention._target_=pathlib.Path", "no ContextStrategy"),
        ("attention._target_=null",),
    ),
]


@pytest.mark.parametrize(("words", "heads", "parts", "mended"), REFUSED, ids=lambda value: str(value)[:50])
def test_refused_and_mended(
    words: tuple[str, ...], heads: tuple[int, int], parts: tuple[str, ...], mended: tuple[str, ...]
) -> None:
    message = refusal(*words, of=model(*heads))
    for part in parts:
        assert part in message
    assert refusal(*words, *mended, of=model(*heads)) == ""


def test_dropout_is_refused() -> None:
    message = refusal("cp_size=2", of=model(8, 2, attention_dropout=0.1))
    assert "attention_dropout=0.1" in message
    assert "cp_size=1" in message
    assert refusal("cp_size=1", of=model(8, 2, attention_dropout=0.1)) == ""
    assert "attention_dropout=0.1" in refusal("attention=local", of=model(8, 2, attention_dropout=0.1))
    cpu = torch.device("cpu")
    assert not select.is_ours(config(), model_config=model(8, 2, attention_dropout=0.1), device=cpu), "it is drawn"
    assert select.is_ours(config(), model_config=model(8, 2), device=cpu)
    assert not select.is_ours(config(), model_config=model(8, 2), device=torch.device("cuda"))


def test_local_is_not_another_implementation() -> None:
    message = refusal("attention=local", "model.attn_implementation=sdpa", of=model(8, 2))
    assert "model.attn_implementation=sdpa is transformers' own" in message


def test_auto_chooses_among_those_that_have_the_balance() -> None:
    wanted = config("cp_size=8", "seq_len=131072", "attention.balance=zigzag")
    assert select.strategy_class(config("cp_size=8", "seq_len=131072"), model_config=model(32, 8)) is Ulysses
    assert select.strategy_class(wanted, model_config=model(32, 8)) is not Ulysses


def test_all_reasons_at_once() -> None:
    message = refusal("cp_size=6", "seq_len=3", "attention=ulysses", of=model(4, 2, attention_dropout=0.1))
    for part in ("seq_len=3", "attention_dropout=0.1", "4 query heads"):
        assert part in message


@pytest.mark.parametrize("cp_size", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("name", MODELS)
def test_auto_sends_the_least(name: str, cp_size: int) -> None:
    wanted = config(f"cp_size={cp_size}", "seq_len=131072")
    of = model(*MODELS[name])
    kind, sent = select.cheapest(wanted, model_config=of)
    assert sent[kind.name] == min(sent.values())
    assert ("ulysses" in sent) == (cp_size <= MODELS[name][0])
    assert set(sent) >= {"ring", "allgather", "needed_only", "hybrid"}
    assert select.strategy_class(wanted, model_config=of) is kind
    assert f"{kind.name} over {cp_size} ranks" in select.described(wanted, model_config=of)
    assert refusal(f"cp_size={cp_size}", "seq_len=131072", of=of) == ""


@pytest.mark.parametrize(
    ("heads", "cp_size", "kind"),
    [((32, 8), 8, Ulysses), ((32, 32), 8, Ulysses), ((16, 1), 8, NeededOnly), ((4, 2), 8, Hybrid)],
)
def test_auto_by_example(heads: tuple[int, int], cp_size: int, kind: type[ContextStrategy]) -> None:
    wanted = config(f"cp_size={cp_size}", "seq_len=131072")
    assert select.strategy_class(wanted, model_config=model(*heads)) is kind


def test_one_rank_has_the_local_one() -> None:
    assert select.strategy_class(config(), model_config=model(8, 2)) is Local
    assert select.described(config(), model_config=model(8, 2)) == "local"


def test_a_soft_cap_takes_the_plain_kernel() -> None:
    cpu, run = torch.device("cpu"), config()
    capped, plain = (model(8, 2, attn_logit_softcapping=cap) for cap in (50.0, None))
    assert isinstance(select.choose_kernel(run, model_config=capped, device=cpu), PlainKernel)
    assert isinstance(select.choose_kernel(run, model_config=plain, device=cpu), CpuKernel)


# query heads, key heads, P -> MB a rank and layer, forward and backward: S=131072, D=128, bf16, sums in bf16
TABLE = [
    ((16, 1), 8, {"allgather": 176, "ring": 185, "ulysses": 352, "hybrid": 386}),
    ((16, 1), 16, {"allgather": 189, "ring": 193, "ulysses": 252, "hybrid": 294}),
    ((128, 8), 8, {"allgather": 1409, "ring": 1476, "ulysses": 1996, "hybrid": 1980}),
    ((32, 8), 8, {"allgather": 1409, "ring": 1476, "ulysses": 587, "hybrid": 772}),
    ((16, 2), 8, {"allgather": 352, "ring": 369, "ulysses": 352, "hybrid": 386}),
    ((32, 32), 8, {"allgather": 5637, "ring": 5906, "ulysses": 940, "hybrid": 1879}),
]
KINDS: dict[str, type[ContextStrategy]] = {"allgather": AllGather, "ring": Ring, "ulysses": Ulysses, "hybrid": Hybrid}


@pytest.mark.parametrize(("heads", "cp_size", "megabytes"), TABLE)
def test_bytes_at_scale(heads: tuple[int, int], cp_size: int, megabytes: dict[str, int]) -> None:
    shape = AttentionShape(
        rows=1, length=131072, heads=heads[0], kv_heads=heads[1], head_dim=128, itemsize=2, sum_itemsize=2
    )
    for name, kind in KINDS.items():
        for rank in range(cp_size):
            sent = kind.sent_bytes(shape, cp_size=cp_size, rank=rank, options=OPTIONS)
            assert round(sum(sent.values()) / 1e6) == megabytes[name], name


def test_bytes_of_needed_only_for_one_document() -> None:
    """Three quarters of allgather's in zigzag order, over the ranks' mean."""
    shape = AttentionShape(rows=1, length=4096, heads=8, kv_heads=2, head_dim=64, itemsize=4)
    sent = [sum(NeededOnly.sent_bytes(shape, cp_size=4, rank=rank, options={}).values()) for rank in range(4)]
    assert sum(sent) / 4 == pytest.approx(7.08e6, rel=1e-3)
    assert sum(AllGather.sent_bytes(shape, cp_size=4, rank=0, options={}).values()) == pytest.approx(9.437e6, rel=1e-3)


def test_rows_are_padded_to_two_chunks_a_rank() -> None:
    assert [unit(size) for size in (1, 2, 3, 8)] == [1, 4, 6, 16]
