"""Activation checkpointing: drop activations inside the decoder layers in the forward pass, recompute them in backward.

What is split: nothing; who sends what: nobody, 0 bytes. It trades compute for memory on each rank by itself, so it goes
beside every layout. With L layers, hidden states h[B, S, H]:

    none      every layer keeps all it needs                  O(L) memory
    full      each layer keeps its input                      O(L) inputs, one layer's activations at a time
    every_n   each stretch of n layers keeps its input        O(L/n) inputs, n layers' activations at a time;
                                                              n = sqrt(L) makes both O(sqrt L)
    selective each layer keeps its input and the outputs of the fused attention op (out[B, A, S, D], log-sum-exp[B, A, S])

A Llama layer saves about 20 times its input, so the lowest peak is at n = sqrt(L/20), which is `full` up to some 40
layers; `every_n` keeps the least between forward and backward, which counts when many passes are in flight.

Source: Chen et al. 2016 (arXiv:1604.06174) for every_n, Korthikanti et al. 2022 (arXiv:2205.05198) section 5 for selective.

How: one mechanism for all three. A Hugging Face model calls its layers one by one, each with its own mask and rotary
embedding, so `layer.forward` of every layer but the last of a stretch only records its call and hands its input on; the
last one runs the recorded calls under one torch.utils.checkpoint. Modules and parameters keep their names, and hooks on
the layers (DeepSpeed's, FSDP's) run once, outside the checkpoint; hooks on modules inside run again in recomputation.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn
from transformers import PreTrainedModel

from fourfold.activation.attention_ops import keep_attention
from fourfold.activation.stretches import stretch_sizes
from fourfold.schema import ActivationConfig, Checkpointing


@dataclass(frozen=True)
class Call:
    """One layer's forward and everything it was called with except the hidden states."""

    forward: Callable[..., Tensor]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Stretch:
    """Consecutive decoder layers that are recomputed as one; installs itself as their `forward`.

    `calls` holds the layers seen so far in the current forward pass and is empty between passes: what backward needs
    lives in the checkpoint, so any number of passes can be in flight.
    """

    def __init__(self, layers: Sequence[nn.Module], *, context_fn: Callable[[], Any]) -> None:
        assert layers, "a stretch has at least one layer"
        self.layers = list(layers)
        self.forwards = [layer.forward for layer in layers]
        self.context_fn = context_fn
        self.calls: list[Call] = []
        for index, layer in enumerate(layers):
            layer.forward = partial(self.step, index)  # instance attribute: no module is added or renamed

    def step(self, index: int, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """hidden_states[B, S, H] -> [B, S, H]; unchanged but for the last layer of the stretch, which runs them all.

        Raises ValueError when a key/value cache comes along: recomputation would write it a second time.
        """
        if not self.recomputes():
            return self.forwards[index](hidden_states, *args, **kwargs)
        refuse_cache(kwargs)
        if index == 0:
            self.calls = []  # a pass that failed midway left its own
        self.calls.append(Call(self.forwards[index], args, kwargs))
        if index < len(self.forwards) - 1:
            return hidden_states
        calls, self.calls = self.calls, []
        assert len(calls) == len(self.forwards), f"{len(calls)} of {len(self.forwards)} layers of a stretch were called"
        # Only the hidden states are positional, that is saved: masks and rotary embeddings are the same tensors for all
        # layers, so a reference costs nothing, while an offloading hook would copy them once a stretch.
        return checkpoint(
            partial(run, calls),
            hidden_states,
            use_reentrant=False,
            preserve_rng_state=True,
            context_fn=self.context_fn,
            respect_saved_tensors_hooks=True,  # what selective keeps is seen by offloading hooks too
        )

    def recomputes(self) -> bool:
        """The same answer for all layers of one pass: it needs gradients and training mode."""
        return torch.is_grad_enabled() and self.layers[0].training


def run(calls: Sequence[Call], hidden_states: Tensor) -> Tensor:
    """hidden_states[B, S, H] -> [B, S, H] through the recorded layers."""
    for call in calls:
        hidden_states = call.forward(hidden_states, *call.args, **call.kwargs)
        assert isinstance(hidden_states, Tensor), "decoder layers return a tensor since transformers 4.54"
    return hidden_states


def apply(
    model: PreTrainedModel, settings: ActivationConfig, *, ranges: Sequence[tuple[int, int]] | None = None
) -> None:
    """Checkpoint the decoder layers of a Hugging Face causal LM in place; evaluation and no_grad run as before. `ranges`:
    [first, last) of the layers that are called together, in a pipeline; stretches end with them.

    Raises ValueError when the model has no `model.layers`, checkpoints by itself already, or the settings do not fit it.
    """
    refuse_own_checkpointing(model)
    layers = decoder_layers(model)
    problems = refusals(settings, num_layers=len(layers), attn_implementation=str(model.config._attn_implementation))
    if problems:
        raise ValueError("\n".join(problems))
    context_fn: Callable[[], Any] = noop_context_fn
    if settings.checkpointing == Checkpointing.selective:
        context_fn = partial(create_selective_checkpoint_contexts, keep_attention)
    longest = 0
    for begin, end in ranges or [(0, len(layers))]:
        for size in stretch_sizes(end - begin, checkpointing=settings.checkpointing, every_n=settings.every_n):
            Stretch(layers[begin : begin + size], context_fn=context_fn)
            begin, longest = begin + size, max(longest, size)
    if longest > 1:
        model.model.register_forward_pre_hook(refuse_hidden_states, with_kwargs=True)


def refusals(settings: ActivationConfig, *, num_layers: int, attn_implementation: str) -> list[str]:
    """Every reason why these settings do not fit a model of `num_layers` layers, each naming the knob. Pure."""
    problems = []
    mode, every_n = Checkpointing(settings.checkpointing), settings.every_n
    if every_n is not None and mode != Checkpointing.every_n:
        problems.append(
            f"activation.every_n={every_n} is set but activation.checkpointing={mode.value} does not use it; "
            "use activation.checkpointing=every_n, or activation.every_n=null."
        )
    elif every_n is not None and not 1 <= every_n <= num_layers:
        problems.append(
            f"activation.every_n={every_n} is not between 1 and the {num_layers} layers of the model: use one that is."
        )
    if mode == Checkpointing.selective and attn_implementation in ("eager", "flex_attention"):
        problems.append(
            f"activation.checkpointing=selective keeps the outputs of the fused attention op, but "
            f"model.attn_implementation={attn_implementation} has none; "
            "use activation.checkpointing=full, or model.attn_implementation=sdpa if the model allows it."
        )
    return problems


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The layers that the model's forward calls, in order. Raises ValueError when they are not at `model.layers`."""
    layers = getattr(getattr(model, "model", None), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ValueError(
            f"activation checkpointing expects decoder layers at model.layers; {type(model).__name__} has none"
        )
    return list(layers[: model.config.num_hidden_layers])  # as Hugging Face's own loop does


def refuse_own_checkpointing(model: PreTrainedModel) -> None:
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        raise ValueError(
            "the model checkpoints its layers by itself already (activation_checkpointing_enable); "
            "activation.checkpointing is the one place to ask for it"
        )
    base = getattr(model, "model", None)
    applied = any(isinstance(layer.__dict__.get("forward"), partial) for layer in getattr(base, "layers", []))
    assert not applied, "activation checkpointing was applied to this model before"


def refuse_cache(kwargs: dict[str, Any]) -> None:
    names = ("cache", "past_key_values", "past_key_value", "layer_past")  # `cache` since transformers 5.20
    found = [name for name in names if kwargs.get(name) is not None]
    if found or kwargs.get("use_cache"):
        raise ValueError(
            f"activation checkpointing recomputes the layers, which would fill the key/value cache twice "
            f"(got {', '.join(found) or 'use_cache'}); call the model with use_cache=False in training"
        )


def refuse_hidden_states(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Inside a stretch the layers hand on their input, so a collector of their outputs would be told wrong values."""
    asked = kwargs.get("output_hidden_states", getattr(module.config, "output_hidden_states", False))
    if asked and module.training and torch.is_grad_enabled():
        raise ValueError(
            "output_hidden_states=True cannot be answered with activation.checkpointing=every_n in training: the layers "
            "inside a stretch are not run one by one; use activation.checkpointing=full"
        )
