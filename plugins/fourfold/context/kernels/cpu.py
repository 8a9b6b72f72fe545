"""torch's fused CPU attention: memory linear in the tokens, grouped queries natively, fp64 to bf16. Checked against 2.15.

Two things about the op: a query whose keys are all masked has lse 0 (here -inf), and empty input kills the process (there
are no empty rectangles).
"""

from functools import lru_cache

import torch
from torch import Tensor

from fourfold.context.kernels.kernel import Spec
from fourfold.context.rectangles import Rectangle

FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class CpuKernel:
    name = "torch's fused CPU attention"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, one: Rectangle, spec: Spec) -> tuple[Tensor, Tensor]:
        mask = _mask(one, spec, q.dtype)
        out, lse = FORWARD(q, k, v, 0.0, one.kind == "causal", attn_mask=mask, scale=spec.scale)
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, one: Rectangle, spec: Spec
    ) -> tuple[Tensor, Tensor, Tensor]:
        mask = _mask(one, spec, q.dtype)
        found: tuple[Tensor, Tensor, Tensor] = BACKWARD(
            grad, q, k, v, out, lse.contiguous(), 0.0, one.kind == "causal", attn_mask=mask, scale=spec.scale
        )
        return found


def _mask(one: Rectangle, spec: Spec, dtype: torch.dtype) -> Tensor | None:
    if one.kind != "band":
        return None
    assert spec.window is not None
    return band_mask(one.q1 - one.q0, one.k1 - one.k0, one.offset, spec.window, dtype)


@lru_cache(maxsize=8)
def band_mask(queries: int, keys: int, offset: int, window: int, dtype: torch.dtype) -> Tensor:
    """[queries, keys] of 0 and -inf. Tiles of one layer share it; every query of a band sees a key."""
    distance = torch.arange(queries)[:, None] + offset - torch.arange(keys)[None]
    return torch.zeros(queries, keys, dtype=dtype).masked_fill_(~((distance >= 0) & (distance < window)), float("-inf"))
