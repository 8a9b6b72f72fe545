"""What one rank holds and computes in the attention of a layer, counted without computing it. Pure: imports no torch."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from fourfold.context.balance import BALANCES, Ownership, choose
from fourfold.context.rectangles import Rectangle, rectangles


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """Of one layer and one micro-batch over all cp ranks."""

    rows: int  # B
    length: int  # S
    heads: int  # H
    kv_heads: int  # K
    head_dim: int  # D
    itemsize: int  # bytes of an activation
    sum_itemsize: int = 4  # bytes of a gradient that is summed over ranks: fp32

    def resized(self, **changes: int) -> "AttentionShape":
        return replace(self, **changes)

    @property
    def kv_elements(self) -> int:
        """Of k and v of all tokens."""
        return 2 * self.rows * self.kv_heads * self.length * self.head_dim


@dataclass(frozen=True, kw_only=True)
class Work:
    """For one micro-batch, in heads x tokens of this rank: times head_dim they are elements."""

    queries: int  # kept for backward twice, as queries and as output
    keys: int  # kept twice, as keys and as values
    pairs: int  # heads x (query, key) pairs that the mask allows
    called: int  # queries of all calls of the kernel, whose outputs selective checkpointing keeps
    again: int = 0  # outputs kept once more, in another order
    buffers: int = 0  # bytes held while the layer's backward pass computes: what came from others, sums for them

    @classmethod
    def of(
        cls, found: Iterable[Rectangle], *, rows: int, heads: int, kv_heads: int, tokens: int, window: int | None
    ) -> "Work":
        """The rectangles of one of `rows` rows alike, of whose `tokens` queries and keys are kept."""
        found = list(found)
        return cls(
            queries=rows * heads * tokens,
            keys=rows * kv_heads * tokens,
            pairs=rows * heads * sum(one.pairs(window) for one in found),
            called=rows * heads * sum(one.q1 - one.q0 for one in found),
        )


def alone(*, rows: int, length: int, heads: int, kv_heads: int, window: int | None) -> Work:
    """Of a rank that has whole rows, of one document each."""
    row = [(0, length)]
    found = rectangles(row, row, documents=row, window=window)
    return Work.of(found, rows=rows, heads=heads, kv_heads=kv_heads, tokens=length, window=window)


def gathered(
    shape: AttentionShape, *, cp_size: int, rank: int, among: Sequence[str], balance: str, window: int | None
) -> Work:
    """Of a rank that has its own queries and gathers all keys and values, in the backward pass with the sums of their
    gradients."""
    mine = owners(among, length=shape.length, ranks=cp_size, balance=balance)
    everything = [stretch for held in mine for stretch in held]
    found = Work.of(
        rectangles(mine[rank], everything, documents=((0, shape.length),), window=window),
        rows=shape.rows,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        tokens=shape.length // cp_size,
        window=window,
    )
    received = shape.kv_elements * (shape.itemsize + shape.sum_itemsize) if cp_size > 1 else 0
    return replace(found, buffers=received)


def owners(among: Sequence[str], *, length: int, ranks: int, balance: str) -> Ownership:
    """Who holds which positions of a row of one document; `balance` may be auto, the first that is about as good as any."""
    document = ((0, length),)
    name = choose(length, ranks, document, among=among) if balance == "auto" else balance
    return BALANCES[name](length, ranks, document)


def unit(cp_size: int, *, parts: int = 1) -> int:
    """Rows are padded to a multiple of it: two chunks for each rank, and a rank's tokens divide into `parts`."""
    return math.lcm(2 * cp_size if cp_size > 1 else 1, cp_size * parts)
