"""What a refusal recommends: legal, near, and found after a bounded look around."""

import itertools
import re
from dataclasses import replace
from math import log2
from pathlib import Path
from typing import Any

import pytest

from fourfold.config import to_train_config
from fourfold.layout import AXES, Layout, product
from fourfold.legality import check, placed, refusals
from fourfold.model.source import config_at_hand
from fourfold.nearest import FEW, MOST, nearest
from fourfold.schema import ModelConfig, TrainConfig
from tests.families import family_config, save_family
from tests.golden.composing import NAMED, composed

BASE = (*NAMED, "max_steps=3", "seq_len=32")
LLAMA = family_config("llama", num_hidden_layers=5)  # 4 query heads, 2 key heads, 64 positions


def config_of(*words: str) -> TrainConfig:
    return to_train_config(composed(*BASE, *words))


def refused(*words: str, world: int, model_config: Any = LLAMA) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        check(config_of(*words), world_size=world, model_config=model_config)
    return str(caught.value)


def recommended(message: str) -> list[list[str]]:
    (text,) = re.findall(r"Nearest legal layouts for \d+ processes: (.*)\.$", message)
    return [words.split() for words in text.split("; ")]


REFUSED: list[tuple[tuple[str, ...], int, str]] = [  # and the first that is recommended
    (("tp_size=3",), 8, "tp_size=4 dp_shard_size=2"),
    (("tp_size=8",), 8, "tp_size=4 dp_shard_size=2"),
    (("pp_size=8",), 8, "pp_size=4 dp_shard_size=2"),
    (("dp_shard_size=4",), 8, "dp_shard_size=4 dp_replicate_size=2"),
    (("cp_size=8", "seq_len=8"), 8, "cp_size=4 dp_shard_size=2"),
    (("zero=stage0",), 2, "dp_replicate_size=2"),
    (("zero=stage0", "dp_shard_size=1", "cp_size=2"), 2, "cp_size=2 zero.stage=2"),
    (("pp_size=2", "dp_shard_size=1", "pipeline.schedule=zbv", "zero=stage3"), 2, "pp_size=2 zero.stage=2"),
    (
        ("pp_size=2", "dp_shard_size=1", "pipeline.schedule=zbv", "activation=full"),
        2,
        "pp_size=2 pipeline.schedule=1f1b",
    ),
    (("pp_size=4", "global_batch_size=2", "dp_shard_size=1"), 4, "pp_size=4 pipeline.schedule=gpipe"),
    (("pp_size=2", "pipeline.virtual_stages=2", "dp_shard_size=1"), 2, "pp_size=2 pipeline.schedule=interleaved_1f1b"),
    (("pp_size=2", "pipeline.split=[1,1]", "dp_shard_size=1"), 2, "pp_size=2 pipeline.split=null"),
    (("attention=ring",), 2, "dp_shard_size=2 attention=auto"),
    (("zero=stage1", "zero.offload.optimizer=cpu"), 1, "zero.stage=2"),
    (("cp_size=2", "attention=ulysses", "attention.balance=zigzag"), 2, "cp_size=2 attention.balance=auto"),
    (("cp_size=4", "attention=hybrid", "attention.ulysses_size=3"), 4, "cp_size=4 attention.ulysses_size=auto"),
    (("cp_size=4", "attention=hybrid", "attention.outer=none"), 4, "cp_size=4 attention.outer=ring"),
]


@pytest.mark.parametrize(("words", "world", "first"), REFUSED, ids=[" ".join(words) for words, _, _ in REFUSED])
def test_what_is_recommended_is_legal(words: tuple[str, ...], world: int, first: str) -> None:
    found = recommended(refused(*words, world=world))
    assert 1 <= len(found) <= FEW
    assert set(found[0]) == set(first.split())
    for one in found:
        assert refusals(config_of(*words, *one), world_size=world, model_config=LLAMA) == []


def test_settings_alone_recommend_no_layout() -> None:
    assert "Nearest" not in refused("precision=fp16", world=2)
    assert "Nearest" not in refused("seq_len=65", world=2)


def test_what_the_layout_cannot_mend_is_left_out() -> None:
    """The other reasons are told beside it."""
    message = refused("precision=fp16", "tp_size=3", "seq_len=65", world=4)
    for part in ("precision=fp16", "tp_size=3 does not divide the 4 query heads", "seq_len=65", "4 were started"):
        assert part in message
    assert message.count("\n  - ") == 4
    assert recommended(message)[0] == ["tp_size=4"]


@pytest.mark.parametrize("world", [1, 2, 3, 4, 6, 8, 12, 30])
def test_nothing_legal_is_nearer(world: int) -> None:
    """Against every layout there is, one by one."""
    base = config_of("global_batch_size=12")
    every = [sizes for sizes in itertools.product(divisors(world), repeat=len(AXES)) if product(sizes) == world]

    def reason(one: TrainConfig, layout: Layout) -> str | None:
        return next(placed(one, layout=layout, model_config=LLAMA), None)

    legal = [sizes for sizes in every if reason(of_sizes(base, sizes), Layout(**named(sizes))) is None]
    for tp, pp, shard in itertools.product((1, 2, 3, 5), (1, 2, 4), (-1, 2, 3)):
        wanted = (tp, 1, pp, shard, 1)
        words = recommended(nearest(of_sizes(base, wanted), world_size=world, reason=reason))[0]
        sizes = dict(word.split("=") for word in words if "_size=" in word)
        found = tuple(int(sizes.get(f"{axis}_size", 1)) for axis in AXES)
        changes = sum("." in word for word in words)
        assert far(found, wanted) + changes <= min(far(one, wanted) for one in legal) + 1e-5


def named(sizes: tuple[int, ...]) -> dict[str, int]:
    return {f"{axis}_size": size for axis, size in zip(AXES, sizes, strict=True)}


def of_sizes(config: TrainConfig, sizes: tuple[int, ...]) -> TrainConfig:
    changes: dict[str, Any] = named(sizes)
    return replace(config, **changes)


def divisors(world: int) -> list[int]:
    return [size for size in range(1, world + 1) if world % size == 0]


def far(sizes: tuple[int, ...], wanted: tuple[int, ...]) -> float:
    return sum(abs(log2(size / asked)) for size, asked in zip(sizes, wanted, strict=True) if asked > 0)


def test_the_search_is_bounded() -> None:
    """16,384 processes have 3,060 layouts; none of them is legal here, and 1,000 are looked at."""
    looked = 0

    def never(config: TrainConfig, layout: Layout) -> str:
        nonlocal looked
        looked += 1
        return "zero.stage and pipeline.schedule and attention= are all to blame"

    assert nearest(config_of("tp_size=8", "global_batch_size=16384"), world_size=16_384, reason=never) == ""
    assert looked == MOST
    message = refused("tp_size=8", "pp_size=4", "global_batch_size=16384", world=16_384)
    assert recommended(message)[0] == ["tp_size=4", "pp_size=4", "dp_shard_size=1024"]


def test_a_world_without_end_is_not_searched() -> None:
    assert "Nearest" not in refused(f"pp_size={10**11}", world=10**11)


def test_without_the_model_some_may_be_illegal() -> None:
    assert refused("tp_size=2", world=7, model_config=None).endswith("The model is not read yet: it may refuse some.")


def test_a_model_that_is_at_hand_is_judged_at_once(tmp_path: Path) -> None:
    """One that is not there, or is none, is left to those that read it."""
    save_family("llama", tmp_path / "model")
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "config.json").write_text("{")
    found = config_at_hand(ModelConfig(path=str(tmp_path / "model")))
    assert found is not None
    assert "does not divide the 4 query heads" in refused("tp_size=3", "precision=fp16", world=3, model_config=found)
    for name in ("none", "nowhere"):
        assert config_at_hand(ModelConfig(path=str(tmp_path / name))) is None
