"""K18 (fairscale#844): saving and loading gather nothing, so that no rank's memory grows by a model."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fourfold.checkpoint.resume import resume
from fourfold.checkpoint.save import Progress
from fourfold.layout import Layout
from fourfold.schema import OptimConfig
from tests.parity.resume_ranks import saver
from tests.parity.strategies import settings
from tests.parity.zero_ranks import build
from tests.pool import RankPool


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """(folder, bytes) of a model that is large beside what Python takes."""
    config = LlamaConfig(
        vocab_size=8000, hidden_size=768, intermediate_size=2048, num_hidden_layers=3, num_attention_heads=12
    )
    model = LlamaForCausalLM(config)
    folder = tmp_path_factory.mktemp("large")
    model.save_pretrained(folder)
    return folder, 4 * sum(parameter.numel() for parameter in model.parameters())


def peaks(rank: int, *, folder: Path, stage: int, layout: Layout, output: Path) -> tuple[int, int]:
    """Bytes above what stays: of a save, of a load."""
    engine, mesh = build(rank, folder=folder, config=settings(stage=stage, optim=OptimConfig()), layout=layout)
    for master in engine.masters():
        moments = {kind: torch.rand_like(master) for kind in ("exp_avg", "exp_avg_sq")}
        engine.optimizer.state[master] = {"step": torch.tensor(1.0), **moments}
    saving = saver(output, engine=engine, mesh=mesh)
    before = reset_peak()
    saved = saving.finish(Progress(step=1))
    of_save = status_bytes("VmHWM") - before
    engine.optimizer.state.clear()
    reset_peak()
    resume(saved, engine=engine)
    return of_save, status_bytes("VmHWM") - status_bytes("VmRSS")


def reset_peak() -> int:
    Path("/proc/self/clear_refs").write_text("5")
    return status_bytes("VmRSS")


def status_bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


@pytest.mark.parametrize(("stage", "world"), [(1, 2), (3, 4)])
def test_k18_memory_stays(ranks: RankPool, tmp_path: Path, large: tuple[Path, int], stage: int, world: int) -> None:
    folder, size = large
    assert size > 120e6
    layout = Layout(dp_shard_size=world)
    for found in ranks.run(world, peaks, folder=folder, stage=stage, layout=layout, output=tmp_path):
        assert max(found) < 0.3 * size, (found, size)
