"""How the rows of one micro-batch lie on the cp ranks. It travels with the batch as an argument of the forward pass, so
that recomputation and several micro-batches in flight each find their own."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fourfold.context.balance import Ownership
from fourfold.context.rectangles import Interval, Stretches, rectangles

if TYPE_CHECKING:  # plans need RowShares, and start without it
    import torch
    from torch import Tensor

    from fourfold.context.kernels.kernel import Rows


@dataclass(frozen=True)
class RowShares:
    """One row: who holds which positions, and its documents."""

    ownership: Ownership
    documents: tuple[Interval, ...]


@dataclass(frozen=True)
class Sharding:
    rows: tuple[RowShares, ...]
    _plans: dict[Hashable, Any] = field(default_factory=dict)

    def plan(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """`make()`, once for all layers that ask by the same key."""
        if key not in self._plans:
            self._plans[key] = make()
        return self._plans[key]

    def merged(self, size: int) -> Sharding:
        """As if every `size` neighbouring ranks were one."""
        return Sharding(
            tuple(
                RowShares(
                    tuple(
                        tuple(stretch for held in row.ownership[first : first + size] for stretch in held)
                        for first in range(0, len(row.ownership), size)
                    ),
                    row.documents,
                )
                for row in self.rows
            )
        )

    def rectangles(
        self,
        queries: Callable[[Ownership], Stretches],
        keys: Callable[[Ownership], Stretches],
        *,
        window: int | None,
    ) -> Rows:
        """For each row, those of the queries and keys that the functions pick from its ownership."""
        return [
            rectangles(queries(row.ownership), keys(row.ownership), documents=row.documents, window=window)
            for row in self.rows
        ]


def everything(ownership: Ownership) -> Stretches:
    """All positions, in the order of ranks."""
    return [stretch for held in ownership for stretch in held]


def held_by(rank: int) -> Callable[[Ownership], Stretches]:
    return lambda ownership: ownership[rank]


def documents_of(document_ids: Tensor) -> tuple[Interval, ...]:
    """Documents of one row, document_ids[S] with -1 where it is padded."""
    import torch

    ids, counts = torch.unique_consecutive(document_ids, return_counts=True)
    ends = counts.cumsum(0).tolist()
    starts = [0, *ends]
    return tuple((start, end) for start, end, one in zip(starts, ends, ids.tolist(), strict=False) if one >= 0)


def positions(stretches: Sequence[Interval], *, device: torch.device | None = None) -> Tensor:
    """Global positions in local order, int64."""
    import torch

    return torch.cat([torch.arange(start, end, device=device) for start, end in stretches])
