"""torch's own FlashAttention on CUDA, for fp16 and bf16: grouped queries and windows natively. Checked by schema against
2.15; tests/gpu compares it with plain products where there is a GPU.

Its tensors are [B, S, H, D], and masks align the last query with the last key, so that the window of a tile is shifted by
what its offset is more than that.
"""

import torch
from torch import Tensor

from fourfold.context.kernels.kernel import Spec
from fourfold.context.kernels.plain import PlainKernel
from fourfold.context.rectangles import Rectangle


class CudaKernel:
    """For half-precision tensors: select.choose_kernel gives fp32 runs to plain products."""

    name = "torch's FlashAttention"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, one: Rectangle, spec: Spec) -> tuple[Tensor, Tensor]:
        if outnumbered(one):
            return PlainKernel().forward(q, k, v, one, spec)
        left, right = window_of(one, spec)
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            *(tensor.transpose(1, 2) for tensor in (q, k, v)),
            None,
            None,
            q.shape[2],
            k.shape[2],
            0.0,
            one.kind == "causal",
            False,
            scale=spec.scale,
            window_size_left=left,
            window_size_right=right,
        )
        return out.transpose(1, 2), lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, one: Rectangle, spec: Spec
    ) -> tuple[Tensor, Tensor, Tensor]:
        if outnumbered(one):
            return PlainKernel().backward(grad, q, k, v, out, lse, one, spec)
        left, right = window_of(one, spec)
        nothing = torch.zeros(2, dtype=torch.uint64, device=q.device)  # the random state of a dropout that there is not
        found = torch.ops.aten._flash_attention_backward(
            *(tensor.transpose(1, 2).contiguous() for tensor in (grad, q, k, v, out)),
            lse.contiguous(),
            None,
            None,
            q.shape[2],
            k.shape[2],
            0.0,
            one.kind == "causal",
            nothing,
            nothing[:1],
            scale=spec.scale,
            window_size_left=left,
            window_size_right=right,
        )
        d_q, d_k, d_v = (tensor.transpose(1, 2) for tensor in found)
        return d_q, d_k, d_v


def outnumbered(one: Rectangle) -> bool:
    """Whether the band has more queries than keys. FlashAttention-2 shortens what of a window reaches over all keys to
    their number (set_params_fprop in its flash_api.cpp), which would then hide keys from the first queries. Such bands are
    small, BAND_TILE x BAND_TILE pairs at most, so that plain products serve."""
    return one.kind == "band" and one.q1 - one.q0 > one.k1 - one.k0


def window_of(one: Rectangle, spec: Spec) -> tuple[int | None, int | None]:
    """(left, right) of FlashAttention's window, the last query being aligned with the last key."""
    if one.kind != "band":
        return None, None
    assert spec.window is not None
    right = one.offset - ((one.k1 - one.k0) - (one.q1 - one.q0))
    return spec.window - 1 - right, right
