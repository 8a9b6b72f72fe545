"""`fourfold verify` says equal of what is equal, and finds and names every fault that is made on purpose."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fourfold.layout import Layout
from fourfold.verify.axes import cut_sizes, passes
from fourfold.verify.passes import Pass, PassFailed, run_passes
from fourfold.verify.pool import RankPool as ProductPool
from fourfold.verify.pool import RanksFailed
from fourfold.verify.ranks import verified_run
from fourfold.verify.small import Small, make_small
from tests.compose import composed
from tests.parity.verify_faults import asleep, run_with
from tests.pool import RankPool

LAYOUTS = {
    "zero2": ["tier=zero2"],
    "dp": ["tier=dp"],
    "tp": ["tier=tensor", "tp_size=2", "dp_shard_size=1"],
    "pp": ["zero=stage1", "pp_size=2", "dp_shard_size=1"],
    "cp": ["tier=zero3", "cp_size=2", "dp_shard_size=1", "activation=full"],
}
MORE = {  # of bytes
    "zero3 pp": ["zero=stage3", "pp_size=2", "dp_shard_size=2", "zero.stage3_param_persistence_threshold=100"],
    "hsdp": ["tier=hsdp", "zero=stage1"],
    "zero3 hsdp": ["tier=hsdp", "zero=stage3"],
    "offload": ["tier=zero3_offload"],
    "tp zero3": ["tier=tensor", "tp_size=2", "dp_shard_size=2", "zero=stage3"],
    "ring": ["zero=stage3", "cp_size=2", "dp_shard_size=2", "attention=ring"],
}
Verify = Callable[..., Pass]


@pytest.fixture(scope="module")
def verify(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Verify:
    """One update of a layout of the quickstart model, with short documents and a few long ones."""
    place = tmp_path_factory.mktemp("verify")
    texts = [f"{word} " * (5 + 9 * number) for number, word in enumerate(["import", "return", "class", "yield"] * 4)]
    (place / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    data = ["task=quickstart", "data=jsonl", f"data.path={place / 'texts.jsonl'}", f"cache_dir={place}", "seq_len=64"]
    made: dict[str, tuple[Small, Layout]] = {}

    def one(layout: str, *, fault: str | None = None, updates: int = 1) -> Pass:
        if layout not in made:
            made[layout] = small(*data, *{**LAYOUTS, **MORE}[layout], scratch=place / layout)
        what, shape = made[layout]
        run = partial(run_with, fault=fault) if fault else verified_run
        (found,) = run_passes(what, layouts=[shape], pool=ranks, updates=updates, run=run)
        return found

    return one


def small(*overrides: str, scratch: Path) -> tuple[Small, Layout]:
    config, _ = composed(*overrides)
    sizes = cut_sizes(config, max_axis=2, max_processes=8)
    (layout,) = passes(sizes, max_processes=8)
    return make_small(config, layouts=[layout], sizes=sizes, scratch=scratch), layout


@pytest.mark.parametrize("layout", [*LAYOUTS, *(pytest.param(one, marks=pytest.mark.slow) for one in MORE)])
def test_a_sound_layout_is_equal(verify: Verify, layout: str) -> None:
    found = verify(layout, updates=3 if layout == "zero3 hsdp" else 2)
    assert found.comparison.equal, found
    assert found.causes == []
    for axis, ranks in found.comparison.sent.items():
        for counted, plan in ranks:
            assert counted == plan > 0, axis


@pytest.mark.parametrize(
    ("fault", "layout", "says"),
    [
        ("no reduction over dp_shard", "zero2", "their sum over dp_shard is dropped"),
        ("no average over replicas", "dp", "the all-reduce over dp_replicate"),
        ("no sum over tp", "tp", "the sum over tp of parameters that each of its ranks holds whole"),
        ("halved loss", "zero2", "every loss is 0.5 of the reference's"),
        ("halved gradients", "zero2", "every gradient is 0.5 of the reference"),
        ("labels shifted twice", "cp", "labels are shifted once too often"),
        ("labels not shifted", "zero2", "labels are not shifted"),
        ("leaking documents", "zero2", "documents attend to each other"),
        ("stale tied copy", "pp", "model.embed_tokens.weight: the sum over pp of a matrix that is tied"),
        ("one stage", "pp", "only parameters of pipeline rank 1 (pp)"),
        ("norm of copies", "tp", "counted by more than one"),
        ("rows read twice", "zero2", "the data ranks read 8 rows in an update of 8, each once if all were right"),
        ("no step", "zero2", "the weights move otherwise than the reference's"),
        ("more bytes", "tp", "bytes over tp in an update, and its formula says"),
    ],
)
def test_a_fault_is_found_and_named(verify: Verify, fault: str, layout: str, says: str) -> None:
    found = verify(layout, fault=fault)
    assert not found.comparison.equal
    assert any(says in text for text in found.causes), found.causes


def test_a_rank_that_fails_is_told_and_none_is_left(verify: Verify) -> None:
    with pytest.raises(PassFailed, match=r"(?s)dp_shard 2 did not come to its end.*KeyError: 'unknown'") as caught:
        verify("zero2", fault="unknown")
    assert "rank 1" in str(caught.value)


def test_a_rank_that_hangs_is_ended_and_told_where() -> None:
    pool: Any = ProductPool(preload="tests.pool_preload", patience=4.0)
    with pytest.raises(RanksFailed, match=r"rank 1: no answer after 4 s; it is at") as caught:
        pool.run(2, asleep, seconds=600.0)
    assert "in asleep" in str(caught.value)


def test_the_server_of_ranks_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    pool: Any = ProductPool(preload="tests.pool_preload")

    def gone(process: Any) -> None:
        raise EOFError("unexpected EOF")

    monkeypatch.setattr(pool._context.Process, "start", gone)
    with pytest.raises(RanksFailed, match="rank 0: the server that starts ranks died"):
        pool.run(2, asleep, seconds=0.0)
