"""Into a parallel block and out of it: the two conjugate pairs of collectives of Megatron-LM.

A block is what lies between: column-parallel products of one input x, elementwise work, one row-parallel product.

               forward                                 backward
    enter      x; with sequence parallelism gathered   sum over ranks; with it, this rank's part of the sum
    leave      sum over ranks; with it, one's part     gradient; with it, gathered

Plain tensor parallelism: Shoeybi et al. 2019 (arXiv:1909.08053) section 3, its f and g. With sequence parallelism:
Korthikanti et al. 2022 (arXiv:2205.05198) section 4.2.2, its g and g-bar; the bytes are the same.

The gradient of x is summed over the block's products before it is sent, so that one collective serves all of them. Two
things can be chosen. `overlap`: weight gradients wait until that collective is under way and are computed beside it.
`regather`: x is kept as this rank's part and gathered again for the weight gradients, one more gather a block.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.tensor.group import TensorGroup


class Block:
    """The entry of one parallel block, shared by its products. `enter` begins a forward pass, `product` is called once
    for each of the products added."""

    def __init__(self, tensor: TensorGroup, *, overlap: bool, regather: bool, purpose: str = "block") -> None:
        self.tensor, self.purpose = tensor, purpose
        self.overlap, self.regather = overlap, regather and tensor.sequence_parallel
        self.products: list[nn.Module] = []  # layers with a `weight`, which is replaced when a model is loaded
        self._pass: _Pass | None = None

    def enter(self, x: Tensor) -> Tensor:
        """x[B, S/t, D] with sequence parallelism, else [B, S, D] -> [B, S, D]."""
        current = _Pass(self, part=x)
        self._pass = current if self.products else None
        weights = [product.weight for product in self.products] if self.overlap else []
        whole: Tensor = _Enter.apply(x, current, *weights)
        return whole

    def product(self, number: int, whole: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """whole W^T + b of what `enter` returned, by the `number`-th product."""
        current = self._pass
        assert current is not None, "a block is entered before its products are computed"
        current.left -= 1
        part = current.part
        if not current.left:
            self._pass = current.part = None  # nothing of a forward pass stays behind but what autograd saves
        if self.overlap:
            result: Tensor = _LaterProduct.apply(whole, weight.detach(), bias, current, number)
        elif self.regather:
            result = _RegatheredProduct.apply(whole, weight, bias, current, part)
        else:
            result = F.linear(whole, weight, bias)
        return result


class _Pass:
    """What the products of one forward pass share until its backward pass is through."""

    def __init__(self, block: Block, *, part: Tensor) -> None:
        self.tensor, self.purpose, self.regather = block.tensor, block.purpose, block.regather
        self.part = part.detach() if block.regather and not block.overlap else None
        self.left = self.waiting = len(block.products)
        self.gradients: dict[int, Tensor] = {}  # of products whose weight gradients are still to be computed
        self._gathered: Tensor | None = None

    def gathered(self, part: Tensor) -> Tensor:
        """The whole input again, once for all products."""
        if self._gathered is None:
            self._gathered = self.tensor.gather(part, purpose=f"{self.purpose} regather").wait()
        whole = self._gathered
        self.waiting -= 1
        if not self.waiting:
            self._gathered = None
        return whole


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, current: _Pass, *weights: Tensor) -> Tensor:
        tensor, ctx.current = current.tensor, current
        if tensor.sequence_parallel:
            whole = tensor.gather(x, purpose=f"{current.purpose} forward").wait()
        else:
            whole = x.view_as(x)
        if weights:
            ctx.save_for_backward(x if current.regather else whole)
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        current: _Pass = ctx.current
        tensor, (gradient,) = current.tensor, gradients
        kept = ctx.saved_tensors
        if kept and current.regather:
            kept = (tensor.gather(kept[0], purpose=f"{current.purpose} regather").wait(),)
        begin = tensor.scatter_sum if tensor.sequence_parallel else tensor.all_sum
        pending = begin(gradient, purpose=f"{current.purpose} backward")
        wanted = ctx.needs_input_grad[2:]
        later = [_weight_gradient(current.gradients.pop(n, None), *kept) if w else None for n, w in enumerate(wanted)]
        return pending.wait(), None, *later


class _LaterProduct(torch.autograd.Function):
    """A product that leaves its weight's gradient to `_Enter`."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, weight: Tensor, bias: Tensor | None, current: _Pass, number: int) -> Tensor:
        ctx.current, ctx.number = current, number
        ctx.save_for_backward(weight)
        return F.linear(whole, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,), (weight,) = gradients, ctx.saved_tensors
        ctx.current.gradients[ctx.number] = gradient
        return gradient @ weight, None, _bias_gradient(gradient, wanted=ctx.needs_input_grad[2]), None, None


class _RegatheredProduct(torch.autograd.Function):
    """A product that keeps a part of its input."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, weight: Tensor, bias: Tensor | None, current: _Pass, part: Tensor) -> Tensor:
        ctx.current = current
        ctx.save_for_backward(part, weight)
        return F.linear(whole, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,), (part, weight) = gradients, ctx.saved_tensors
        whole = ctx.current.gathered(part)
        of_weight = _weight_gradient(gradient, whole) if ctx.needs_input_grad[1] else None
        return gradient @ weight, of_weight, _bias_gradient(gradient, wanted=ctx.needs_input_grad[2]), None, None


def _weight_gradient(gradient: Tensor | None, whole: Tensor) -> Tensor | None:
    """[out, in] of gradient[B, S, out] and whole[B, S, in]; None for a product whose output was not used."""
    return None if gradient is None else gradient.flatten(0, -2).T @ whole.flatten(0, -2)


def _bias_gradient(gradient: Tensor, *, wanted: bool) -> Tensor | None:
    return gradient.flatten(0, -2).sum(0) if wanted else None


def leave(x: Tensor, tensor: TensorGroup, *, purpose: str = "block") -> Tensor:
    """x[B, S, D], a summand on each rank -> the sum, [B, S/t, D] with sequence parallelism, else [B, S, D]."""
    result: Tensor = _Leave.apply(x, tensor, purpose)
    return result


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tensor: TensorGroup, purpose: str) -> Tensor:
        ctx.tensor, ctx.purpose = tensor, purpose
        begin = tensor.scatter_sum if tensor.sequence_parallel else tensor.all_sum
        return begin(x, purpose=f"{purpose} forward").wait()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        if ctx.tensor.sequence_parallel:
            gradient = ctx.tensor.gather(gradient, purpose=f"{ctx.purpose} backward").wait()
        return gradient, None, None
