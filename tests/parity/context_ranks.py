"""What one cp rank does in the tests of attention, and the truth: dense, one process, float64."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from fourfold.activation.attention_ops import keep_attention
from fourfold.context.allgather import AllGather
from fourfold.context.hybrid import Hybrid
from fourfold.context.kernels.cpu import CpuKernel
from fourfold.context.kernels.kernel import Kernel, Spec
from fourfold.context.kernels.plain import PlainKernel
from fourfold.context.local import Local
from fourfold.context.needed_only import NeededOnly
from fourfold.context.ring import Ring
from fourfold.context.sharding import RowShares, Sharding, positions
from fourfold.context.strategy import ContextStrategy
from fourfold.context.ulysses import Ulysses

STRATEGIES: dict[str, type[ContextStrategy]] = {
    "local": Local,
    "ulysses": Ulysses,
    "ring": Ring,
    "allgather": AllGather,
    "hybrid": Hybrid,
    "needed_only": NeededOnly,
}
KERNELS: dict[str, type[Kernel]] = {"cpu": CpuKernel, "plain": PlainKernel}


@dataclass(frozen=True)
class Case:
    """One call of attention. `documents` are their lengths, by row; what they leave of the row is padding."""

    strategy: str
    documents: tuple[tuple[int, ...], ...]
    length: int
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 8
    window: int | None = None
    softcap: float | None = None
    balance: str = "auto"
    kernel: str = "cpu"
    dtype: torch.dtype = torch.float64
    selective: bool = False  # under selective activation checkpointing
    options: dict[str, str] = field(default_factory=lambda: {"ulysses_size": "auto", "outer": "ring"})

    def intervals(self, row: int) -> tuple[tuple[int, int], ...]:
        ends = torch.tensor(self.documents[row]).cumsum(0).tolist()
        return tuple(zip([0, *ends[:-1]], ends, strict=True))

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v and the gradient of the output of whole rows, float64."""
        generator = torch.Generator().manual_seed(7)
        shapes = [(len(self.documents), heads, self.length, self.head_dim) for heads in (self.heads, self.kv_heads)]
        shapes = [shapes[0], shapes[1], shapes[1], shapes[0]]
        q, k, v, grad = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
        return q, k, v, grad


def dense(case: Case) -> list[Tensor]:
    """out, dq, dk, dv of whole rows by the textbook."""
    q, k, v, grad = case.tensors()
    q, k, v = (tensor.requires_grad_() for tensor in (q, k, v))
    position = torch.arange(case.length)
    allowed = torch.zeros(len(case.documents), case.length, case.length, dtype=torch.bool)
    for row in range(len(case.documents)):
        for start, end in case.intervals(row):
            allowed[row, start:end, start:end] = position[start:end, None] >= position[None, start:end]
    if case.window is not None:
        allowed &= position[:, None] - position[None] < case.window
    logits = q @ k.repeat_interleave(case.heads // case.kv_heads, 1).transpose(2, 3) * 0.3
    if case.softcap is not None:
        logits = torch.tanh(logits / case.softcap) * case.softcap
    weights = logits.masked_fill(~allowed[:, None], float("-inf")).softmax(-1).nan_to_num()
    out = weights @ v.repeat_interleave(case.heads // case.kv_heads, 1)
    out.backward(grad)
    assert q.grad is not None and k.grad is not None and v.grad is not None  # noqa: PT018
    return [out.detach(), q.grad, k.grad, v.grad]


def run(strategy: ContextStrategy, case: Case, *, group: dist.ProcessGroup) -> tuple[list[Tensor], Sharding]:
    """This rank's part of out, dq, dk, dv."""
    rank = dist.get_rank(group)
    sharding = sharded(strategy, case, ranks=dist.get_world_size(group))
    q, k, v, grad = (part(tensor, sharding, rank=rank).to(case.dtype) for tensor in case.tensors())
    q, k, v = (tensor.requires_grad_() for tensor in (q, k, v))
    attend = partial(strategy.attend, spec=Spec(0.3, window=case.window, softcap=case.softcap), sharding=sharding)
    if case.selective:
        kept = partial(create_selective_checkpoint_contexts, keep_attention)
        out = checkpoint(attend, q, k, v, use_reentrant=False, context_fn=kept)
    else:
        out = attend(q, k, v)
    out.backward(grad)
    assert q.grad is not None and k.grad is not None and v.grad is not None  # noqa: PT018
    return [out.detach(), q.grad, k.grad, v.grad], sharding


def sharded(strategy: ContextStrategy, case: Case, *, ranks: int) -> Sharding:
    rows = []
    for row in range(len(case.documents)):
        documents = case.intervals(row)
        shares = strategy.ownership(case.length, documents, balance=case.balance, ranks=ranks)
        rows.append(RowShares(shares, documents))
    return Sharding(tuple(rows))


def part(tensor: Tensor, sharding: Sharding, *, rank: int) -> Tensor:
    """This rank's tokens of whole rows."""
    rows = [values[:, positions(row.ownership[rank])] for values, row in zip(tensor, sharding.rows, strict=True)]
    return torch.stack(rows).contiguous()


def made(case: Case, *, group: dist.ProcessGroup) -> ContextStrategy:
    kind = STRATEGIES[case.strategy]
    kernel = KERNELS[case.kernel]()
    return kind(group, kernel=kernel, heads=case.heads, kv_heads=case.kv_heads, options=case.options)


def errors(rank: int, *, cases: list[Case]) -> list[float]:
    """Of each case the largest difference from the dense truth, over out, dq, dk and dv."""
    group = dist.group.WORLD
    assert group is not None
    found = []
    for case in cases:
        got, sharding = run(made(case, group=group), case, group=group)
        want = [part(tensor, sharding, rank=rank) for tensor in dense(case)]
        found.append(max(float((a.double() - b).abs().max()) for a, b in zip(got, want, strict=True)))
    return found


def counted(rank: int, *, cases: list[Case]) -> list[Any]:
    """Of each case (bytes sent by purpose, bytes that the formula says, and that of the plan for needed_only)."""
    from fourfold.context.needed_only import exchange, exchanged_bytes
    from fourfold.context.strategy import AttentionShape

    group = dist.group.WORLD
    assert group is not None
    found = []
    for case in cases:
        strategy = made(case, group=group)
        _, sharding = run(strategy, case, group=group)
        shape = AttentionShape(
            rows=len(case.documents),
            length=case.length,
            heads=case.heads,
            kv_heads=case.kv_heads,
            head_dim=case.head_dim,
            itemsize=case.dtype.itemsize,
            sum_itemsize=max(4, case.dtype.itemsize),
        )
        formula = strategy.sent_bytes(shape, cp_size=dist.get_world_size(), rank=rank, options=case.options)
        if case.strategy == "needed_only":
            plan = [exchange(row, rank=rank, window=case.window) for row in sharding.rows]
            formula = exchanged_bytes(plan, shape=shape)
        found.append((strategy.sent(), formula))
    return found


def errors_of_plugin(rank: int, *, folder: str, target: str, cases: list[Case]) -> list[float]:
    """As `errors`, for the class `target` (module.Class) of a file in `folder`; cases name it by its own name."""
    import sys

    from hydra.utils import get_class

    sys.path.insert(0, folder)
    kind = get_class(target)
    STRATEGIES[kind.name] = kind
    return errors(rank, cases=cases)
