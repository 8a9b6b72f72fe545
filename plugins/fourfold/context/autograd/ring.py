"""What ring.py describes, forward and backward."""

from typing import Any

import torch
from torch import Tensor

from fourfold.context.comm import Comm, Shift
from fourfold.context.kernels.kernel import Kernel, Partial, Rows, Spec, attend, attend_backward, wide


class RingAttention(torch.autograd.Function):
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
