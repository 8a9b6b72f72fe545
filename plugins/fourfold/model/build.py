"""A Hugging Face causal LM on the meta device, with a head that returns the sum of token losses and never all logits."""

from typing import Any

import torch
from torch import Tensor, nn

from fourfold.context.attention import KEYWORD, Context
from fourfold.model.chunk import default_chunk
from fourfold.model.cross_entropy import linear_cross_entropy


class LossHead(nn.Module):
    """Output projection and cross-entropy in one: hidden[B, S, D], labels[B, S] -> sum of token losses, fp32 scalar.

    Logits of one chunk of tokens exist at a time, in fp32 (cross_entropy.py). torch's linear_cross_entropy does the same,
    but returns a sum in the weight's dtype, of 8 bits under bf16, has no soft-cap (Gemma 2), and no backward pass that comes
    `twice`, for the input and for the weight (pipeline schedules).
    """

    def __init__(self, head: nn.Linear, *, softcap: float | None, chunk_size: int | None, twice: bool = False) -> None:
        super().__init__()
        assert head.bias is None, "none of the supported models has a bias in its head"
        self.weight: nn.Parameter = head.weight
        self.softcap: float | None = softcap
        self.chunk_size: int | None = chunk_size
        self.twice: bool = twice

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """The weight is looked at here, when ZeRO-3 has gathered it."""
        return self.loss(hidden, labels, group=None, first=0, count=len(self.weight))

    def loss(self, hidden: Tensor, labels: Tensor, **share: Any) -> Tensor:
        """`share` is what this rank has of the vocabulary (linear_cross_entropy)."""
        vocabulary, width = getattr(self.weight, "ds_shape", self.weight.shape)
        size = self.chunk_size or default_chunk(labels.numel(), vocabulary=vocabulary, hidden=width)
        return linear_cross_entropy(
            hidden.flatten(0, 1),
            self.weight,
            labels.flatten(),
            softcap=self.softcap,
            chunk_size=size,
            twice=self.twice,
            **share,
        ).float()


class CausalLMLoss(nn.Module):
    """What is trained: input_ids, position_ids, labels (shifted already), all [B, S] -> sum of token losses.

    Documents of a packed row are told apart by the context (attention.py), or without one by their restarting
    position_ids, as transformers does it when there is no cache and no mask; it needs no document_ids.
    """

    def __init__(self, model: Any, *, chunk_size: int | None = None) -> None:
        """`chunk_size` is of the loss, unless the model's head computes one already."""
        super().__init__()
        self.model = model
        if isinstance(model.lm_head, nn.Linear):
            model.lm_head = LossHead(model.lm_head, softcap=final_softcap(model.config), chunk_size=chunk_size)
        self.rotary = GlobalRotary(model.model.rotary_emb)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        labels: Tensor,
        document_ids: Tensor | None = None,
        context: Context | None = None,
    ) -> Tensor:
        more = {} if context is None else {KEYWORD: context}
        self.rotary.last_position = None if context is None else context.last_position
        output = self.model.model(input_ids=input_ids, position_ids=position_ids, use_cache=False, **more)
        return self.model.lm_head(output.last_hidden_state, labels)


def final_softcap(config: Any) -> float | None:
    """Of the logits, in models that have one."""
    cap: float | None = getattr(config, "final_logit_softcapping", None)
    return cap


class GlobalRotary:
    """Lets rotary embeddings that scale by the highest position (dynamic, longrope) see that of the whole row, and of
    nothing else: transformers' dynamic ones remember the longest row that came before, which depends on who came first.

    The embedding is computed once in a forward pass, before the layers, so that recomputation never asks for it.
    """

    def __init__(self, rotary: Any) -> None:
        self._rotary, self._original = rotary, rotary.forward
        self.last_position: int | None = None
        rotary.forward = self

    def __call__(self, x: Tensor, position_ids: Tensor, *more: Any) -> Any:
        for name in [name for name in vars(self._rotary) if name.endswith("max_seq_len_cached")]:
            setattr(self._rotary, name, -1)
        if self.last_position is None:
            return self._original(x, position_ids, *more)
        last = position_ids.new_full((len(position_ids), 1), self.last_position)
        cos, sin = self._original(x, torch.cat([position_ids, last], dim=1), *more)
        return cos[:, :-1], sin[:, :-1]


def build_on_meta(config: Any, *, dtype: torch.dtype, attn_implementation: str) -> Any:
    """The model with parameters on the meta device and buffers (rotary frequencies) for real."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    with init_empty_weights(include_buffers=False), no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attn_implementation)
    return model.train()
