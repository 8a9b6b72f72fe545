"""What allgather.py describes, forward and backward."""

from typing import Any

import torch
from torch import Tensor

from fourfold.context.comm import Comm
from fourfold.context.kernels.kernel import Kernel, Rows, Spec, attend, attend_backward, wide


class AllGatherAttention(torch.autograd.Function):
    """`rows` are of this member's queries and the keys of all members in the order of `comm`."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, comm: Comm, kernel: Kernel, rows: Rows, spec: Spec
    ) -> Tensor:
        found = attend(kernel, q, *_apart(_gathered(k, v, comm=comm, purpose="kv")), rows, spec)
        out = found.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, found.lse)
        ctx.rest = (comm, kernel, rows, spec)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        comm, kernel, rows, spec = ctx.rest
        kv = _gathered(k, v, comm=comm, purpose="kv_backward")
        d_q, d_kv = (torch.zeros(t.shape, dtype=wide(q.dtype), device=q.device) for t in (q, kv))
        attend_backward(kernel, grads[0], q, *_apart(kv), out, lse, rows, spec, into=(d_q, *_apart(d_kv)))
        d_k, d_v = _apart(comm.summed(d_kv, purpose="d_kv_backward"))
        return d_q.to(q.dtype), d_k.to(q.dtype), d_v.to(q.dtype), None, None, None, None


def _gathered(k: Tensor, v: Tensor, *, comm: Comm, purpose: str) -> Tensor:
    """k and v [B, K, s, D] of all ranks, as [P s, 2, B, K, D]."""
    rows, kv_heads, tokens, size = k.shape
    kv = k.new_empty(comm.size * tokens, 2, rows, kv_heads, size)
    for mine, value in zip(_apart(comm.own(kv)), (k, v), strict=True):
        mine.copy_(value)
    comm.fill(kv, purpose=purpose)
    return kv


def _apart(kv: Tensor) -> tuple[Tensor, Tensor]:
    """[S, 2, B, K, D] -> twice [B, K, S, D], views."""
    k, v = kv.permute(1, 2, 3, 0, 4)
    return k, v
