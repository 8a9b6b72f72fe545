"""The same run on a GPU: NCCL, the device's own kernels, the same curve as on the CPU."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.parity.run_ranks import metrics

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def run(output: Path, *overrides: str) -> Path:
    command = [sys.executable, "-m", "fourfold", "task=quickstart", "debug=cpu", f"output_dir={output}", *overrides]
    subprocess.run(command, check=True, timeout=300)
    return output


@pytest.mark.parametrize("tier", ["dp", "zero2", "zero3", "zero3_checkpointed", "zero3_offload"])
def test_curve_of_the_cpu(tmp_path: Path, tier: str) -> None:
    truth = run(tmp_path / "cpu", "tier=zero2")
    ours = run(tmp_path / "cuda", f"tier={tier}", "cluster=gpu8", "cluster.device=cuda")
    for key in ("train/loss", "train/grad_norm", "eval/loss"):
        assert metrics(ours, key) == pytest.approx(metrics(truth, key), rel=1e-3), key


def test_bf16_trains_and_reports_its_memory(tmp_path: Path) -> None:
    ours = run(tmp_path, "tier=zero3", "cluster=gpu8", "cluster.device=cuda", "precision=bf16")
    losses = list(metrics(ours, "train/loss").values())
    assert losses[-1] < losses[0]
    assert all(0 < value < 2**34 for value in metrics(ours, "train/memory_bytes").values())
