"""Memory of long packed rows (R04): about linear in the tokens, on one rank and on two. Tensors of one layer, exactly."""

from pathlib import Path

import pytest
import torch

from tests.families import save_family
from tests.parity.context_memory_ranks import allocated, held
from tests.parity.context_model_ranks import attention
from tests.parity.context_ranks import STRATEGIES, Case
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_holds_its_share_and_the_keys_and_values_of_the_strategy(ranks: RankPool, dtype: torch.dtype) -> None:
    """Saved: q, k, v, out and lse of as many tokens or heads as a rank has, to the byte. In the forward pass beside the
    inputs: out and lse, keys and values of all ranks (allgather) or of two (ring), and while partial results are merged
    one of them in fp32 and four lse."""
    world, kv_blocks = 3, {"allgather": 3, "ring": 2}
    shape = {"length": 384, "heads": 6, "kv_heads": 6, "head_dim": 16}
    names = [name for name in STRATEGIES if name != "local"]
    for documents in ((384,), (100, 284)):
        cases = [Case(name, (documents,), dtype=dtype, **shape) for name in names]
        for found in ranks.run(world, held, cases=cases):
            for name, (bytes_held, out, block) in zip(names, found, strict=True):
                lse, wide_out = out // dtype.itemsize // 16 * 4, out // dtype.itemsize * 4
                assert bytes_held.saved == 2 * out + block + lse, (name, documents)
                if name in kv_blocks:
                    figure = out + lse + kv_blocks[name] * block
                    assert bytes_held.most <= figure + wide_out + 4 * lse, (name, documents)
