"""The face of a local attention kernel, and how partial results are put together.

q[B, H, S, D], k and v[B, K, T, D] with H a multiple of K (grouped queries; keys are never repeated in memory). A kernel
computes rectangles of (query, key) pairs (rectangles.py). Partial outputs are merged by their log-sum-exp in fp32 (fp64
for fp64 input), as in Milakov & Gimelshein 2018 (arXiv:1805.02867); a query that sees no key has output 0 and lse -inf.
The backward pass of a rectangle takes the final output and lse, so that its gradients just add up (FlashAttention-2,
arXiv:2307.08691).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fourfold.context.rectangles import Rectangle


@dataclass(frozen=True)
class Spec:
    """What a layer asks of attention beside q, k and v. Causal within documents always."""

    scale: float
    window: int | None = None  # a query sees as many keys, itself included
    softcap: float | None = None  # logits become softcap x tanh(logits / softcap)


class Kernel(Protocol):
    """One call of it is one rectangle of one row or of several rows alike."""

    name: str

    def forward(self, q: Tensor, k: Tensor, v: Tensor, one: Rectangle, spec: Spec) -> tuple[Tensor, Tensor]:
        """(out[B, H, q, D] in the dtype of q, lse[B, H, q]) of q and k already cut to the rectangle."""
        ...

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, one: Rectangle, spec: Spec
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v from this rectangle; `out` and `lse` are the final ones of its queries."""
        ...


Rows = Sequence[Sequence[Rectangle]]  # of each row of a batch


def wide(dtype: torch.dtype) -> torch.dtype:
    """In which sums are made."""
    return torch.float64 if dtype is torch.float64 else torch.float32


@dataclass
class Partial:
    """Output and lse of the keys seen so far."""

    out: Tensor  # [B, H, S, D]
    lse: Tensor  # [B, H, S], -inf where nothing was seen
    owned: bool = False  # its tensors are nobody else's

    @classmethod
    def empty(cls, q: Tensor) -> "Partial":
        """`out` lies in memory as q does, so that a model's layer, which wants it token by token, makes no copy."""
        lse = q.new_full(q.shape[:3], float("-inf"), dtype=wide(q.dtype))
        return cls(torch.zeros_like(q, dtype=lse.dtype), lse, owned=True)

    def widened(self) -> "Partial":
        """Itself, ready to be added to. What a kernel returned is copied, as selective checkpointing keeps it as it was, and
        let go of."""
        if not self.owned:
            self.out, self.lse, self.owned = self.out.to(self.lse.dtype, copy=True), self.lse.clone(), True
        return self

    def merge(self, rows: slice, queries: slice, out: Tensor, lse: Tensor) -> None:
        before, after = self.lse[rows, :, queries], lse.to(self.lse.dtype)
        total = torch.logaddexp(before, after)
        finite = total.masked_fill(total == float("-inf"), 0.0)
        target = self.out[rows, :, queries]
        target.mul_((before - finite).exp_().unsqueeze(-1))
        target.addcmul_(out, (after - finite).exp_().unsqueeze(-1))  # without a weighted copy of `out`
        self.lse[rows, :, queries] = total


def attend(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, rows: Rows, spec: Spec, *, into: Partial | None = None
) -> Partial:
    """Forward over the rectangles of all rows, added to `into` if keys were seen before.

    Where one rectangle is all there is, its output is left in the dtype of q and nothing is merged.
    """
    calls = list(_calls(rows))
    if into is None and len(calls) == 1 and _is_all(calls[0], q):
        taken, one = calls[0]
        out, lse = kernel.forward(q, k[:, :, one.k0 : one.k1], v[:, :, one.k0 : one.k1], one, spec)
        return Partial(out, lse.to(wide(q.dtype)))
    partial = Partial.empty(q) if into is None else into.widened()
    for taken, one in calls:
        queries, keys = slice(one.q0, one.q1), slice(one.k0, one.k1)
        found = kernel.forward(q[taken, :, queries], k[taken, :, keys], v[taken, :, keys], one, spec)
        partial.merge(taken, queries, *found)
        del found  # before the next one is made
    return partial


def attend_backward(
    kernel: Kernel,
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    rows: Rows,
    spec: Spec,
    *,
    into: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Adds the gradients of q, k and v to `into`."""
    d_q, d_k, d_v = into
    for taken, one in _calls(rows):
        queries, keys = slice(one.q0, one.q1), slice(one.k0, one.k1)
        found = kernel.backward(
            grad[taken, :, queries],
            q[taken, :, queries],
            k[taken, :, keys],
            v[taken, :, keys],
            out[taken, :, queries],
            lse[taken, :, queries],
            one,
            spec,
        )
        for target, where, value in zip((d_q, d_k, d_v), (queries, keys, keys), found, strict=True):
            target[taken, :, where] += value
        del found, value


def gradients(
    kernel: Kernel,
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    rows: Rows,
    spec: Spec,
) -> tuple[Tensor, Tensor, Tensor]:
    """Those of q, k and v, in their dtype. Where one rectangle is all there is, nothing is added up."""
    calls = list(_calls(rows))
    if len(calls) == 1 and _is_all(calls[0], q) and (calls[0][1].k0, calls[0][1].k1) == (0, k.shape[2]):
        found = kernel.backward(grad, q, k, v, out, lse, calls[0][1], spec)
        return found[0].to(q.dtype), found[1].to(q.dtype), found[2].to(q.dtype)
    d_q, d_k, d_v = (torch.zeros(t.shape, dtype=wide(q.dtype), device=q.device) for t in (q, k, v))
    attend_backward(kernel, grad, q, k, v, out, lse, rows, spec, into=(d_q, d_k, d_v))
    return d_q.to(q.dtype), d_k.to(q.dtype), d_v.to(q.dtype)


def _calls(rows: Rows) -> list[tuple[slice, Rectangle]]:
    """(rows, rectangle); rows that are all alike are one call."""
    if all(row == rows[0] for row in rows):
        return [(slice(None), one) for one in rows[0]]
    return [(slice(number, number + 1), one) for number, row in enumerate(rows) for one in row]


def _is_all(call: tuple[slice, Rectangle], q: Tensor) -> bool:
    taken, one = call
    return taken == slice(None) and (one.q0, one.q1) == (0, q.shape[2])
