"""Collectives of tensor parallelism over one group, with the bytes of the algorithm that each rank sends, by purpose.

Activations are [B, S, D]; sequence parallelism cuts S in equal parts, in rank order. Bytes sent by a rank of t, for N bytes
of the whole activation: a gather or a reduce-scatter (t-1)/t N, an all-reduce twice that (Patarasuk & Yuan 2009).
"""

from collections import Counter
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor


class TensorGroup:
    """The tp ranks of this one, and whether what lies between the parallel blocks is cut along the sequence."""

    def __init__(self, group: dist.ProcessGroup, *, sequence_parallel: bool) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.sequence_parallel = sequence_parallel
        self.sent: Counter[str] = Counter()

    def gather(self, x: Tensor, *, purpose: str) -> "Pending":
        """Begin x[B, S/t, D] -> [B, S, D]."""
        rows, part, *rest = x.shape
        whole = x.new_empty((self.size, rows, part, *rest))
        self._count("all_gather", purpose, x.nbytes * (self.size - 1))
        work = dist.all_gather_into_tensor(
            whole.flatten(0, 1), x.detach().contiguous(), group=self.group, async_op=True
        )
        return Pending(work, whole, lambda: whole.transpose(0, 1).reshape(rows, self.size * part, *rest))

    def scatter_sum(self, x: Tensor, *, purpose: str) -> "Pending":
        """Begin x[B, S, D] of each rank -> its part [B, S/t, D] of their sum."""
        rows, length, *rest = x.shape
        assert length % self.size == 0, (length, self.size)
        parts = x.detach().reshape(rows, self.size, length // self.size, *rest).transpose(0, 1).contiguous()
        mine = x.new_empty((rows, length // self.size, *rest))
        self._count("reduce_scatter", purpose, mine.nbytes * (self.size - 1))
        work = dist.reduce_scatter_tensor(mine, parts.flatten(0, 1), group=self.group, async_op=True)
        return Pending(work, parts, lambda: mine)

    def all_sum(self, x: Tensor, *, purpose: str) -> "Pending":
        """Begin x -> the sum of those of all ranks; x itself is left as it is."""
        total = x.detach().clone(memory_format=torch.contiguous_format)
        self._count("all_reduce", purpose, 2 * x.nbytes * (self.size - 1) // self.size)
        work = dist.all_reduce(total, group=self.group, async_op=True)
        return Pending(work, total, lambda: total)

    def _count(self, kind: str, purpose: str, sent: int) -> None:
        self.sent[f"{purpose}: {kind}"] += sent
        self.sent[f"{purpose}: {kind} calls"] += 1


class Pending:
    """On its way; what is sent has to stay until it has arrived."""

    def __init__(self, work: dist.Work | None, kept: Tensor, result: Callable[[], Tensor]) -> None:
        self._work, self._kept, self._result = work, kept, result

    def wait(self) -> Tensor:
        if self._work is not None:
            self._work.wait()
        return self._result()
