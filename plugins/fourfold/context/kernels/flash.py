"""The flash-attn package on CUDA, rectangle by rectangle: FlashAttention-2 from 2.7 and FlashAttention-3, for fp16 and
bf16, with grouped queries, windows and soft-caps natively (github.com/Dao-AILab/flash-attention, read at 2.8.4: its
flash_attn/flash_attn_interface.py and hopper/flash_attn_interface.py).

Its functions are called by keyword. A version whose functions do not take these keywords is passed over, and torch's own
kernel serves. FlashAttention-4 is passed over too: an alpha whose only backward with a given out and lse is private.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from fourfold.context.kernels.cuda import outnumbered, window_of
from fourfold.context.kernels.kernel import Spec
from fourfold.context.kernels.plain import PlainKernel
from fourfold.context.rectangles import Rectangle

BOTH = ("q", "k", "v", "softmax_scale", "window_size_left", "window_size_right", "softcap")
BACKWARD = (*BOTH, "dout", "out", "softmax_lse", "dq", "dk", "dv", "deterministic")


@dataclass(frozen=True, kw_only=True)
class Version:
    name: str
    module: str
    capabilities: range  # majors of the GPUs that it is for
    forward: dict[str, Any] = field(default_factory=dict)  # what it wants beside
    backward: dict[str, Any] = field(default_factory=dict)
    backward_causal: str = "causal"  # what it calls the flag there


VERSIONS = (
    Version(
        name="FlashAttention-3", module="flash_attn_interface", capabilities=range(9, 10), backward_causal="is_causal"
    ),
    Version(
        name="FlashAttention-2",
        module="flash_attn.flash_attn_interface",
        capabilities=range(8, 100),
        forward={"dropout_p": 0.0, "alibi_slopes": None, "return_softmax": False},
        backward={"dropout_p": 0.0, "alibi_slopes": None},
    ),
)


class FlashKernel:
    """Tensors of the package are [B, S, H, D] and lse [B, H, S]; masks align the last query with the last key."""

    def __init__(self, version: Version, forward: Callable[..., Any], backward: Callable[..., Any]) -> None:
        self.name = f"{version.name} of flash-attn"
        self._version, self._forward, self._backward = version, forward, backward

    def forward(self, q: Tensor, k: Tensor, v: Tensor, one: Rectangle, spec: Spec) -> tuple[Tensor, Tensor]:
        if outnumbered(one):
            return PlainKernel().forward(q, k, v, one, spec)
        tensors = {name: tensor.transpose(1, 2) for name, tensor in (("q", q), ("k", k), ("v", v))}
        out, lse, *_ = self._forward(
            **tensors, **_mask(one, spec), causal=one.kind == "causal", **self._version.forward
        )
        return out.transpose(1, 2), lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, one: Rectangle, spec: Spec
    ) -> tuple[Tensor, Tensor, Tensor]:
        if outnumbered(one):
            return PlainKernel().backward(grad, q, k, v, out, lse, one, spec)
        given = {"dout": grad, "q": q, "k": k, "v": v, "out": out}
        tensors = {name: tensor.transpose(1, 2) for name, tensor in given.items()}
        found = [torch.empty(tensors[name].shape, dtype=q.dtype, device=q.device) for name in ("q", "k", "v")]
        self._backward(
            **tensors,
            softmax_lse=lse.contiguous(),
            **dict(zip(("dq", "dk", "dv"), found, strict=True)),
            **_mask(one, spec),
            **{self._version.backward_causal: one.kind == "causal"},
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **self._version.backward,
        )
        d_q, d_k, d_v = (tensor.transpose(1, 2) for tensor in found)
        return d_q, d_k, d_v


def installed(capability: int) -> FlashKernel | None:
    """The best version that can be imported, is for GPUs of this major capability and takes what is passed here."""
    for version in VERSIONS:
        functions = _functions(version) if capability in version.capabilities else None
        if functions is not None:
            return FlashKernel(version, *functions)
    return None


def _functions(version: Version) -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    try:
        module = import_module(version.module)
        forward, backward = module._flash_attn_forward, module._flash_attn_backward
        _signature(forward).bind(**dict.fromkeys((*BOTH, "causal", *version.forward)))
        _signature(backward).bind(**dict.fromkeys((*BACKWARD, version.backward_causal, *version.backward)))
    except (
        ImportError,
        OSError,
        RuntimeError,
        AttributeError,
        TypeError,
    ):  # not there, built for others, or other names
        return None
    return forward, backward


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    """Of the function that torch.library.custom_op has wrapped (torch 2.15 does not pass its signature on)."""
    return inspect.signature(getattr(function, "_init_fn", function))


def _mask(one: Rectangle, spec: Spec) -> dict[str, Any]:
    left, right = window_of(one, spec)
    return {
        "softmax_scale": spec.scale,
        "window_size_left": -1 if left is None else left,
        "window_size_right": -1 if right is None else right,
        "softcap": spec.softcap or 0.0,
    }
