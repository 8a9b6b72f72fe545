"""Whole models cut over tp ranks, against one process that sees each document alone."""

from typing import Any

import pytest
from torch import Tensor

from fourfold.schema import TensorConfig
from tests.families import family_model
from tests.parity.context_model_ranks import packed
from tests.parity.tensor_ranks import family_gradients
from tests.pool import RankPool
from tests.reference import Reference, worst

FAMILIES = ["llama", "llama_tied", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text", "phi3"]
WAYS = [TensorConfig(), TensorConfig(sequence_parallel=False), TensorConfig(overlap=False, regather=True)]


def check(found: dict[str, Any], expected: tuple[float, float, dict[str, Tensor]], *, what: object) -> None:
    loss, _, tensors = expected
    assert found["loss"] == pytest.approx(loss, rel=1e-6), what
    distance, name = worst(found["gradients"], tensors)
    assert distance < 1e-5, (what, name)


def check_families(ranks: RankPool, size: int, names: list[str], changes: dict[str, Any]) -> None:
    batch = packed(0, rows=4)
    expected = [Reference(family_model(name, **changes)).step(batch) for name in names]
    for results in ranks.run(size, family_gradients, names=names, changes=changes, settings=WAYS, batch=batch):
        found = iter(results)
        for name, one in zip(names, expected, strict=True):
            for way in WAYS:
                check(next(found), one, what=(name, way))


@pytest.mark.parametrize("names", [FAMILIES[:3], FAMILIES[3:6], FAMILIES[6:]], ids=lambda names: "-".join(names))
def test_two_ranks_equal_transformers(ranks: RankPool, names: list[str]) -> None:
    """Rows of 13 tokens, a vocabulary of 95: neither divides."""
    check_families(ranks, 2, names, {"vocab_size": 97})


@pytest.mark.parametrize("names", [FAMILIES[:4], FAMILIES[4:8]], ids=lambda names: "-".join(names))
def test_more_ranks_than_key_heads_equal_transformers(ranks: RankPool, names: list[str]) -> None:
    check_families(ranks, 4, names, {"num_key_value_heads": 2})


def test_one_key_head_on_four_ranks_equals_transformers(ranks: RankPool) -> None:
    check_families(ranks, 4, ["llama", "gemma3_text"], {"num_key_value_heads": 1})


def test_as_many_key_heads_as_ranks_equal_transformers(ranks: RankPool) -> None:
    check_families(ranks, 4, ["llama_tied", "phi3"], {"num_key_value_heads": 4, "attention_bias": True})
