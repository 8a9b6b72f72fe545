"""Models of many families cut into two and four stages, and beside two other axes, against one process; each schedule beside
each other feature: test_matrix.py."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fourfold.layout import Layout
from fourfold.schema import ActivationConfig, Checkpointing, OptimConfig, PipelineConfig, TensorConfig, TrainConfig
from tests.families import family_model, save_family
from tests.parity.context_model_ranks import attention, packed
from tests.parity.strategies import settings
from tests.parity.test_tensor_zero import check
from tests.parity.zero_ranks import train
from tests.pool import RankPool
from tests.reference import Reference

STEPS, ROWS = 2, 16
SGD = OptimConfig(name="sgd", learning_rate=0.5, weight_decay=0.0, max_grad_norm=0.3)


@dataclass(frozen=True)
class Way:
    stage: int
    layout: Layout
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    family: str = "llama_tied"
    tensor: TensorConfig = field(default_factory=TensorConfig)
    attention: str | None = None
    checkpointing: Checkpointing = Checkpointing.none
    layers: int = 5
    accumulation: int = 4

    def config(self) -> TrainConfig:
        config = replace(settings(stage=self.stage, optim=SGD), tensor=self.tensor, pipeline=self.pipeline)
        if self.attention:
            config.attention = attention(self.attention)
        config.activation = ActivationConfig(checkpointing=self.checkpointing)
        return config

    def changes(self) -> dict[str, Any]:
        changes: dict[str, Any] = {"num_hidden_layers": self.layers, "vocab_size": 97}
        if self.family in ("gemma2", "gemma3_text"):
            kinds = ["sliding_attention", "full_attention"]
            changes["layer_types"] = [kinds[number % 2] for number in range(self.layers)]
        return changes


def by(schedule: str, virtual: int | None = None, split: list[int] | None = None) -> PipelineConfig:
    return PipelineConfig(schedule=schedule, virtual_stages=virtual, split=split)


PP2 = Layout(pp_size=2)
EIGHT = Layout(tp_size=2, cp_size=2, pp_size=2)
PLAIN = TensorConfig(sequence_parallel=False)
SHARDS, REPLICAS = Layout(pp_size=2, dp_shard_size=2), Layout(pp_size=2, dp_replicate_size=2)
WAYS = {
    "four stages": Way(2, Layout(pp_size=4), family="gemma3_text", layers=6),
    "four ranks, eight stages": Way(1, Layout(pp_size=4), by("interleaved_1f1b"), "qwen2", layers=9),
    "four ranks in a V": Way(1, Layout(pp_size=4), by("zbv"), "llama_tied", layers=8),
    "one layer less at both ends": Way(1, PP2, by("interleaved_1f1b", split=[1, 2, 2, 1]), "mistral", layers=6),
    "tp, whole tokens": Way(2, Layout(pp_size=2, tp_size=2), family="phi3", tensor=PLAIN),
    "cp": Way(2, Layout(pp_size=2, cp_size=2), family="gemma2", attention="ring"),
    "cp and tp": Way(1, EIGHT, by("interleaved_1f1b"), "llama_tied", attention="hybrid"),
    "cp and dp, tied": Way(2, replace(SHARDS, cp_size=2), family="llama_tied", attention="ring", accumulation=2),
    "tp and dp, stage 3": Way(3, replace(SHARDS, tp_size=2), family="qwen3", accumulation=2),
    "cp and replicas, V": Way(2, replace(REPLICAS, cp_size=2), by("zbv"), attention="ring", accumulation=2),
    "checkpointing, stage 3": Way(
        3, SHARDS, by("interleaved_1f1b"), "gemma3_text", checkpointing=Checkpointing.every_n
    ),
}


@pytest.mark.parametrize("name", WAYS)
def test_equals_one_process(ranks: RankPool, tmp_path: Path, name: str) -> None:
    """Two clipped updates: losses, norms, every gradient, and the weights at the end; copies equal bit by bit."""
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
