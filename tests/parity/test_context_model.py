"""Whole models with their rows spread over ranks, against one process that sees each document alone; with each way to shard:
test_matrix.py."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fourfold.layout import Layout
from fourfold.schema import ActivationConfig, Checkpointing, OptimConfig, TrainConfig
from tests.families import STRETCHED, family_model, save_family
from tests.parity.context_model_ranks import SPREAD, attention, attention_runs, gradients, packed
from tests.parity.strategies import settings
from tests.parity.zero_ranks import train
from tests.pool import RankPool
from tests.reference import Reference, worst

FAMILIES = ["llama", "llama_tied", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3"]
FIXED = OptimConfig(name="sgd", learning_rate=0.0, weight_decay=0.0, max_grad_norm=0.0)


def check(found: dict[str, Any], expected: tuple[float, float, dict[str, Tensor]], *, what: object = "") -> None:
    loss, norm, tensors = expected
    assert found["loss"] == pytest.approx(loss, rel=1e-6), what
    assert found["norm"] == pytest.approx(norm, rel=1e-5), what
    distance, name = worst(found["gradients"], tensors)
    assert distance < 1e-5, (what, name)


def check_family(ranks: RankPool, folder: Path, name: str, *, world: int, batch: dict[str, Tensor], stage: int) -> None:
    expected = Reference(family_model(name)).step(batch)
    for found in ranks.run(
        world,
        gradients,
        folder=save_family(name, folder),
        config=settings(stage=stage, optim=FIXED),
        layout=Layout(cp_size=world),
        attentions=[attention(one) for one in SPREAD],
        steps=[batch],
        accumulation=2,
    ):
        for way, (result,) in zip(SPREAD, found, strict=True):
            check(result, expected, what=way)


@pytest.mark.parametrize("name", FAMILIES)
def test_family_equals_transformers(ranks: RankPool, tmp_path: Path, name: str) -> None:
    """Two micro-batches of two rows: every way to spread attention over two ranks, ZeRO-2 or ZeRO-3."""
    stage = 2 + FAMILIES.index(name) % 2
    check_family(ranks, tmp_path, name, world=2, batch=packed(0, rows=4), stage=stage)


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text"])
def test_four_ranks_equal_transformers(ranks: RankPool, tmp_path: Path, name: str) -> None:
    """More ranks than key heads: those are sent to two ranks each by ulysses; hybrid is a ring of pairs."""
    check_family(ranks, tmp_path, name, world=4, batch=packed(1, rows=4), stage=1)


@pytest.mark.parametrize("name", list(STRETCHED))
def test_rotary_embeddings_that_depend_on_the_length_see_the_whole_row(
    ranks: RankPool, tmp_path: Path, name: str
) -> None:
    """13 positions of a model made for 8: the rank with the first of them must stretch its angles too."""
    batch = packed(0, rows=4)
    batch = {key: values[1:2].repeat(4, 1) for key, values in batch.items()}
    batch["input_ids"][1:] = packed(1, rows=4)["input_ids"][1:]
    batch["labels"][:, 8:-1] = batch["input_ids"][:, 9:]
    batch["labels"][:, :8] = -100
    check_family(ranks, tmp_path, name, world=2, batch=batch, stage=2)


SGD = OptimConfig(name="sgd", learning_rate=0.5, weight_decay=0.0, max_grad_norm=0.3)


def zero_settings(stage: int, way: str) -> TrainConfig:
    config = settings(stage=stage, optim=SGD)
    config.attention = attention(way)
    return config


CHECKPOINTED = {
    "ring": [Checkpointing.full, Checkpointing.every_n, Checkpointing.selective],
    "ulysses": [Checkpointing.selective],
    "needed_only": [Checkpointing.full],
}


@pytest.mark.parametrize("way", list(CHECKPOINTED))
def test_activation_checkpointing_is_bit_equal_to_none(ranks: RankPool, tmp_path: Path, way: str) -> None:
    """Under ZeRO-3: recomputation sends what the forward pass sent, in the same order on all ranks."""
    folder = save_family("gemma3_text", tmp_path)  # mixed sliding and full layers, tied embeddings
    results = {}
    for mode in [Checkpointing.none, *CHECKPOINTED[way]]:
        config = zero_settings(3, way)
        config.activation = ActivationConfig(checkpointing=mode)
        results[mode] = ranks.run(
            2,
            train,
            folder=folder,
            config=config,
            layout=Layout(cp_size=2),
            steps=[packed(step, rows=4) for step in range(2)],
            accumulation=2,
        )[0]
    truth = results.pop(Checkpointing.none)
    assert list(results) == CHECKPOINTED[way]
    for mode, result in results.items():
        assert (result["loss"], result["norm"]) == (truth["loss"], truth["norm"]), mode
        for got, want in zip(result["gradients"], truth["gradients"], strict=True):
            assert all(torch.equal(got[name], want[name]) for name in want), mode
        assert all(torch.equal(result["weights"][name], truth["weights"][name]) for name in truth["weights"]), mode


def test_selective_checkpointing_keeps_attention(ranks: RankPool, tmp_path: Path) -> None:
    """The others run it a second time in the backward pass."""
    folder, ways = save_family("gemma3_text", tmp_path), [attention(way) for way in ("ring", "ulysses", "needed_only")]
    for found in ranks.run(2, attention_runs, folder=folder, attentions=ways, batch=packed(0, rows=2)):
        for runs in found:
            once = runs[Checkpointing.none]
            assert once >= 3, "one for each layer at least"
            assert runs == {
                Checkpointing.none: once,
                Checkpointing.full: 2 * once,
                Checkpointing.every_n: 2 * once,
                Checkpointing.selective: once,
            }
