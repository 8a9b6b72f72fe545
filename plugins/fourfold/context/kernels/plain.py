"""Attention by plain products, on any device and with a soft-cap: a block of queries at a time, so that memory is linear
in the tokens. Slower than a fused kernel; for what none of those has."""

from collections.abc import Iterator

import torch
from torch import Tensor

from fourfold.context.kernels.kernel import Spec, wide
from fourfold.context.rectangles import Rectangle

BLOCK = 128  # queries whose logits exist at a time


class PlainKernel:
    name = "plain products, block by block"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, one: Rectangle, spec: Spec) -> tuple[Tensor, Tensor]:
        outs, lses = [], []
        for queries in _blocks(q.shape[2]):
            logits, _ = _logits(q[:, :, queries], k, one, spec, first=queries.start)
            lse = torch.logsumexp(logits, dim=-1)
            weights = (logits - lse.masked_fill(lse == float("-inf"), 0.0).unsqueeze(-1)).exp_()
            outs.append(torch.einsum("bkgqt,bktd->bkgqd", weights, v.to(weights.dtype)).flatten(1, 2).to(q.dtype))
            lses.append(lse.flatten(1, 2))
        return torch.cat(outs, dim=2), torch.cat(lses, dim=2)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, one: Rectangle, spec: Spec
    ) -> tuple[Tensor, Tensor, Tensor]:
        sums = wide(q.dtype)
        d_q = torch.empty(q.shape, dtype=sums, device=q.device)
        d_k, d_v = (torch.zeros(t.shape, dtype=sums, device=t.device) for t in (k, v))
        groups = (k.shape[1], q.shape[1] // k.shape[1])
        for queries in _blocks(q.shape[2]):
            block, upstream = q[:, :, queries], grad[:, :, queries].to(sums).unflatten(1, groups)
            logits, slope = _logits(block, k, one, spec, first=queries.start)
            final = lse[:, :, queries].unflatten(1, groups)
            weights = (logits - final.masked_fill(final == float("-inf"), 0.0).unsqueeze(-1)).exp_()
            d_v += torch.einsum("bkgqt,bkgqd->bktd", weights, upstream)
            through = (upstream * out[:, :, queries].to(sums).unflatten(1, groups)).sum(-1, keepdim=True)
            d_logits = weights * (torch.einsum("bkgqd,bktd->bkgqt", upstream, v.to(sums)) - through)
            d_logits = (d_logits if slope is None else d_logits * slope) * spec.scale
            d_q[:, :, queries] = torch.einsum("bkgqt,bktd->bkgqd", d_logits, k.to(sums)).flatten(1, 2)
            d_k += torch.einsum("bkgqt,bkgqd->bktd", d_logits, block.to(sums).unflatten(1, groups))
        return d_q, d_k, d_v


def _blocks(length: int) -> Iterator[slice]:
    return (slice(start, min(start + BLOCK, length)) for start in range(0, length, BLOCK))


def _logits(q: Tensor, k: Tensor, one: Rectangle, spec: Spec, *, first: int) -> tuple[Tensor, Tensor | None]:
    """(logits[B, K, G, q, T] in wide floats, -inf where not allowed; the slope of the soft-cap)."""
    sums = wide(q.dtype)
    grouped = q.to(sums).unflatten(1, (k.shape[1], q.shape[1] // k.shape[1]))
    logits = torch.einsum("bkgqd,bktd->bkgqt", grouped, k.to(sums)) * spec.scale
    slope = None
    if spec.softcap is not None:
        capped = torch.tanh(logits / spec.softcap)
        logits, slope = capped * spec.softcap, 1 - capped.square()
    if one.kind == "full":
        return logits, slope
    offset = first + (0 if one.kind == "causal" else one.offset)
    distance = torch.arange(q.shape[2], device=q.device)[:, None] + offset
    distance = distance - torch.arange(k.shape[2], device=q.device)[None]
    allowed = distance >= 0
    if one.kind == "band":
        assert spec.window is not None
        allowed &= distance < spec.window
    return logits.masked_fill(~allowed, float("-inf")), slope
