"""What needed_only.py describes, forward and backward."""

from typing import Any

import torch
from torch import Tensor

from fourfold.context.comm import Comm
from fourfold.context.kernels.kernel import Kernel, Partial, Spec, attend, attend_backward, wide
from fourfold.context.needed_only import Exchange, total_length


class NeededOnlyAttention(torch.autograd.Function):
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
    gives = [[total_length(one.give[member]) for one in plan] for member in range(comm.size)]
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
