"""Public bug reports about context parallelism, as inputs with their right outcome."""

import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from fourfold.context import select
from fourfold.context.attention import IMPLEMENTATION
from fourfold.layout import Layout
from fourfold.legality import check
from fourfold.schema import AttentionConfig, Checkpointing, OptimConfig, TrainConfig
from tests.families import family_model, save_family
from tests.parity.context_model_ranks import (
    SPREAD,
    attention,
    counted,
    disagreeing,
    gradients,
    observed,
    packed,
    two_models,
)
from tests.parity.context_ranks import Case, errors
from tests.parity.strategies import settings
from tests.pool import RankPool
from tests.reference import VOCABULARY, Reference, tiny_model, token_losses, worst

SGD = OptimConfig(name="sgd", learning_rate=0.0, weight_decay=0.0, max_grad_norm=0.0)
CONTIGUOUS = [attention("ulysses"), attention("ring", balance="contiguous")]
ZIGZAG = [attention(name, balance="zigzag") for name in ("ring", "allgather", "needed_only")]
DEALT = [attention("ring", balance="greedy"), attention("allgather", balance="per_document")]


def row(*lengths: int, seed: int = 0) -> dict[str, Tensor]:
    """One row of documents of these lengths, every target of which counts."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (sum(lengths),), generator=generator)
    labels = torch.cat([ids[1:], torch.tensor([-100])])
    labels[torch.tensor(lengths).cumsum(0) - 1] = -100
    positions = torch.cat([torch.arange(length) for length in lengths])
    return {"input_ids": ids[None], "labels": labels[None], "position_ids": positions[None]}


def only_target(batch: dict[str, Tensor], token: int) -> dict[str, Tensor]:
    """All masked but the prediction of `token`."""
    labels = torch.full_like(batch["labels"], -100)
    labels[0, token - 1] = batch["labels"][0, token - 1]
    return {**batch, "labels": labels}


def with_other_token(batch: dict[str, Tensor], at: int) -> dict[str, Tensor]:
    ids = batch["input_ids"].clone()
    ids[0, at] = (ids[0, at] + 1) % VOCABULARY
    return {**batch, "input_ids": ids}


def changed(before: Tensor, after: Tensor) -> list[int]:
    """Positions of the row whose output is not the same bit by bit."""
    return (before != after)[0].any(-1).nonzero().flatten().tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(path)
    return path


@pytest.mark.parametrize("world", [1, 2, 4])
def test_c01_seven_targets_on_any_number_of_ranks(ranks: RankPool, folder: Path, world: int) -> None:
    """transformers#36607: no shard border costs a target, whoever holds what."""
    ways = [None] if world == 1 else [*CONTIGUOUS, *ZIGZAG, *DEALT]
    batch = row(8)
    for found in ranks.run(world, observed, folder=folder, attentions=ways, steps=[batch]):
        for (seen,) in found:
            assert int((seen["labels"] >= 0).sum()) == 7
            assert torch.equal(seen["labels"], batch["labels"])


@pytest.mark.parametrize("world", [2, 4])
def test_c01_a_target_at_a_border_counts_as_on_one_rank(ranks: RankPool, folder: Path, world: int) -> None:
    """The only one supervised is the first token of a shard: its prediction is made by another rank."""
    steps = [only_target(row(8), token) for token in (2, 4, 6)]
    expected = [Reference(tiny_model()).step(batch) for batch in steps]
    for found in ranks.run(
        world,
        gradients,
        folder=folder,
        config=settings(stage=1, optim=SGD),
        layout=Layout(cp_size=world),
        attentions=[*CONTIGUOUS, *ZIGZAG],
        steps=steps,
        accumulation=1,
    ):
        assert len(found) == 5
        for result, (loss, norm, tensors) in zip(itertools.chain(*found), expected * 5, strict=True):
            assert result["loss"] == pytest.approx(loss, rel=1e-6)
            assert result["norm"] == pytest.approx(norm, rel=1e-5)
            assert worst(result["gradients"], tensors)[0] < 1e-5


@pytest.mark.parametrize("world", [1, 2, 4])
def test_c03_documents_do_not_see_each_other(ranks: RankPool, folder: Path, world: int) -> None:
    """axolotl#3867: another token in document 1 changes nothing in document 2, bit by bit."""
    ways = [None] if world == 1 else [*map(attention, SPREAD), *DEALT]
    batch = row(8, 8)
    steps = [batch, with_other_token(batch, 0), with_other_token(batch, 5)]
    for found in ranks.run(world, observed, folder=folder, attentions=ways, steps=steps):
        for before, first, sixth in found:
            assert changed(before["hidden"], first["hidden"]) == list(range(8))
            assert changed(before["hidden"], sixth["hidden"]) == [5, 6, 7]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_c04_windows_stay_windows(ranks: RankPool, tmp_path: Path, world: int) -> None:
    """accelerate#4177: three layers that see 4 tokens carry token 0 to 9 and no further."""
    ways = [None] if world == 1 else [*map(attention, SPREAD), *DEALT]
    mistral = save_family("mistral", tmp_path)
    steps = [row(16), with_other_token(row(16), 0)]
    for found in ranks.run(world, observed, folder=mistral, attentions=ways, steps=steps):
        for before, after in found:
            assert changed(before["hidden"], after["hidden"]) == list(range(10))


HEADS = [(4, 2, 2), (4, 2, 4), (4, 4, 3), (6, 3, 2), (12, 3, 4), (2, 1, 3), (3, 1, 4)]  # query, key heads, degree


@pytest.mark.parametrize(("heads", "kv_heads", "degree"), HEADS)
def test_c06_head_counts_are_exact_or_refused(ranks: RankPool, heads: int, kv_heads: int, degree: int) -> None:
    """verl#1226: only more ranks than query heads are refused, and only by ulysses, with both numbers."""
    model_config = SimpleNamespace(num_attention_heads=heads, num_key_value_heads=kv_heads, hidden_size=8 * heads)
    cases, documents = [], ((19, 29), (48,))
    for name in SPREAD:
        config = TrainConfig(name="heads", cp_size=degree, seq_len=48, attention=attention(name))
        refused = list(select.refusals(config, model_config=model_config))
        if name == "ulysses" and degree > heads:
            (sentence,) = refused
            assert f"{heads} query heads over cp_size={degree}" in sentence
            assert f"use cp_size={heads} or less" in sentence
        else:
            assert not refused
            cases.append(Case(name, documents, 48, heads=heads, kv_heads=kv_heads))
    for found in ranks.run(degree, errors, cases=cases):
        assert max(found) < 1e-12, found


def test_selective_checkpointing_of_a_soft_cap_is_refused() -> None:
    """Plain products have no output to keep: it would be `full` under another name."""
    model_config = family_model("gemma2").config
    config = TrainConfig(name="capped", cp_size=2, seq_len=32, max_steps=1, global_batch_size=2)
    check(config, world_size=2, model_config=model_config, attn_implementation=IMPLEMENTATION)
    config.activation.checkpointing = Checkpointing.selective
    with pytest.raises(ValueError, match=r"attn_logit_softcapping=50.0 of gemma2.*use activation.checkpointing=full"):
        check(config, world_size=2, model_config=model_config, attn_implementation=IMPLEMENTATION)


@pytest.mark.parametrize("way", ["ulysses", "hybrid"])
def test_c06_two_models_with_other_head_counts_in_one_process(ranks: RankPool, tmp_path: Path, way: str) -> None:
    batch, models = row(7, 6), [tiny_model(), tiny_model(heads=(8, 1))]
    folders = [tmp_path / "4-2", tmp_path / "8-1"]
    for model, path in zip(models, folders, strict=True):
        model.save_pretrained(path)
        token_losses(model, batch).backward()
    for found in ranks.run(2, two_models, folders=folders, attention=attention(way), batch=batch):
        for model, tensors in zip(models, found, strict=True):
            distance, name = worst(tensors, {key: p.grad for key, p in model.named_parameters()})
            assert distance < 1e-5, name


@pytest.mark.parametrize("world", [2, 4])
def test_c09_positions_do_not_restart_on_each_rank(ranks: RankPool, folder: Path, world: int) -> None:
    """trl#6812: what the rotary module is given, put in order, is what one process gives it."""
    ways = [*CONTIGUOUS, *ZIGZAG, *DEALT, attention("hybrid")]
    steps = [row(16), row(5, 8, 3), packed(0, rows=4)]
    (truth,) = ranks.run(1, observed, folder=folder, attentions=[None], steps=steps)
    assert [seen["positions"].shape[1] for seen in truth[0]] == [16, 16, 13]
    for found in ranks.run(world, observed, folder=folder, attentions=ways, steps=steps):
        for seen in found:
            for got, want, batch in zip(seen, truth[0], steps, strict=True):
                length = batch["position_ids"].shape[1]
                assert torch.equal(want["positions"], batch["position_ids"])
                assert torch.equal(got["positions"][:, :length], want["positions"])
                assert not got["positions"][:, length:].any()


@pytest.mark.parametrize(
    "layout",
    [Layout(dp_shard_size=4), Layout(dp_shard_size=2, cp_size=2), Layout(cp_size=4), Layout(dp_replicate_size=2)],
    ids=Layout.describe,
)
def test_m01_tokens_are_counted_once(ranks: RankPool, layout: Layout) -> None:
    """trl#7100: one sample of 5 tokens and a pad for each data rank."""
    rows = {key: values.repeat(layout.data_size, 1) for key, values in row(5, 1).items()}
    rows["document_ids"] = torch.tensor([[0, 0, 0, 0, 0, -1]]).repeat(layout.data_size, 1)
    for counts in ranks.run(layout.world_size, counted, layout=layout, rows=rows):
        of_each = (counts.tokens, counts.padding, counts.targets, counts.pairs_full, counts.pairs_windowed)
        assert of_each == tuple(number * layout.data_size for number in (5, 1, 4, 15, 9))


@pytest.mark.parametrize("what", ["position_ids", "document_ids", "input_ids", "labels"])
@pytest.mark.parametrize(("world", "alike"), [(2, 0), (4, 7)], ids=["first", "last"])
def test_ranks_that_read_other_rows_stop_at_that_micro_batch_of_the_first_update(
    ranks: RankPool, folder: Path, what: str, world: int, alike: int
) -> None:
    """The last rank has other borders, or other tokens: all ranks say so, and none waits for another."""
    good = {**row(8, 8), "document_ids": torch.arange(2).repeat_interleave(8)[None]}
    other = {**row(7, 9, seed=1), "document_ids": torch.arange(2).repeat_interleave(torch.tensor([7, 9]))[None]}
    config = settings(stage=1, optim=SGD)
    config.attention = AttentionConfig(name="ring", _target_=SPREAD["ring"])
    batches = [good] * (world - 1) + [{**good, what: other[what]}]
    assert config.global_batch_size == 8
    setting = {"folder": folder, "config": config, "layout": Layout(cp_size=world), "batches": batches}
    for said in ranks.run(world, disagreeing, alike=alike, **setting):
        assert f"ranks 0 and {world - 1} of one context-parallel group read different rows or document borders" in said
