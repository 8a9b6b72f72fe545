"""Doubles of flash-attn's functions, by plain products on the CPU: the signatures of FlashAttention-2 (2.7.0 to 2.8.4, the
same) and FlashAttention-3 (hopper/, since July 2025) upstream, and what their C++ does with windows before it masks."""

from types import ModuleType
from typing import Optional

import torch
from torch import Tensor

Window = tuple[int, int]


def products(q: Tensor, k: Tensor, *, scale: float, softcap: float, window: Window) -> tuple[Tensor, Tensor]:
    """(logits[B, H, S, T], slope of the soft-cap) of q[B, S, H, D] and k[B, T, K, D]."""
    logits = torch.einsum("bqhd,bkhd->bhqk", q, repeated(k, q)) * scale
    slope = torch.ones_like(logits)
    if softcap > 0:
        capped = torch.tanh(logits / softcap)
        logits, slope = capped * softcap, 1 - capped**2
    row, column = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1], torch.arange(k.shape[1])[None]
    seen = (column >= row - window[0]) & (column <= row + window[1])
    return logits.masked_fill(~seen, float("-inf")), slope


def repeated(x: Tensor, q: Tensor) -> Tensor:
    return x.repeat_interleave(q.shape[2] // x.shape[2], dim=2)


def forward(q: Tensor, k: Tensor, v: Tensor, **how: object) -> tuple[Tensor, Tensor]:
    assert all(x.stride(-1) == 1 for x in (q, k, v))
    logits, _ = products(q, k, **how)  # type: ignore[arg-type]
    return torch.einsum("bhqk,bkhd->bqhd", logits.softmax(-1), repeated(v, q)), logits.logsumexp(-1).float()


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, filled: list[Tensor], **how: object
) -> Tensor:
    assert lse.is_contiguous()
    assert [x.shape for x in filled] == [x.shape for x in (q, k, v)]
    logits, slope = products(q, k, **how)  # type: ignore[arg-type]
    weights = (logits - lse.unsqueeze(-1)).exp()
    through = torch.einsum("bqhd,bqhd->bhq", dout, out)
    d_logits = weights * (torch.einsum("bqhd,bkhd->bhqk", dout, repeated(v, q)) - through[..., None]) * slope
    d_logits = d_logits * how["scale"]
    filled[0].copy_(torch.einsum("bhqk,bkhd->bqhd", d_logits, repeated(k, q)))
    for target, value in (
        (filled[1], torch.einsum("bhqk,bqhd->bkhd", d_logits, q)),
        (filled[2], torch.einsum("bhqk,bqhd->bkhd", weights, dout)),
    ):
        target.copy_(value.unflatten(2, (target.shape[2], -1)).sum(3))
    return through


def window_of_2(left: int, right: int, *, causal: bool, queries: int, keys: int) -> Window:
    """mha_fwd and set_params_fprop of csrc/flash_attn/flash_api.cpp."""
    left, right = (-1 if side >= keys else side for side in (left, right))
    right = 0 if causal else right
    if left < 0 and right < 0:
        return queries + keys, queries + keys
    return (keys if left < 0 else left), (keys if right < 0 else right)


def window_of_3(left: int, right: int, *, causal: bool, queries: int, keys: int) -> Window:
    """mha_fwd and set_params_fprop of hopper/flash_api.cpp."""
    left, right = (-1 if left >= keys - 1 else left), (-1 if right >= queries - 1 else right)
    right = 0 if causal else right
    return (keys - 1 if left < 0 else left), (queries - 1 if right < 0 else right)


def flash_attn_2() -> ModuleType:
    module = ModuleType("flash_attn.flash_attn_interface")

    @torch.library.custom_op("flash_attn_double::_flash_attn_forward", mutates_args=())
    def _flash_attn_forward(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        dropout_p: float,
        softmax_scale: float,
        causal: bool,
        window_size_left: int,
        window_size_right: int,
        softcap: float,
        alibi_slopes: Optional[torch.Tensor],  # noqa: UP045
        return_softmax: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        assert not dropout_p and alibi_slopes is None and not return_softmax  # noqa: PT018
        sides = {"causal": causal, "queries": q.shape[1], "keys": k.shape[1]}
        window = window_of_2(window_size_left, window_size_right, **sides)
        found = forward(q, k, v, scale=softmax_scale, softcap=softcap, window=window)
        return *found, q.new_empty(0), torch.empty(2, dtype=torch.int64)

    @torch.library.custom_op("flash_attn_double::_flash_attn_backward", mutates_args=("dq", "dk", "dv"))
    def _flash_attn_backward(
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        softmax_lse: torch.Tensor,
        dq: Optional[torch.Tensor],  # noqa: UP045
        dk: Optional[torch.Tensor],  # noqa: UP045
        dv: Optional[torch.Tensor],  # noqa: UP045
        dropout_p: float,
        softmax_scale: float,
        causal: bool,
        window_size_left: int,
        window_size_right: int,
        softcap: float,
        alibi_slopes: Optional[torch.Tensor],  # noqa: UP045
        deterministic: bool,
        rng_state: Optional[torch.Tensor] = None,  # noqa: UP045
    ) -> torch.Tensor:
        assert dq is not None and dk is not None and dv is not None  # noqa: PT018
        sides = {"causal": causal, "queries": q.shape[1], "keys": k.shape[1]}
        window = window_of_2(window_size_left, window_size_right, **sides)
        how = {"scale": softmax_scale, "softcap": softcap, "window": window}
        return backward(dout, q, k, v, out, softmax_lse, [dq, dk, dv], **how)

    module._flash_attn_forward, module._flash_attn_backward = _flash_attn_forward, _flash_attn_backward  # type: ignore[attr-defined]
    return module


def flash_attn_3() -> ModuleType:
    module = ModuleType("flash_attn_interface")

    def _flash_attn_forward(
        q,
        k,
        v,
        k_new=None,
        v_new=None,
        qv=None,
        out_=None,
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        cu_seqlens_k_new=None,
        seqused_q=None,
        seqused_k=None,
        max_seqlen_q=None,
        max_seqlen_k=None,
        page_table=None,
        kv_batch_idx=None,
        leftpad_k=None,
        rotary_cos=None,
        rotary_sin=None,
        seqlens_rotary=None,
        q_descale=None,
        k_descale=None,
        v_descale=None,
        softmax_scale=None,
        causal=False,
        window_size_left=-1,
        window_size_right=-1,
        attention_chunk=0,
        softcap=0.0,
        rotary_interleaved=True,
        scheduler_metadata=None,
        num_splits=1,
        pack_gqa=None,
        sm_margin=0,
    ):
        sides = {"causal": causal, "queries": q.shape[1], "keys": k.shape[1]}
        window = window_of_3(window_size_left, window_size_right, **sides)
        found = forward(q, k, v, scale=softmax_scale, softcap=softcap, window=window)
        return *found, torch.tensor([]), torch.tensor([])

    def _flash_attn_backward(
        dout,
        q,
        k,
        v,
        out,
        softmax_lse,
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        sequed_q=None,
        sequed_k=None,
        max_seqlen_q=None,
        max_seqlen_k=None,
        dq=None,
        dk=None,
        dv=None,
        softmax_scale=None,
        is_causal=False,
        window_size_left=-1,
        window_size_right=-1,
        softcap=0.0,
        deterministic=False,
        sm_margin=0,
    ):
        sides = {"causal": is_causal, "queries": q.shape[1], "keys": k.shape[1]}
        window = window_of_3(window_size_left, window_size_right, **sides)
        how = {"scale": softmax_scale, "softcap": softcap, "window": window}
        return backward(dout, q, k, v, out, softmax_lse, [dq, dk, dv], **how)

    module._flash_attn_forward, module._flash_attn_backward = _flash_attn_forward, _flash_attn_backward  # type: ignore[attr-defined]
    return module


def old_flash_attn_2() -> ModuleType:
    """2.6.3: the window in one tuple."""
    module = ModuleType("flash_attn.flash_attn_interface")

    def _flash_attn_forward(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_softmax
    ):
        raise AssertionError

    module._flash_attn_forward = module._flash_attn_backward = _flash_attn_forward  # type: ignore[attr-defined]
    return module
