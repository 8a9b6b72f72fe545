"""needed_only: each rank gets the stretches of keys and values that some query of it may see, and no others.

As allgather, with an uneven all-to-all instead of the gather, so that documents on one rank, windows and what lies in the
future cost nothing. Sent by a rank for a layer: 2 B K D elements for each of its tokens and each other rank that needs it;
e bytes each forward, e + a backward (a: bytes of a sum). For one document in zigzag order 3/4 of allgather's, contiguous
half; for documents that lie whole on a rank nothing. Held beside the own shard while a layer computes: the own and the
received, at the exchange what is received or given once more.
"""

from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fourfold.context.balance import zigzag
from fourfold.context.comm import Comm
from fourfold.context.kernels.kernel import Kernel, Partial, Spec, attend, attend_backward, wide
from fourfold.context.rectangles import Interval, Rectangle, Stretches, rectangles
from fourfold.context.sharding import RowShares, Sharding
from fourfold.context.strategy import AttentionShape, OneGroup, Options, counted
from fourfold.context.work import Work, owners


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
        plan = sharding.plan(
            ("needed_only", spec.window),
            lambda: [exchange(row, rank=self._comm.rank, window=spec.window) for row in sharding.rows],
        )
        out: Tensor = _NeededOnly.apply(q, k, v, self._comm, self._kernel, plan, spec)
        return out


def exchanged_bytes(plan: list[Exchange], *, shape: AttentionShape) -> dict[str, int]:
    """What a rank with this plan sends for one layer."""
    token = 2 * shape.kv_heads * shape.head_dim
    given = token * sum(_length(part) for row in plan for part in row.give)
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
    return Exchange(found, give, [_length(part) for part in wanted])


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


def _length(stretches: Stretches) -> int:
    return sum(end - start for start, end in stretches)


class _NeededOnly(torch.autograd.Function):
    """Keys and values of a row are [2, tokens, K, D] here: what is sent and received is then whole stretches of it."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, comm: Comm, kernel: Kernel, plan: list[Exchange], spec: Spec
    ) -> Tensor:
        received = _received(k, v, comm=comm, plan=plan, purpose="kv")
        found = [
            attend(kernel, q[row : row + 1], *_apart(kv), [one.rectangles], spec)
            for row, (one, kv) in enumerate(zip(plan, received, strict=True))
        ]
        whole = found[0] if len(found) == 1 else _together(found)
        out = whole.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, whole.lse)
        ctx.rest = (comm, kernel, plan, spec)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        comm, kernel, plan, spec = ctx.rest
        d_q = torch.zeros(q.shape, dtype=wide(q.dtype), device=q.device)
        d_kvs = []
        received = _received(k, v, comm=comm, plan=plan, purpose="kv_backward")
        for row, (one, kv) in enumerate(zip(plan, received, strict=True)):
            this = slice(row, row + 1)
            d_kvs.append(torch.zeros(kv.shape, dtype=wide(q.dtype), device=q.device))
            into = (d_q[this], *_apart(d_kvs[-1]))
            attend_backward(
                kernel,
                grads[0][this],
                q[this],
                *_apart(kv),
                out[this],
                lse[this],
                [one.rectangles],
                spec,
                into=into,
            )
        d_k, d_v = _sent_home(d_kvs, comm=comm, plan=plan, tokens=k.shape[2])
        return d_q.to(q.dtype), d_k.to(q.dtype), d_v.to(q.dtype), None, None, None, None


def _apart(kv: Tensor) -> tuple[Tensor, Tensor]:
    """[2, T, K, D] -> twice [1, K, T, D], views."""
    return kv[0].transpose(0, 1)[None], kv[1].transpose(0, 1)[None]


def _received(k: Tensor, v: Tensor, *, comm: Comm, plan: list[Exchange], purpose: str) -> list[Tensor]:
    """For each row [2, s + taken, K, D]: the own keys and values, then the others' in rank order."""
    parts = [
        [
            x[row, :, start:end].transpose(0, 1)
            for row, one in enumerate(plan)
            for x in (k, v)
            for start, end in [(0, 0), *one.give[to]]
        ]
        for to in range(comm.size)
    ]
    takes = [[one.take[member] for one in plan] for member in range(comm.size)]
    received = _exchanged(parts, takes, like=k, comm=comm, purpose=purpose)
    wholes = []
    for row, one in enumerate(plan):
        segments = [k.shape[2], *one.take]
        whole = k.new_empty(2, sum(segments), k.shape[1], k.shape[3])
        own, *others = whole.split(segments, dim=1)
        for target, x in zip(own, (k, v), strict=True):
            target.copy_(x[row].transpose(0, 1))
        for target, part in zip(others, received, strict=True):
            target.copy_(part[row])
        wholes.append(whole)
    return wholes


def _sent_home(d_kvs: list[Tensor], *, comm: Comm, plan: list[Exchange], tokens: int) -> Tensor:
    """Gradients of the own keys and values, [2, B, K, s, D], with what the other ranks found."""
    segments = [d_kv.split([tokens, *one.take], dim=1) for d_kv, one in zip(d_kvs, plan, strict=True)]
    parts = [[segment[1 + to] for segment in segments] for to in range(comm.size)]
    gives = [[_length(one.give[member]) for one in plan] for member in range(comm.size)]
    received = _exchanged(parts, gives, like=d_kvs[0][0].transpose(0, 1)[None], comm=comm, purpose="d_kv_backward")
    for member, rows in enumerate(received):
        for segment, one, found in zip(segments, plan, rows, strict=True):
            at = 0
            for start, end in one.give[member]:
                segment[0][:, start:end] += found[:, at : at + end - start]
                at += end - start
    return torch.stack([segment[0] for segment in segments], dim=1).transpose(2, 3)


def _exchanged(
    parts: list[list[Tensor]], tokens: list[list[int]], *, like: Tensor, comm: Comm, purpose: str
) -> list[list[Tensor]]:
    """From each rank, for each row, [2, tokens[rank][row], K, D]; nothing from itself."""
    kv_heads, size = like.shape[1], like.shape[3]
    token = 2 * kv_heads * size
    received = comm.all_to_all(parts, [(token * sum(counts),) for counts in tokens], purpose=purpose)
    return [
        [part.view(2, -1, kv_heads, size) for part in flat.split([token * count for count in counts])]
        for flat, counts in zip(received, tokens, strict=True)
    ]


def _together(found: list[Partial]) -> Partial:
    return Partial(torch.cat([one.out for one in found]), torch.cat([one.lse for one in found]))
