"""Attention of every Hugging Face model that goes through transformers' AttentionInterface, by a context strategy.

Registered once under one name; what belongs to a micro-batch comes as a keyword of the model's forward pass.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fourfold.context.kernels.kernel import Spec
from fourfold.context.sharding import Sharding
from fourfold.context.strategy import IMPLEMENTATION, ContextStrategy

__all__ = ["IMPLEMENTATION", "KEYWORD", "Context", "register"]

KEYWORD = "fourfold_context"


@dataclass(frozen=True)
class Context:
    """Of one micro-batch: how its rows lie on the ranks, and who computes attention over them."""

    strategy: ContextStrategy
    sharding: Sharding
    last_position: int  # the highest of all ranks: some rotary embeddings scale by it


def register() -> None:
    """Make `attn_implementation="fourfold"` known to transformers. It builds no mask: documents are in the Context."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(IMPLEMENTATION, _attention)
    AttentionMaskInterface.register(IMPLEMENTATION, _no_mask)


def _no_mask(*arguments: Any, **keywords: Any) -> None:
    return None


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """query[B, H, s, D], key and value[B, K, s, D] with rotary embedding -> out[B, s, H, D]."""
    context: Context = keywords[KEYWORD]
    assert attention_mask is None
    assert not keywords.get("dropout"), "refused beforehand"
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    spec = Spec(scale, window=sliding_window, softcap=softcap)
    out = context.strategy.attend(query, key, value, spec, context.sharding)
    return out.transpose(1, 2).contiguous(), None
