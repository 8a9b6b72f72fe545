"""What fourfold takes from the inside of DeepSpeed. A failure here after an upgrade says which use to look at."""

import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from fourfold.layout import Layout
from fourfold.schema import OptimConfig, Precision, TrainConfig
from tests.parity.strategies import settings
from tests.parity.zero_ranks import build, micro_batches
from tests.pool import RankPool
from tests.reference import batches, tiny_model

CHECKED = "0.19.8"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(path)
    return path


def test_version_is_the_one_that_the_internals_were_checked_against() -> None:
    assert version("deepspeed") == CHECKED, "read zero/deepspeed_internals.py against the new version, then change this"


def start(rank: int) -> dict[str, Any]:
    import deepspeed.ops

    return {
        "shm": deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"],
        "inductor": "torch._inductor.compile_fx" in sys.modules,
        "muon": "deepspeed.runtime.zero.muon.original_muon" in sys.modules,
        "compile": torch.compile.__module__,
    }


def test_start_compiles_nothing_and_leaves_torch_alone(ranks: RankPool) -> None:
    (found,) = ranks.run(1, start)
    assert found == {"shm": False, "inductor": False, "muon": True, "compile": "torch"}


def buffers(rank: int, *, folder: Path, config: TrainConfig, layout: Layout) -> dict[str, Any]:
    engine, mesh = build(rank, folder=folder, config=config, layout=layout)
    for step in range(2):
        batch = batches(step, rows=8)
        targets = int((batch["labels"] != -100).sum())
        engine.forward_backward(micro_batches(batch, mesh=mesh, count=2), targets=targets)
        shards, masters = engine.gradients(), engine.masters()
        engine.step(learning_rate=1e-3)
    before = [master.detach().clone() for master in engine.masters()]
    engine.forward_backward(micro_batches(batches(3, rows=8), mesh=mesh, count=2), targets=targets)
    for shard in engine.gradient_shards():
        shard[0] = float("nan")
    norm = engine.step(learning_rate=1e-3)
    return {
        "dtypes": {shard.dtype for shard in shards},
        "sizes": [shard.numel() for shard in shards] == [master.numel() for master in masters],
        "norm": norm,
        "kept": all(torch.equal(old, new) for old, new in zip(before, engine.masters(), strict=True)),
        "stage": engine._deepspeed.zero_optimization_stage(),
    }


@pytest.mark.parametrize("precision", list(Precision)[:2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_are_one_fp32_shard_and_nan_updates_nothing(
    ranks: RankPool, folder: Path, stage: int, precision: Precision
) -> None:
    layout = Layout(dp_replicate_size=2) if stage == 0 else Layout(dp_shard_size=2)
    config = settings(stage=stage, optim=OptimConfig(), precision=precision)
    for found in ranks.run(2, buffers, folder=folder, config=config, layout=layout):
        assert found["dtypes"] == {torch.float32}
        assert found["sizes"]
        assert found["norm"] != found["norm"]
        assert found["kept"]
        assert found["stage"] == (3 if stage == 3 else 2)
