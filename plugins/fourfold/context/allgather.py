"""allgather: every rank gathers all keys and values and computes its own queries (Llama 3, arXiv:2407.21783, 3.3.2).

Cheap where K is small beside H. Sent by a rank for a layer, with kv = 2 B K S D elements, e bytes each, sums of a bytes:
    forward   (P-1)/P kv e
    backward  (P-1)/P kv (e + a): gathered again rather than kept, then dK and dV are reduced and scattered
Held beside the own shard while a layer computes: its kv, once; backward dK and dV too, in fp32. Both have the tokens
outermost, [P s, 2, B, K, D], so that what is gathered, and what is scattered, lies in order of the ranks as it is.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor

from fourfold.context.comm import Comm
from fourfold.context.kernels.kernel import Kernel, Rows, Spec, attend, attend_backward, wide
from fourfold.context.sharding import Sharding, everything, held_by
from fourfold.context.strategy import AttentionShape, OneGroup, Options


class AllGather(OneGroup):
    name: ClassVar[str] = "allgather"

    @classmethod
    def sent_bytes(cls, shape: AttentionShape, *, cp_size: int, rank: int, options: Options) -> dict[str, int]:
        elements = shape.kv_elements * (cp_size - 1) // cp_size
        return {
            "kv": elements * shape.itemsize,
            "kv_backward": elements * shape.itemsize,
            "d_kv_backward": elements * shape.sum_itemsize,
        }

    def attend(self, q: Tensor, k: Tensor, v: Tensor, spec: Spec, sharding: Sharding) -> Tensor:
        rows = sharding.plan(
            ("allgather", spec.window),
            lambda: sharding.rectangles(held_by(self._comm.rank), everything, window=spec.window),
        )
        out: Tensor = _AllGatherAttention.apply(q, k, v, self._comm, self._kernel, rows, spec)
        return out


class _AllGatherAttention(torch.autograd.Function):
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
