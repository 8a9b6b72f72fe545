"""Activation checkpointing under ZeRO: the very same numbers as without it."""

from pathlib import Path

import pytest
import torch

from fourfold.schema import ActivationConfig, Checkpointing, OptimConfig
from tests.families import save_family
from tests.parity.strategies import STRATEGIES, settings
from tests.parity.zero_ranks import train
from tests.pool import RankPool
from tests.reference import batches

MODES = [mode for mode in Checkpointing if mode is not Checkpointing.none]
# Every mode where parameters come and go, and where they stay; elsewhere one.
OF = {
    "dp": [Checkpointing.every_n],
    "zero1": [Checkpointing.selective],
    "zero2": MODES,
    "zero3": MODES,
    "hsdp3": [Checkpointing.full],
}


@pytest.mark.parametrize("strategy", list(OF))
def test_bit_equal_to_none(ranks: RankPool, tmp_path: Path, strategy: str) -> None:
    folder = save_family("gemma3_text", tmp_path)  # mixed sliding and full layers, tied embeddings
    stage, layout = STRATEGIES[strategy]
    world = 4 if strategy.startswith("hsdp") else 2
    results = {}
    for mode in [Checkpointing.none, *OF[strategy]]:
        config = settings(stage=stage, optim=OptimConfig(name="sgd", learning_rate=0.5, max_grad_norm=0.3))
        config.activation = ActivationConfig(checkpointing=mode)
        results[mode] = ranks.run(
            world,
            train,
            folder=folder,
            config=config,
            layout=layout(world),
            steps=[batches(step, rows=8) for step in range(2)],
            accumulation=2,
        )[0]
    truth = results[Checkpointing.none]
    for mode in OF[strategy]:
        assert results[mode]["loss"] == truth["loss"], mode
        assert results[mode]["norm"] == truth["norm"], mode
        for got, want in zip(results[mode]["gradients"], truth["gradients"], strict=True):
            assert all(torch.equal(got[name], want[name]) for name in want), mode
        assert all(torch.equal(results[mode]["weights"][name], truth["weights"][name]) for name in truth["weights"])
