"""Tensor parallelism of other families, with few key heads, and beside two other axes, against one process; each other feature
beside it: test_matrix.py."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fourfold.layout import Layout
from fourfold.schema import ActivationConfig, Checkpointing, OptimConfig, TensorConfig, TrainConfig
from tests.families import family_model, save_family
from tests.parity.context_model_ranks import attention, packed
from tests.parity.strategies import settings
from tests.parity.zero_ranks import train
from tests.pool import RankPool
from tests.reference import Reference, worst

STEPS, ROWS = 2, 12
SGD = OptimConfig(name="sgd", learning_rate=0.5, weight_decay=0.0, max_grad_norm=0.3)


@dataclass(frozen=True)
class Way:
    """ZeRO stage and layout; the family, and how it is cut and its rows are spread."""

    stage: int
    layout: Layout
    family: str = "llama_tied"
    tensor: TensorConfig = field(default_factory=TensorConfig)
    attention: str | None = None
    checkpointing: Checkpointing = Checkpointing.none
    kv_heads: int = 2
    accumulation: int = 3

    def config(self) -> TrainConfig:
        config = replace(settings(stage=self.stage, optim=SGD), tensor=self.tensor)
        if self.attention:
            config.attention = attention(self.attention)
        config.activation = ActivationConfig(checkpointing=self.checkpointing)
        return config

    def changes(self) -> dict[str, Any]:
        return {"num_key_value_heads": self.kv_heads, "vocab_size": 97}


SHARDS, ALL = Layout(tp_size=2, dp_shard_size=2), Layout(tp_size=2, cp_size=2, dp_shard_size=2)
FEW = Layout(tp_size=4)
PLAIN = TensorConfig(sequence_parallel=False)
WAYS = {
    "zero2 regather": Way(2, SHARDS, "phi3", TensorConfig(regather=True, overlap=False)),
    "zero1 whole tokens": Way(1, SHARDS, "qwen3", PLAIN),
    "zero2 one key head": Way(2, FEW, "llama_tied", kv_heads=1),
    "zero3 fewer key heads": Way(3, FEW, "gemma3_text"),
    "zero3 regather, checkpointing": Way(
        3, SHARDS, "gemma3_text", TensorConfig(regather=True), checkpointing=Checkpointing.full
    ),
    "cp and dp": Way(3, ALL, "gemma3_text", attention="needed_only", checkpointing=Checkpointing.full),
}


@pytest.mark.parametrize("name", WAYS)
def test_equals_one_process(ranks: RankPool, tmp_path: Path, name: str) -> None:
    """Two clipped updates: losses, norms, every gradient, and the weights at the end."""
    way = WAYS[name]
    folder = save_family(way.family, tmp_path, **way.changes())
    results = ranks.run(
        way.layout.world_size,
        train,
        folder=folder,
        config=way.config(),
        layout=way.layout,
        steps=[packed(step, rows=ROWS) for step in range(STEPS)],
        accumulation=way.accumulation,
    )
    model = family_model(way.family, **way.changes())
    reference = Reference(model, torch.optim.SGD(model.parameters(), lr=SGD.learning_rate), SGD.max_grad_norm)
    steps = [reference.step(packed(step, rows=ROWS)) for step in range(STEPS)]
    assert all(norm > SGD.max_grad_norm for _, norm, _ in steps)
    for result in results:
        check(result, steps, reference.weights())


def check(
    result: dict[str, Any], steps: list[tuple[float, float, dict[str, Tensor]]], weights: dict[str, Tensor]
) -> None:
    seen = zip(result["loss"], result["norm"], result["gradients"], strict=True)
    for (loss, norm, gradients), (true_loss, true_norm, truth) in zip(seen, steps, strict=True):
        assert loss == pytest.approx(true_loss, rel=1e-6)
        assert norm == pytest.approx(true_norm, rel=1e-5)
        distance, name = worst(gradients, truth)
        assert distance < 1e-5, name
    distance, name = worst(result["weights"], weights)
    assert distance < 1e-5, name
