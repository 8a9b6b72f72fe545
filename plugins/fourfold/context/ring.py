"""ring: blocks of keys and values travel round the ranks, each of which adds its queries' part of every block.

Liu et al. 2023 (arXiv:2310.01889). While a block is computed, the next one is on its way; a block without any allowed pair
is passed on and not computed. In the backward pass the gradients of a block travel with it, in fp32, and come home.
Sent by a rank for a layer, with kv = 2 B K S D elements, e bytes each, sums of a bytes:
    forward   (P-1)/P kv e
    backward  (P-1)/P kv e + kv a
Held beside the own shard: two blocks; backward three blocks of gradients too, in fp32.
"""

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from fourfold.context.comm import Comm, Shift
from fourfold.context.kernels.kernel import Kernel, Partial, Rows, Spec, attend, attend_backward, wide
from fourfold.context.rectangles import rectangles
from fourfold.context.sharding import Sharding, held_by
from fourfold.context.strategy import AttentionShape, OneGroup, Options, counted
from fourfold.context.work import Work, owners


class Ring(OneGroup):
    name: ClassVar[str] = "ring"

    @classmethod
    def sent_bytes(cls, shape: AttentionShape, *, cp_size: int, rank: int, options: Options) -> dict[str, int]:
        block = shape.kv_elements // cp_size
        return {
            "kv": (cp_size - 1) * block * shape.itemsize,
            "kv_backward": (cp_size - 1) * block * shape.itemsize,
            "d_kv_backward": cp_size * block * shape.sum_itemsize,
        }

    @classmethod
    def work(
        cls, shape: AttentionShape, *, cp_size: int, rank: int, options: Options, balance: str, window: int | None
    ) -> Work:
        held = owners(cls.balances, length=shape.length, ranks=cp_size, balance=balance)
        documents = ((0, shape.length),)
        found = [one for other in held for one in rectangles(held[rank], other, documents=documents, window=window)]
        blocks = shape.kv_elements // cp_size * (2 * shape.itemsize + 3 * shape.sum_itemsize)
        return replace(counted(found, shape=shape, tokens=shape.length // cp_size, window=window), buffers=blocks)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, spec: Spec, sharding: Sharding) -> Tensor:
        mine = held_by(self._comm.rank)
        blocks = sharding.plan(
            ("ring", spec.window),
            lambda: [sharding.rectangles(mine, held_by(owner), window=spec.window) for owner in range(self._comm.size)],
        )
        out: Tensor = _RingAttention.apply(q, k, v, self._comm, self._kernel, blocks, spec)
        return out


class _RingAttention(torch.autograd.Function):
    """`blocks[i]` are of this member's queries and the keys of member i of `comm`."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, comm: Comm, kernel: Kernel, blocks: list[Rows], spec: Spec
    ) -> Tensor:
        block = torch.stack((k, v))
        found: Partial | None = None
        for step in range(comm.size):
            coming = comm.shift(block, purpose="kv") if step < comm.size - 1 else None
            rows = blocks[(comm.rank - step) % comm.size]
            if any(rows):
                found = attend(kernel, q, block[0], block[1], rows, spec, into=found)
            block = coming.wait() if coming else block
        found = Partial.empty(q) if found is None else found
        out = found.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, found.lse)
        ctx.rest = (comm, kernel, blocks, spec)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        comm, kernel, blocks, spec = ctx.rest
        d_q = torch.zeros(q.shape, dtype=wide(q.dtype), device=q.device)
        block = torch.stack((k, v))
        travelling: Shift | None = None  # gradients of the block at hand, from the ranks that had it before
        for step in range(comm.size):
            coming = comm.shift(block, purpose="kv_backward") if step < comm.size - 1 else None
            rows = blocks[(comm.rank - step) % comm.size]
            mine = torch.zeros(block.shape, dtype=wide(q.dtype), device=q.device)
            if any(rows):
                into = (d_q, mine[0], mine[1])
                attend_backward(kernel, grads[0], q, block[0], block[1], out, lse, rows, spec, into=into)
            if travelling:
                mine += travelling.wait()
            travelling = comm.shift(mine, purpose="d_kv_backward")
            block = coming.wait() if coming else block
        assert travelling is not None
        home = travelling.wait()
        return d_q.to(q.dtype), home[0].to(q.dtype), home[1].to(q.dtype), None, None, None, None
