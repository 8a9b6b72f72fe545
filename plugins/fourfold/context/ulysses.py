"""ulysses: all-to-all from all heads of S/P tokens to all S tokens of some heads, attention there, and back.

Jacobs et al. 2023 (arXiv:2309.14509), for any number of heads: rank r has query heads [h_r, h_r+1), as evenly as they
divide, and the key heads that those look at; a key head that several ranks need goes to each of them, and its gradients
are summed where it came from. Padded to nothing, repeated nowhere.
Sent by rank r for a layer, forward, with n_i query and m_i key heads on rank i, x = B S/P D e bytes a head:
    q, k, v to heads   sum over i != r of (n_i + 2 m_i) x
    out to tokens      (P-1) n_r x
and the same in the backward pass, the other way round: (P-1) (n_r + 2 m_r) x and the sum over i != r of n_i x.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from fourfold.context.local import local_attention
from fourfold.context.sharding import Sharding, everything
from fourfold.context.strategy import AttentionShape, OneGroup, Options
from fourfold.context.work import Work, alone

if TYPE_CHECKING:
    from torch import Tensor

    from fourfold.context.kernels.kernel import Spec

Heads = tuple[int, int]  # [first, last)


class Ulysses(OneGroup):
    name: ClassVar[str] = "ulysses"
    balances = ("contiguous",)  # heads are split: any other order of tokens would only cost

    @classmethod
    def refusals(cls, *, cp_size: int, heads: int, kv_heads: int, options: Options) -> Iterator[str]:
        if cp_size > heads:
            yield (
                f"attention=ulysses splits {heads} query heads over cp_size={cp_size} ranks, so that some would have none: "
                f"use cp_size={heads} or less, or attention=ring, allgather or hybrid."
            )

    @classmethod
    def sent_bytes(cls, shape: AttentionShape, *, cp_size: int, rank: int, options: Options) -> dict[str, int]:
        queries, keys = head_split(shape.heads, shape.kv_heads, ranks=cp_size)
        head = shape.rows * shape.length // cp_size * shape.head_dim * shape.itemsize
        counts = [(last - first, 2 * (b - a)) for (first, last), (a, b) in zip(queries, keys, strict=True)]
        others = [one for member, one in enumerate(counts) if member != rank]
        own = counts[rank]
        return {
            "heads": sum(n + m for n, m in others) * head,
            "tokens": (cp_size - 1) * own[0] * head,
            "heads_backward": (cp_size - 1) * sum(own) * head,
            "tokens_backward": sum(n for n, _ in others) * head,
        }

    @classmethod
    def work(
        cls, shape: AttentionShape, *, cp_size: int, rank: int, options: Options, balance: str, window: int | None
    ) -> Work:
        queries, keys = head_split(shape.heads, shape.kv_heads, ranks=cp_size)
        (a, b), (c, d) = queries[rank], keys[rank]
        found = alone(rows=shape.rows, length=shape.length, heads=b - a, kv_heads=d - c, window=window)
        sent = shape.head_dim * shape.itemsize * (found.queries + 2 * found.keys)
        return replace(found, again=shape.rows * shape.heads * shape.length // cp_size, buffers=2 * sent)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, spec: Spec, sharding: Sharding) -> Tensor:
        from fourfold.context.autograd.ulysses import Split, over_heads

        rows = sharding.plan(
            ("ulysses", spec.window), lambda: sharding.rectangles(everything, everything, window=spec.window)
        )
        heads = Split(q.shape[1], k.shape[1], comm=self._comm)
        attention = partial(local_attention, kernel=self._kernel, rows=rows, spec=spec)
        return over_heads(q, k, v, heads=heads, attention=attention)


def head_split(heads: int, kv_heads: int, *, ranks: int) -> tuple[list[Heads], list[Heads]]:
    """(query heads, key heads) of each rank; the latter overlap where a key head serves queries of several ranks."""
    each, more = divmod(heads, ranks)
    firsts = [rank * each + min(rank, more) for rank in range(ranks + 1)]
    group = heads // kv_heads
    queries = list(itertools.pairwise(firsts))
    return queries, [(first // group, (last - 1) // group + 1) for first, last in queries]
