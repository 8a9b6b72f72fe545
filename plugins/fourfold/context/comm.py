"""Collectives of context parallelism over one group, with the bytes that each rank sends counted by what they are for.

Bytes are those of the algorithm (what a rank has to send to others), not of a library's wire protocol.
"""

from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class Comm:
    """`sent` counts bytes by purpose since it was made."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._ranks = dist.get_process_group_ranks(group)
        self.sent: Counter[str] = Counter()

    def all_gather(self, x: Tensor, *, purpose: str) -> list[Tensor]:
        """x of every rank, in rank order: [size][*x.shape], views of one tensor."""
        whole = x.new_empty((self.size, *x.shape))
        self.own(whole)[0].copy_(x)
        self.fill(whole, purpose=purpose)
        return list(whole.unbind(0))

    def reduce_scatter(self, parts: Sequence[Tensor], *, purpose: str) -> Tensor:
        """The sum over ranks of their part for this rank; `parts` has one for each."""
        return self.summed(torch.stack(list(parts)), purpose=purpose)[0]

    def own(self, whole: Tensor) -> Tensor:
        """This rank's of the equal parts of `whole` along its first dimension; a view."""
        return whole.chunk(self.size)[self.rank]

    def fill(self, whole: Tensor, *, purpose: str) -> None:
        """A gather in place: every rank has put its `own` part into `whole` and gets all others."""
        if self.size == 1:
            return
        mine = self.own(whole)
        self.sent[purpose] += mine.nbytes * (self.size - 1)
        dist.all_gather_single(whole, mine, group=self.group)

    def summed(self, whole: Tensor, *, purpose: str) -> Tensor:
        """The sum over ranks of this rank's `own` part of `whole`."""
        if self.size == 1:
            return whole
        mine = torch.empty_like(self.own(whole))
        self.sent[purpose] += mine.nbytes * (self.size - 1)
        dist.reduce_scatter_single(mine, whole, group=self.group)
        return mine

    def all_to_all(
        self, parts: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[int]], *, purpose: str
    ) -> list[Tensor]:
        """The tensors `parts[i]` go to rank i, one after the other; returns what each rank sent here, of `shapes`. Any of
        them may be empty."""
        counts = [sum(piece.numel() for piece in part) for part in parts]
        flat = _side_by_side([piece for part in parts for piece in part])
        if self.size == 1:
            return [flat.view(*shapes[0])]
        self.sent[purpose] += flat.itemsize * (sum(counts) - counts[self.rank])
        expected = [torch.Size(shape).numel() for shape in shapes]
        received = flat.new_empty(sum(expected))
        dist.all_to_all_single(received, flat, expected, counts, group=self.group)
        return [part.view(*shape) for part, shape in zip(received.split(expected), shapes, strict=True)]

    def shift(self, x: Tensor, *, purpose: str) -> "Shift":
        """Begin to send `x` to the next rank and to receive that of the one before."""
        if self.size == 1:  # gloo has no way to itself
            return Shift([], sent=x, received=x)
        x, received = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
        self.sent[purpose] += x.nbytes
        after, before = self._ranks[(self.rank + 1) % self.size], self._ranks[(self.rank - 1) % self.size]
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, x, after, self.group),
                dist.P2POp(dist.irecv, received, before, self.group),
            ]
        )
        return Shift(works, sent=x, received=received)


class Shift:
    """On its way; what is sent has to stay until it has arrived, and no longer."""

    def __init__(self, works: list[dist.Work], *, sent: Tensor, received: Tensor) -> None:
        self._works, self._received = works, received
        self._sent: Tensor | None = sent

    def wait(self) -> Tensor:
        for work in self._works:
            work.wait()
        self._works, self._sent = [], None
        return self._received


def _side_by_side(pieces: Sequence[Tensor]) -> Tensor:
    """All of them in one flat tensor, each copied once whatever its strides."""
    flat = pieces[0].new_empty(sum(piece.numel() for piece in pieces))
    at = 0
    for piece in pieces:
        flat[at : at + piece.numel()].view(piece.shape).copy_(piece)
        at += piece.numel()
    return flat
