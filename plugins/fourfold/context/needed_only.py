"""needed_only: each rank gets the stretches of keys and values that some query of it may see, and no others.

As allgather, with an uneven all-to-all instead of the gather, so that documents on one rank, windows and what lies in the
future cost nothing. Sent by a rank for a layer: 2 B K D elements for each of its tokens and each other rank that needs it;
e bytes each forward, e + a backward (a: bytes of a sum). For one document in zigzag order 3/4 of allgather's, contiguous
half; for documents that lie whole on a rank nothing. Held beside the own shard while a layer computes: the own and the
received, at the exchange what is received or given once more.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from fourfold.context.balance import zigzag
from fourfold.context.rectangles import Interval, Rectangle, Stretches, rectangles
from fourfold.context.sharding import RowShares, Sharding
from fourfold.context.strategy import AttentionShape, OneGroup, Options, counted
from fourfold.context.work import Work, owners

if TYPE_CHECKING:
    from torch import Tensor

    from fourfold.context.kernels.kernel import Spec


class Exchange(NamedTuple):
    """Of one row, for one rank."""

    rectangles: list[Rectangle]  # of the own queries, and the own keys followed by those received, in rank order
    give: list[list[Interval]]  # to each rank: local positions; to itself none
    take: list[int]  # from each rank: tokens


class NeededOnly(OneGroup):
    name: ClassVar[str] = "needed_only"

    @classmethod
    def sent_bytes(cls, shape: AttentionShape, *, cp_size: int, rank: int, options: Options) -> dict[str, int]:
        """For rows of one document each, in zigzag order."""
        documents = ((0, shape.length),)
        row = RowShares(zigzag(shape.length, cp_size, documents), documents)
        return exchanged_bytes([exchange(row, rank=rank, window=None)] * shape.rows, shape=shape)

    @classmethod
    def work(
        cls, shape: AttentionShape, *, cp_size: int, rank: int, options: Options, balance: str, window: int | None
    ) -> Work:
        row = RowShares(owners(cls.balances, length=shape.length, ranks=cp_size, balance=balance), ((0, shape.length),))
        plan = exchange(row, rank=rank, window=window)
        token = 2 * shape.rows * shape.kv_heads * shape.head_dim * (shape.itemsize + shape.sum_itemsize)
        tokens = shape.length // cp_size
        found = counted(plan.rectangles, shape=shape, tokens=tokens, window=window)
        again = found.queries if shape.rows > 1 else 0  # put together row by row, in another order than the layer wants
        return replace(found, again=again, buffers=token * (tokens + sum(plan.take)))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, spec: Spec, sharding: Sharding) -> Tensor:
        from fourfold.context.autograd.needed_only import NeededOnlyAttention

        plan = sharding.plan(
            ("needed_only", spec.window),
            lambda: [exchange(row, rank=self._comm.rank, window=spec.window) for row in sharding.rows],
        )
        out: Tensor = NeededOnlyAttention.apply(q, k, v, self._comm, self._kernel, plan, spec)
        return out


def exchanged_bytes(plan: list[Exchange], *, shape: AttentionShape) -> dict[str, int]:
    """What a rank with this plan sends for one layer."""
    token = 2 * shape.kv_heads * shape.head_dim
    given = token * sum(total_length(part) for row in plan for part in row.give)
    taken = token * sum(sum(row.take) for row in plan)
    return {
        "kv": given * shape.itemsize,
        "kv_backward": given * shape.itemsize,
        "d_kv_backward": taken * shape.sum_itemsize,
    }


def exchange(row: RowShares, *, rank: int, window: int | None) -> Exchange:
    ranks = range(len(row.ownership))
    wanted = [_needed(row, of=rank, held=other, window=window) if other != rank else [] for other in ranks]
    give = [_needed(row, of=other, held=rank, window=window) if other != rank else [] for other in ranks]
    keys = list(row.ownership[rank])
    for other in ranks:
        keys += _global(wanted[other], row.ownership[other])
    found = rectangles(row.ownership[rank], keys, documents=row.documents, window=window)
    return Exchange(found, give, [total_length(part) for part in wanted])


def _needed(row: RowShares, *, of: int, held: int, window: int | None) -> list[Interval]:
    """Local positions of rank `held` that some query of rank `of` sees."""
    found = rectangles(row.ownership[of], row.ownership[held], documents=row.documents, window=window)
    union: list[Interval] = []
    for start, end in sorted((one.k0, one.k1) for one in found):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(end, union[-1][1]))
        else:
            union.append((start, end))
    return union


def _global(local: list[Interval], stretches: Stretches) -> list[Interval]:
    """Local positions of a rank as the global ones of its stretches, in the same order."""
    found: list[Interval] = []
    for start, end in local:
        first = 0
        for begin, stop in stretches:
            low, high = max(start, first), min(end, first + stop - begin)
            if low < high:
                found.append((begin + low - first, begin + high - first))
            first += stop - begin
    return found


def total_length(stretches: Stretches) -> int:
    return sum(end - start for start, end in stretches)
