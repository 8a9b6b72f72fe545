"""ring: blocks of keys and values travel round the ranks, each of which adds its queries' part of every block.

Liu et al. 2023 (arXiv:2310.01889). While a block is computed, the next one is on its way; a block without any allowed pair
is passed on and not computed. In the backward pass the gradients of a block travel with it, in fp32, and come home.
Sent by a rank for a layer, with kv = 2 B K S D elements, e bytes each, sums of a bytes:
    forward   (P-1)/P kv e
    backward  (P-1)/P kv e + kv a
Held beside the own shard: two blocks; backward three blocks of gradients too, in fp32.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from fourfold.context.rectangles import rectangles
from fourfold.context.sharding import Sharding, held_by
from fourfold.context.strategy import AttentionShape, OneGroup, Options, counted
from fourfold.context.work import Work, owners

if TYPE_CHECKING:
    from torch import Tensor

    from fourfold.context.kernels.kernel import Spec


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
        from fourfold.context.autograd.ring import RingAttention

        mine = held_by(self._comm.rank)
        blocks = sharding.plan(
            ("ring", spec.window),
            lambda: [sharding.rectangles(mine, held_by(owner), window=spec.window) for owner in range(self._comm.size)],
        )
        out: Tensor = RingAttention.apply(q, k, v, self._comm, self._kernel, blocks, spec)
        return out
