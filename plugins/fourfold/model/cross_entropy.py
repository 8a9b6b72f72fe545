"""Output projection and cross-entropy over a vocabulary that the ranks of a group share, logits of one chunk at a time."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable

IGNORED = -100
BLOCK = 1024  # rows of a 16-bit weight whose fp32 copies, or products to be added in fp32, stay in a CPU's cache


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    group: dist.ProcessGroup | None,
    first: int,
    count: int,
    softcap: float | None,
    chunk_size: int,
    sent: Counter[str] | None = None,
    twice: bool = False,
) -> Tensor:
    """hidden[N, D], weight[V_local, D], labels[N] (global ids, IGNORED counts for nothing) -> sum of token losses in nats.

    A scalar, the same on every rank of `group` (None: one rank has all), fp32, or fp64 for fp64 inputs; so is all that is
    computed inside of products. `hidden`, `labels` and `chunk_size` (tokens) have to be equal on all ranks. `first` is the
    global id of the weight's row 0, `count` its real rows, 0 too; rows behind them are padding, in no softmax, with zero
    gradients. `softcap`: logits are softcap * tanh(logits / softcap). A label that no rank holds makes the loss infinite.

    For each token a rank exchanges three numbers: its largest logit and the target's (one all-reduce of the maximum), and
    its sum of exponentials (Megatron-LM, Shoeybi et al. 2019, section 3). `sent["loss"]` grows by their bytes. Chunks of
    ignored tokens alone are passed over.

    Gradients are made chunk by chunk in the forward pass, as torch's linear_cross_entropy does (6 N V D FLOPs, no logits
    twice), kept as [N, D] in hidden's dtype and [V_local, D] in fp32, and scaled in backward; nothing of the weight stays,
    which ZeRO-3 may have gathered for the forward pass only. The gradient of `hidden` is this rank's part, over its rows:
    the caller adds up those of the group. RuntimeError in a second backward pass, unless `twice`: pipeline schedules that
    compute weight gradients on their own make two.

    DeepSpeed's vocab_parallel_linear_cross_entropy has no soft-cap and no padding, keeps the weight and computes logits
    twice, and all-reduces hidden's gradient, where sequence parallelism wants it scattered.
    """
    assert hidden.dtype == weight.dtype, f"hidden states in {hidden.dtype}, weight in {weight.dtype}"
    shared = group if group is not None and dist.get_world_size(group) > 1 else None
    head = _Head(shared, first=first, count=count, softcap=softcap, chunk_size=chunk_size, sent=sent)
    tracked = torch.is_grad_enabled()  # always off inside of forward
    wanted = tracked and hidden.requires_grad, tracked and weight.requires_grad
    return _LinearCrossEntropy.apply(hidden, weight, labels, head, wanted, twice)


@dataclass(frozen=True)
class _Head:
    """What this rank holds and how the loss is computed, without tensors."""

    group: dist.ProcessGroup | None  # None: alone
    first: int
    count: int
    softcap: float | None
    chunk_size: int
    sent: Counter[str] | None

    def all_reduce(self, x: Tensor, op: Any) -> None:
        if self.group is None:
            return
        dist.all_reduce(x, op=op, group=self.group)
        if self.sent is not None:
            self.sent["loss"] += x.nbytes

    def chunks(self, labels: Tensor) -> list[slice]:
        """Those with a label that counts. Every rank has the same labels: the same chunks. All, of labels without values."""
        if isinstance(labels, FakeTensor):
            return [slice(at, at + self.chunk_size) for at in range(0, len(labels), self.chunk_size)]
        counted = (labels != IGNORED).nonzero().flatten() // self.chunk_size
        numbers = counted.unique().tolist()  # one wait for the device
        return [slice(number * self.chunk_size, (number + 1) * self.chunk_size) for number in numbers]


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, head: _Head, wanted: tuple[bool, bool], twice: bool
    ) -> Tensor:
        work = _Work(hidden, weight, head, wanted)
        loss = torch.zeros((), dtype=work.wide, device=hidden.device)
        for chunk in head.chunks(labels):
            loss += work.chunk(chunk, labels[chunk])
        ctx.gradients, ctx.dtype, ctx.twice = (work.d_hidden, work.d_weight), weight.dtype, twice
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError(
                "linear_cross_entropy: a second backward pass, but the first scaled the gradients in place"
            )
        d_hidden, d_weight = ctx.gradients
        if ctx.twice:
            d_weight = None if d_weight is None else (d_weight * upstream).to(ctx.dtype)
            return None if d_hidden is None else d_hidden * upstream, d_weight, None, None, None, None
        ctx.gradients = None  # not held here: whoever accumulates them need not copy
        if d_hidden is not None:
            d_hidden.mul_(upstream)
        if d_weight is not None:
            d_weight = d_weight.mul_(upstream).to(ctx.dtype)
        return d_hidden, d_weight, None, None, None, None


class _Work:
    """Gradients so far, and buffers that all chunks use: fresh ones cost a page fault for every 4 KiB of each chunk."""

    def __init__(self, hidden: Tensor, weight: Tensor, head: _Head, wanted: tuple[bool, bool]) -> None:
        self.head, self.hidden, self.rows = head, hidden, weight[: head.count]
        self.wide = torch.promote_types(hidden.dtype, torch.float32)
        self.d_hidden = torch.zeros_like(hidden) if wanted[0] else None
        self.d_weight = torch.zeros_like(weight, dtype=self.wide) if wanted[1] else None
        size = min(head.chunk_size, len(hidden)), head.count
        self.logits = hidden.new_empty(size, dtype=self.wide)
        self.narrow = hidden.new_empty(size) if any(wanted) and hidden.dtype != self.wide else self.logits

    def chunk(self, chunk: slice, labels: Tensor) -> Tensor:
        """The sum of its losses; its gradients are added."""
        hidden = self.hidden[chunk]
        logits, narrow = self.logits[: len(hidden)], self.narrow[: len(hidden)]
        _multiply(hidden, self.rows, out=logits)
        wanted = self.d_hidden is not None or self.d_weight is not None
        slope = _cap_(logits, self.head.softcap, with_slope=wanted)
        losses, sums, mine = _exponentiate_(logits, labels, self.head)
        if wanted:
            _differentiate_(logits, labels, self.head, sums=sums, mine=mine)
            if slope is not None:
                logits.mul_(slope)
            if narrow is not logits:
                narrow.copy_(logits)
            self._add_gradients(chunk, narrow)
        return losses.sum()

    def _add_gradients(self, chunk: slice, d_logits: Tensor) -> None:
        if self.d_hidden is not None:
            torch.mm(d_logits, self.rows, out=self.d_hidden[chunk])
        if self.d_weight is not None:
            _add_product(d_logits, self.hidden[chunk], out=self.d_weight[: self.head.count])


def _cap_(logits: Tensor, softcap: float | None, *, with_slope: bool) -> Tensor | None:
    """Caps them in place; returns the slope, 1 - tanh²."""
    if softcap is None:
        return None
    logits.div_(softcap).tanh_()
    slope = torch.addcmul(logits.new_ones(()), logits, logits, value=-1) if with_slope else None
    logits.mul_(softcap)
    return slope


def _exponentiate_(logits: Tensor, labels: Tensor, head: _Head) -> tuple[Tensor, Tensor, Tensor]:
    """Makes logits[n, count] exponentials, less the maximum over all ranks; returns (losses[n], sums of exponentials over
    all ranks[n], whether the target is here[n])."""
    mine = (labels >= head.first) & (labels < head.first + head.count)
    most = logits.new_full((2, len(logits)), float("-inf"))  # of all logits, of the target's
    if head.count:
        torch.amax(logits, dim=1, out=most[0])
        target = logits.gather(1, _columns(labels, head)).squeeze(1)
        most[1] = torch.where(mine, target, most[1])
    head.all_reduce(most, dist.ReduceOp.MAX)  # a NaN may get lost here, but not in the sum
    sums = logits.sub_(most[0, :, None]).exp_().sum(dim=1)
    head.all_reduce(sums, dist.ReduceOp.SUM)
    losses = torch.where(labels == IGNORED, 0.0, sums.log() - (most[1] - most[0]))
    return losses, sums, mine


def _differentiate_(logits: Tensor, labels: Tensor, head: _Head, *, sums: Tensor, mine: Tensor) -> None:
    """Makes exponentials the gradient of the losses' sum by the logits: softmax less one at the target."""
    scale = torch.where(labels == IGNORED, 0.0, 1 / sums)
    logits.mul_(scale[:, None])
    if head.count:
        logits.scatter_add_(1, _columns(labels, head), -mine[:, None].to(logits.dtype))


def _columns(labels: Tensor, head: _Head) -> Tensor:
    """[n, 1]; any column where the target is elsewhere."""
    return (labels - head.first).clamp(0, head.count - 1)[:, None]


def _multiply(left: Tensor, right: Tensor, *, out: Tensor) -> None:
    """out[n, V] = left[n, D] right[V, D]ᵀ, in fp32 from 16 bits: logits of 20 rounded to bf16 are off by up to 0.06."""
    if left.dtype == out.dtype:
        torch.mm(left, right.t(), out=out)
    elif left.is_cuda:
        torch.mm(left, right.t(), out_dtype=out.dtype, out=out)
    else:  # no such product on a CPU
        left = left.to(out.dtype)
        for part, columns in zip(right.split(BLOCK), out.split(BLOCK, dim=1), strict=True):
            torch.mm(left, part.to(out.dtype).t(), out=columns)


def _add_product(left: Tensor, right: Tensor, *, out: Tensor) -> None:
    """out[V, D] += left[n, V]ᵀ right[n, D]. Sums over chunks are in out's type, on a CPU products of a chunk in left's."""
    if left.dtype == out.dtype:
        out.addmm_(left.t(), right)
    elif left.is_cuda:
        torch.addmm(out, left.t(), right, out_dtype=out.dtype, out=out)
    else:
        for part, columns in zip(out.split(BLOCK), left.split(BLOCK, dim=1), strict=True):
            part.add_(columns.t() @ right)
