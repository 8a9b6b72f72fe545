"""local: one rank has the whole row, 0 bytes. Also what Ulysses runs once a rank has all tokens of its heads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from fourfold.context.sharding import Sharding, everything
from fourfold.context.strategy import AttentionShape, ContextStrategy, Options

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import Tensor

    from fourfold.context.kernels.kernel import Kernel, Rows, Spec


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
    from fourfold.context.autograd.local import LocalAttention

    out: Tensor = LocalAttention.apply(q, k, v, kernel, rows, spec)
    return out
