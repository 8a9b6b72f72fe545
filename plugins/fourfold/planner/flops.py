"""Floating-point operations of one optimizer step, from the Hugging Face config alone. Imports no torch.

Two figures, a multiply-add counting two:

    model     what the mathematics needs: 6 per matrix element and token (2 forward, 4 backward; head included, embedding
              look-up, norms, softmax and rotary embedding excluded), and 12 x heads x head_dim for each (query, key) pair
              that the mask allows (QK^T and PV: 4 forward, 8 backward). Recomputation never enters. The M of MFU.
    hardware  model + what activation checkpointing runs a second time. The H of HFU.

MFU is Chowdhery et al. 2022 (PaLM, arXiv:2204.02311) appendix B, except that PaLM counts all S x S pairs; HFU is
Korthikanti et al. 2022 (arXiv:2205.05198) section 6.3, except that they add a whole forward pass. Here `hardware` adds
what torch's checkpoint really runs: the head is outside the checkpoints, and recomputation stops early, as soon as
the last tensor that backward needs is there, which spares the last product of a stretch (the last layer's down_proj)
unless something that saves its output follows it. So it equals torch's FlopCounterMode on the same module with eager
attention. What a fused attention kernel recomputes in its own backward (one more QK^T) is left out of both.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fourfold.activation.stretches import stretch_sizes
from fourfold.planner.parameters import (
    SANDWICH_NORMS,
    layer_matmul_parameters,
    matmul_parameters,
    parameter_count,
    query_size,
)
from fourfold.schema import Checkpointing

__all__ = ["Flops", "attention_pairs", "matmul_parameters", "parameter_count", "step_flops", "windowed_layers"]


@dataclass(frozen=True)
class Flops:
    """Operations of one step, over all tokens given; `model` for MFU, `hardware` for HFU."""

    model: int
    hardware: int


def attention_pairs(document_lengths: Iterable[int], *, window: int | None = None) -> int:
    """(query, key) pairs that causal attention within documents allows; lengths in tokens.

    With a sliding window a query sees itself and the window - 1 tokens before it (Hugging Face's convention).
    """
    if window is not None and window < 1:
        raise ValueError(f"window={window} is below 1 token; None means no sliding window")
    return sum(_document_pairs(length, window) for length in document_lengths)


def _document_pairs(length: int, window: int | None) -> int:
    reach = length if window is None else min(length, window)
    return reach * (reach + 1) // 2 + (length - reach) * reach


def windowed_layers(config: Any) -> int:
    """How many layers have sliding-window attention: by `layer_types`, else all if `sliding_window` is set, else none."""
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None:
        return sum(kind == "sliding_attention" for kind in layer_types[: config.num_hidden_layers])
    return config.num_hidden_layers if getattr(config, "sliding_window", None) else 0


def step_flops(
    config: Any,
    *,
    tokens: int,
    pairs_full: int,
    pairs_windowed: int = 0,
    checkpointing: Checkpointing = Checkpointing.none,
    every_n: int | None = None,
) -> Flops:
    """Forward and backward over `tokens` tokens, padding included if the model runs it.

    `pairs_full` and `pairs_windowed` are attention_pairs of one layer without and with the sliding window, over the same
    tokens. Raises ValueError when the model has windowed layers and no windowed pairs are given.
    """
    windowed = windowed_layers(config)
    if windowed and tokens and not pairs_windowed:
        raise ValueError(f"{windowed} layers have a sliding window of {config.sliding_window}; give pairs_windowed")
    layer_pairs = pairs_full * (config.num_hidden_layers - windowed) + pairs_windowed * windowed
    attention_forward = 4 * layer_pairs * query_size(config)
    model = 6 * matmul_parameters(config) * tokens + 3 * attention_forward
    mode = Checkpointing(checkpointing)
    again = 2 * recomputed_parameters(config, checkpointing=mode, every_n=every_n) * tokens
    if mode in (Checkpointing.full, Checkpointing.every_n):
        again += attention_forward  # selective keeps the attention's output
    return Flops(model=model, hardware=model + again)


def recomputed_parameters(config: Any, *, checkpointing: Checkpointing, every_n: int | None = None) -> int:
    """Matrix elements that a token meets a second time in backward (torch's early stop counted, see above)."""
    sizes = stretch_sizes(config.num_hidden_layers, checkpointing=checkpointing, every_n=every_n)
    spared = 0 if _output_is_saved(config) else config.hidden_size * config.intermediate_size
    return sum(sizes) * layer_matmul_parameters(config) - len(sizes) * spared


def _output_is_saved(config: Any) -> bool:
    """Whether backward needs the output of down_proj: a norm or a dropout follows it inside the layer."""
    return config.model_type in SANDWICH_NORMS or getattr(config, "resid_pdrop", 0.0) > 0.0
