"""What local.py describes, forward and backward."""

from typing import Any

import torch
from torch import Tensor

from fourfold.context.kernels.kernel import Kernel, Rows, Spec, attend, gradients


class LocalAttention(torch.autograd.Function):
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
