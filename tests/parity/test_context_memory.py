"""Memory of long packed rows (R04): about linear in the tokens, on one rank and on two."""

from pathlib import Path

import pytest

from tests.families import save_family
from tests.parity.context_memory_ranks import allocated
from tests.parity.context_model_ranks import attention
from tests.pool import RankPool

WAYS = {"llama": ["ulysses", "ring", "allgather", "needed_only"], "mistral": ["ring"], "gemma2": ["ring"]}
LENGTHS = [1024, 4096]


@pytest.mark.parametrize("name", list(WAYS))
def test_r04_no_square_of_the_length(ranks: RankPool, tmp_path: Path, name: str) -> None:
    """mlx-vlm#1355: four times the tokens hold four times the bytes; the smallest mask of the row, a byte for each pair
    of tokens, would be sixteen times one. Two ranks hold about half each."""
    folder = save_family(name, tmp_path)
    (alone,) = ranks.run(1, allocated, folder=folder, attentions=[None], lengths=LENGTHS)
    ways = [attention(way) for way in WAYS[name]]
    shared = ranks.run(2, allocated, folder=folder, attentions=ways, lengths=LENGTHS)
    for found in (*alone, *(one for rank in shared for one in rank)):
        (_, before), (largest, after) = found
        assert after < 4.5 * before
        assert largest < LENGTHS[-1] ** 2
    (_, (_, whole)) = alone[0]
    assert all(found[-1][1] < 0.65 * whole for rank in shared for found in rank)
