"""The contract of a context-parallel attention strategy: one file each beside this one.

Legend, once for all: B rows, S tokens of a row, H query heads, K key/value heads, D their size, P = cp_size ranks.
A rank holds q[B, H, S/P, D], k and v[B, K, S/P, D] of its own positions (balance.py) and gets out[B, H, S/P, D].
What a plan asks of the classes is pure: their files import torch only to compute (autograd/), so that a plan starts at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, ClassVar

from fourfold.context.balance import BALANCES, Ownership, choose
from fourfold.context.rectangles import Rectangle, Stretches
from fourfold.context.sharding import Sharding
from fourfold.context.work import AttentionShape, Work, gathered

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import Tensor

    from fourfold.context.kernels.kernel import Kernel, Spec

__all__ = ["IMPLEMENTATION", "AttentionShape", "ContextStrategy", "OneGroup", "Options", "counted"]

IMPLEMENTATION = (
    "fourfold"  # of attention, to transformers; without "flash" in it, at which it would be taken for its own
)
Options = dict[str, str]


class ContextStrategy(ABC):
    """Made on every rank of a cp group; `attend` is collective over it."""

    name: ClassVar[str]
    balances: ClassVar[tuple[str, ...]] = tuple(BALANCES)  # those that it can use, the one for a single document first

    @abstractmethod
    def __init__(
        self, group: dist.ProcessGroup, *, kernel: Kernel, heads: int, kv_heads: int, options: Options
    ) -> None:
        """`options` are the other keys of the attention group. May be collective over `group`."""

    @classmethod
    def refusals(cls, *, cp_size: int, heads: int, kv_heads: int, options: Options) -> Iterator[str]:
        """Why it cannot spread these heads over cp_size ranks, in sentences with the numbers and the knob."""
        yield from ()

    @classmethod
    @abstractmethod
    def sent_bytes(cls, shape: AttentionShape, *, cp_size: int, rank: int, options: Options) -> dict[str, int]:
        """Bytes that `rank` sends for one layer, by purpose; `..._backward` for those of the backward pass."""

    @classmethod
    def work(
        cls, shape: AttentionShape, *, cp_size: int, rank: int, options: Options, balance: str, window: int | None
    ) -> Work:
        """What `rank` holds and computes for one layer, of rows of one document; here of a rank that has its own queries and
        gathers all keys and values, in the backward pass with the sums of their gradients."""
        return gathered(shape, cp_size=cp_size, rank=rank, among=cls.balances, balance=balance, window=window)

    def ownership(self, length: int, documents: Stretches, *, balance: str, ranks: int) -> Ownership:
        """Who holds which positions; `balance` may be auto."""
        name = choose(length, ranks, documents, among=self.balances) if balance == "auto" else balance
        return BALANCES[name](length, ranks, documents)

    @abstractmethod
    def attend(self, q: Tensor, k: Tensor, v: Tensor, spec: Spec, sharding: Sharding) -> Tensor:
        """Differentiable, exact in q, k and v."""

    def sent(self) -> dict[str, int]:
        """Bytes that this rank has sent, by purpose."""
        return {}


def counted(found: Iterable[Rectangle], *, shape: AttentionShape, tokens: int, window: int | None) -> Work:
    """The rectangles of one row, as Work of all rows and heads."""
    return Work.of(found, rows=shape.rows, heads=shape.heads, kv_heads=shape.kv_heads, tokens=tokens, window=window)


class OneGroup(ContextStrategy):
    """A strategy whose ranks all talk to each other."""

    def __init__(
        self, group: dist.ProcessGroup, *, kernel: Kernel, heads: int, kv_heads: int, options: Options
    ) -> None:
        from fourfold.context.comm import Comm

        self._comm, self._kernel = Comm(group), kernel

    def sent(self) -> dict[str, int]:
        return dict(self._comm.sent)
