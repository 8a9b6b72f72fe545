"""allgather: every rank gathers all keys and values and computes its own queries (Llama 3, arXiv:2407.21783, 3.3.2).

Cheap where K is small beside H. Sent by a rank for a layer, with kv = 2 B K S D elements, e bytes each, sums of a bytes:
    forward   (P-1)/P kv e
    backward  (P-1)/P kv (e + a): gathered again rather than kept, then dK and dV are reduced and scattered
Held beside the own shard while a layer computes: its kv, once; backward dK and dV too, in fp32. Both have the tokens
outermost, [P s, 2, B, K, D], so that what is gathered, and what is scattered, lies in order of the ranks as it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from fourfold.context.sharding import Sharding, everything, held_by
from fourfold.context.strategy import AttentionShape, OneGroup, Options

if TYPE_CHECKING:
    from torch import Tensor

    from fourfold.context.kernels.kernel import Spec


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
        from fourfold.context.autograd.allgather import AllGatherAttention

        rows = sharding.plan(
            ("allgather", spec.window),
            lambda: sharding.rectangles(held_by(self._comm.rank), everything, window=spec.window),
        )
        out: Tensor = AllGatherAttention.apply(q, k, v, self._comm, self._kernel, rows, spec)
        return out
