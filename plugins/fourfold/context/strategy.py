"""The contract of a context-parallel attention strategy: one file each beside this one.

Legend, once for all: B rows, S tokens of a row, H query heads, K key/value heads, D their size, P = cp_size ranks.
A rank holds q[B, H, S/P, D], k and v[B, K, S/P, D] of its own positions (balance.py) and gets out[B, H, S/P, D].
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch.distributed as dist
from torch import Tensor

from fourfold.context.balance import BALANCES, Ownership, choose
from fourfold.context.comm import Comm
from fourfold.context.kernels.kernel import Kernel, Spec
from fourfold.context.rectangles import Stretches
from fourfold.context.sharding import Sharding

Options = dict[str, str]


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """Of one layer and one micro-batch over all cp ranks."""

    rows: int  # B
    length: int  # S
    heads: int  # H
    kv_heads: int  # K
    head_dim: int  # D
    itemsize: int  # bytes of an activation
    sum_itemsize: int = 4  # bytes of a gradient that is summed over ranks: fp32

    def resized(self, **changes: int) -> "AttentionShape":
        return replace(self, **changes)

    @property
    def kv_elements(self) -> int:
        """Of k and v of all tokens."""
        return 2 * self.rows * self.kv_heads * self.length * self.head_dim


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


class OneGroup(ContextStrategy):
    """A strategy whose ranks all talk to each other."""

    def __init__(
        self, group: dist.ProcessGroup, *, kernel: Kernel, heads: int, kv_heads: int, options: Options
    ) -> None:
        self._comm, self._kernel = Comm(group), kernel

    def sent(self) -> dict[str, int]:
        return dict(self._comm.sent)


def unit(cp_size: int, *, parts: int = 1) -> int:
    """Rows are padded to a multiple of it: two chunks for each rank, and a rank's tokens divide into `parts`."""
    return math.lcm(2 * cp_size if cp_size > 1 else 1, cp_size * parts)
