"""hybrid: Ulysses over U neighbouring ranks, a ring or a gather over the P/U groups of them (USP, arXiv:2405.07719).

Heads can be split over no more ranks than there are; what is left of P goes round the outer group, with 1/U of the
heads on each rank. cp rank = outer member x U + inner member. A member's share of the tokens (balance.py, over P/U members)
is cut evenly over its U ranks, and put together again by the all-to-all.
Sent by a rank for a layer: Ulysses' bytes over U ranks for the S U/P tokens of a member, and the outer strategy's over P/U
members for the rank's own heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from fourfold.context.allgather import AllGather
from fourfold.context.balance import Ownership
from fourfold.context.rectangles import Interval, Stretches
from fourfold.context.ring import Ring
from fourfold.context.sharding import Sharding
from fourfold.context.strategy import AttentionShape, ContextStrategy, Options
from fourfold.context.ulysses import Ulysses, head_split
from fourfold.context.work import Work

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import Tensor

    from fourfold.context.kernels.kernel import Kernel, Spec

Outer = type[Ring] | type[AllGather]
OUTER: dict[str, Outer] = {"ring": Ring, "allgather": AllGather}


class Hybrid(ContextStrategy):
    name: ClassVar[str] = "hybrid"

    def __init__(
        self, group: dist.ProcessGroup, *, kernel: Kernel, heads: int, kv_heads: int, options: Options
    ) -> None:
        """Collective over the cp group: it makes an inner and an outer group of it."""
        import torch.distributed as dist

        from fourfold.context.comm import Comm
        from fourfold.groups import new_group

        ranks = dist.get_process_group_ranks(group)
        self._inner_size = inner_size(cp_size=len(ranks), heads=heads, kv_heads=kv_heads, options=options)
        outer, inner = divmod(dist.get_rank(group), self._inner_size)
        first = outer * self._inner_size
        self._inner = Comm(new_group(ranks[first : first + self._inner_size], like=group))
        members = new_group(ranks[inner :: self._inner_size], like=group)
        self._outer = OUTER[options["outer"]](members, kernel=kernel, heads=heads, kv_heads=kv_heads, options=options)

    @classmethod
    def refusals(cls, *, cp_size: int, heads: int, kv_heads: int, options: Options) -> Iterator[str]:
        if options["outer"] not in OUTER:
            yield f"attention.outer={options['outer']}: use {' or '.join(OUTER)}."
        legal = [str(size) for size in range(1, min(cp_size, heads) + 1) if cp_size % size == 0]
        if options["ulysses_size"] not in ("auto", *legal):
            yield (
                f"attention.ulysses_size={options['ulysses_size']} with cp_size={cp_size} and {heads} query heads: use auto "
                f"or one of {', '.join(legal)}."
            )

    @classmethod
    def sent_bytes(cls, shape: AttentionShape, *, cp_size: int, rank: int, options: Options) -> dict[str, int]:
        inner = inner_size(cp_size=cp_size, heads=shape.heads, kv_heads=shape.kv_heads, options=options)
        outer, member = cp_size // inner, rank % inner
        queries, keys = head_split(shape.heads, shape.kv_heads, ranks=inner)
        (a, b), (c, d) = queries[member], keys[member]
        share = shape.resized(length=shape.length // outer)
        own = shape.resized(heads=b - a, kv_heads=d - c)
        within = Ulysses.sent_bytes(share, cp_size=inner, rank=member, options=options) if inner > 1 else {}
        across = OUTER[options["outer"]].sent_bytes(own, cp_size=outer, rank=rank // inner, options=options)
        return {**within, **(across if outer > 1 else {})}

    @classmethod
    def work(
        cls, shape: AttentionShape, *, cp_size: int, rank: int, options: Options, balance: str, window: int | None
    ) -> Work:
        inner = inner_size(cp_size=cp_size, heads=shape.heads, kv_heads=shape.kv_heads, options=options)
        queries, keys = head_split(shape.heads, shape.kv_heads, ranks=inner)
        (a, b), (c, d) = queries[rank % inner], keys[rank % inner]
        found = OUTER[options["outer"]].work(
            shape.resized(heads=b - a, kv_heads=d - c),
            cp_size=cp_size // inner,
            rank=rank // inner,
            options=options,
            balance=balance,
            window=window,
        )
        return replace(found, again=shape.rows * shape.heads * shape.length // cp_size if inner > 1 else 0)

    def ownership(self, length: int, documents: Stretches, *, balance: str, ranks: int) -> Ownership:
        inner = self._inner_size
        members = super().ownership(length, documents, balance=balance, ranks=ranks // inner)
        return tuple(part for held in members for part in _evenly(held, parts=inner))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, spec: Spec, sharding: Sharding) -> Tensor:
        from fourfold.context.autograd.ulysses import Split, over_heads

        members = sharding.plan("hybrid", lambda: sharding.merged(self._inner_size))
        heads = Split(q.shape[1], k.shape[1], comm=self._inner)

        def outer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self._outer.attend(q, k, v, spec, members)

        return over_heads(q, k, v, heads=heads, attention=outer)

    def sent(self) -> dict[str, int]:
        return {**self._inner.sent, **self._outer.sent()}


def inner_size(*, cp_size: int, heads: int, kv_heads: int, options: Options) -> int:
    """U: as wanted, or the largest divisor of cp_size that is no more than the key heads."""
    if options["ulysses_size"] != "auto":
        return int(options["ulysses_size"])
    return max(size for size in range(1, min(cp_size, kv_heads) + 1) if cp_size % size == 0)


def _evenly(held: tuple[Interval, ...], *, parts: int) -> Iterator[tuple[Interval, ...]]:
    """Stretches cut into `parts` of equally many tokens, in order."""
    each = sum(end - start for start, end in held) // parts
    rest = list(held)
    for _ in range(parts):
        part: list[Interval] = []
        room = each
        while room:
            start, end = rest.pop(0)
            taken = min(room, end - start)
            part.append((start, start + taken))
            if taken < end - start:
                rest.insert(0, (start + taken, end))
            room -= taken
        yield tuple(part)
