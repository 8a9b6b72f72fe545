"""Parallel layers against their plain twins, in float64."""

from itertools import product

import pytest
import torch
from torch import Tensor

from tests.parity.tensor_ranks import layers, plain_layers
from tests.pool import RankPool

ROWS, LENGTH, WIDTH, INNER, VOCABULARY = 2, 12, 6, 8, 13
WAYS = [
    {"sequence_parallel": parallel, "overlap": overlap, "regather": regather}
    for parallel, overlap, regather in product([True, False], repeat=3)
]


@pytest.fixture(scope="module")
def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return {
        "embedding.weight": normal(VOCABULARY, WIDTH),
        "gate.weight": normal(INNER, WIDTH),
        "gate.bias": normal(INNER),
        "up.weight": normal(INNER, WIDTH),
        "down.weight": normal(WIDTH, INNER),
        "down.bias": normal(WIDTH),
        "ids": torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator),
        "upstream": normal(ROWS, LENGTH, WIDTH),
    }


@pytest.mark.parametrize("size", [2, 4])
def test_every_layer_equals_its_twin(ranks: RankPool, tensors: dict[str, Tensor], size: int) -> None:
    """Outputs, all gradients, and the way back: 13 tokens of a vocabulary on 2 and 4 ranks have padding."""
    plain = plain_layers(tensors)
    hidden = plain["embedding"](tensors["ids"])
    out = plain["down"](torch.tanh(plain["gate"](hidden)) * plain["up"](hidden))
    out.backward(tensors["upstream"])
    for results in ranks.run(size, layers, tensors=tensors, ways=WAYS):
        for way, found in zip(WAYS, results, strict=True):
            assert torch.allclose(found["out"], out, rtol=1e-12, atol=1e-12), way
            for name, layer in plain.items():
                for key, parameter in layer.named_parameters():
                    got = found["gradients"][f"{name}.{key}"]
                    assert torch.allclose(got, parameter.grad, rtol=1e-12, atol=1e-12), (way, name, key)
                    assert torch.equal(found["again"][f"{name}.{key}"], parameter), (way, name, key)


def test_overlap_and_regather_change_no_number(ranks: RankPool, tensors: dict[str, Tensor]) -> None:
    for results in ranks.run(2, layers, tensors=tensors, ways=WAYS):
        by_way = {tuple(way.values()): found for way, found in zip(WAYS, results, strict=True)}
        for (parallel, overlap, regather), found in by_way.items():
            truth = by_way[parallel, False, False]
            assert torch.equal(found["out"], truth["out"])
            for name, gradient in found["gradients"].items():
                assert torch.equal(gradient, truth["gradients"][name]), (parallel, overlap, regather, name)
