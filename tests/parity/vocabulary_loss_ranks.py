"""What one rank does in the tests of the vocabulary-parallel loss, and the truth: all logits, one process, float64."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fourfold.model.cross_entropy import IGNORED, linear_cross_entropy

TOKENS = 21


@dataclass(frozen=True)
class Case:
    vocabulary: int
    chunk_size: int
    softcap: float | None = None
    tokens: int = TOKENS
    hidden: int = 8
    ignored: tuple[int, ...] = ()  # positions
    dtype: torch.dtype = torch.float64

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """hidden, weight and labels of one process. Logits reach about 10, so that a soft-cap of 3 bends them."""
        generator = torch.Generator().manual_seed(11)
        hidden = torch.randn(self.tokens, self.hidden, generator=generator, dtype=torch.float64)
        weight = torch.randn(self.vocabulary, self.hidden, generator=generator, dtype=torch.float64)
        labels = torch.randint(0, self.vocabulary, (self.tokens,), generator=generator)
        labels[list(self.ignored)] = IGNORED
        return hidden.to(self.dtype), weight.to(self.dtype), labels

    def held(self, *, rank: int, world: int) -> tuple[int, int, int]:
        """(first, count, rows with padding) of a rank: ceil(V / world) rows each, as Megatron cuts."""
        rows = -(-self.vocabulary // world)
        first = min(rank * rows, self.vocabulary)
        return first, min(rows, self.vocabulary - first), rows


def objective(loss: Tensor) -> Tensor:
    """The loss is used twice, so that what comes back to it is neither 1 nor a constant."""
    return loss * 0.37 + (loss / 50) ** 2


def textbook(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """loss, d_hidden, d_weight in float64, of the same (rounded) inputs."""
    hidden, weight, labels = case.tensors()
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logits = hidden @ weight.t()
    if case.softcap is not None:
        logits = torch.tanh(logits / case.softcap) * case.softcap
    loss = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    objective(loss).backward()
    assert hidden.grad is not None and weight.grad is not None  # noqa: PT018
    return loss.detach(), hidden.grad, weight.grad


def sliced(case: Case, *, rank: int, world: int, sent: Counter[str] | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """loss, this rank's part of d_hidden, d_weight with padding. The padding is large: it would win every softmax."""
    hidden, weight, labels = case.tensors()
    first, count, rows = case.held(rank=rank, world=world)
    padding = hidden.new_full((rows - count, case.hidden), 100.0)
    weight = torch.cat([weight[first : first + count], padding]).requires_grad_()
    hidden.requires_grad_()
    loss = linear_cross_entropy(
        hidden,
        weight,
        labels,
        group=dist.group.WORLD if world > 1 else None,
        first=first,
        count=count,
        softcap=case.softcap,
        chunk_size=case.chunk_size,
        sent=sent,
    )
    with torch.no_grad():
        weight.zero_()  # what ZeRO-3 does after forward, as far as values go
    objective(loss).backward()
    assert hidden.grad is not None and weight.grad is not None  # noqa: PT018
    return loss.detach(), hidden.grad, weight.grad


def parts(rank: int, *, cases: list[Case]) -> list[Any]:
    """Of each case (loss, part of d_hidden, d_weight with padding, bytes sent by purpose) of this rank."""
    found = []
    for case in cases:
        sent: Counter[str] = Counter()
        found.append((*sliced(case, rank=rank, world=dist.get_world_size(), sent=sent), dict(sent)))
    return found


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that an operation returned, and the names of all operations."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.names.add(func.overloadpacket.__name__)
        made = result if isinstance(result, tuple | list) else [result]
        self.elements = max([self.elements, *(one.numel() for one in made if isinstance(one, Tensor))])
        return result
