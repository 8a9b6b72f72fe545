"""local: one rank has the whole row, 0 bytes. Also what Ulysses runs once a rank has all tokens of its heads."""

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from fourfold.context.kernels.kernel import Kernel, Rows, Spec, attend, gradients
from fourfold.context.sharding import Sharding, everything
from fourfold.context.strategy import AttentionShape, ContextStrategy, Options


class Local(ContextStrategy):
    name: ClassVar[str] = "local"
    balances = ("contiguous",)

    def __init__(
        self, group: dist.ProcessGroup, *, kernel: Kernel, heads: int, kv_heads: int, options: Options
    ) -> None:
        self._kernel = kernel

    @classmethod
    def refusals(cls, *, cp_size: int, heads: int, kv_heads: int, options: Options) -> Iterator[str]:
        if cp_size > 1:
            yield f"attention=local with cp_size={cp_size}: it has one rank's row; use attention=auto."

    @classmethod
    def sent_bytes(cls, shape: AttentionShape, *, cp_size: int, rank: int, options: Options) -> dict[str, int]:
        return {}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, spec: Spec, sharding: Sharding) -> Tensor:
        rows = sharding.plan(
            ("local", spec.window), lambda: sharding.rectangles(everything, everything, window=spec.window)
        )
        return local_attention(q, k, v, kernel=self._kernel, rows=rows, spec=spec)


def local_attention(q: Tensor, k: Tensor, v: Tensor, *, kernel: Kernel, rows: Rows, spec: Spec) -> Tensor:
    out: Tensor = _LocalAttention.apply(q, k, v, kernel, rows, spec)
    return out


class _LocalAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, kernel: Kernel, rows: Rows, spec: Spec) -> Tensor:
        found = attend(kernel, q, k, v, rows, spec)
        out = found.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, found.lse)
        ctx.rest = (kernel, rows, spec)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        kernel, rows, spec = ctx.rest
        return *gradients(kernel, grads[0], q, k, v, out, lse, rows, spec), None, None, None
