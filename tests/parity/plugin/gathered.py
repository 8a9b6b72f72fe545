"""gathered: every rank gets all keys and values, by an all-gather that autograd turns round."""

import torch

from fourfold.context.comm import Comm
from fourfold.context.local import local_attention
from fourfold.context.sharding import everything, held_by
from fourfold.context.strategy import ContextStrategy


class Gathered(ContextStrategy):
    name = "gathered"

    def __init__(self, group, *, kernel, heads, kv_heads, options):
        self.comm, self.kernel = Comm(group), kernel

    @classmethod
    def sent_bytes(cls, shape, *, cp_size, rank, options):
        each = shape.kv_elements // cp_size * (cp_size - 1) * shape.itemsize
        return {"kv": each, "kv_backward": each}

    def attend(self, q, k, v, spec, sharding):
        mine = held_by(self.comm.rank)
        make = lambda: sharding.rectangles(mine, everything, window=spec.window)  # noqa: E731
        rows = sharding.plan(("gathered", spec.window), make)
        k, v = (Gather.apply(x, self.comm) for x in (k, v))
        return local_attention(q, k, v, kernel=self.kernel, rows=rows, spec=spec)


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, comm):
        ctx.comm = comm
        return torch.cat(comm.all_gather(x, purpose="kv"), dim=2)

    @staticmethod
    def backward(ctx, grad):
        return ctx.comm.reduce_scatter(grad.chunk(ctx.comm.size, dim=2), purpose="kv_backward"), None
