"""Which layer is cut how: transformers' own table of the model, extended by the user's (`tensor.plan`).

The table names modules by pattern and a style for each. transformers' implementation of the styles is not used: its
parameters are DTensors, which DeepSpeed refuses. `model.tp_plan` is read rather than the config's table, which lacks the
embedding and the head.
"""

import re
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any

from torch import nn

from fourfold.tensor.cuts import Heads, legal_sizes


class Part(StrEnum):
    """What becomes of a layer."""

    column = "column"
    row = "row"
    embedding = "embedding"
    head = "head"  # the output projection: cut by vocabulary, together with the loss
    partial = "partial"  # whole on every rank, sees a part of the heads: gradients are summed


COLUMN = {"colwise", "packed_colwise", "colwise_gather_output", "colwise_rep"}  # a gather is left out: a row follows
STYLES = {
    **dict.fromkeys(COLUMN, Part.column),
    **dict.fromkeys(["rowwise", "rowwise_split_input", "rowwise_rep"], Part.row),
    "embedding_rowwise": Part.embedding,
    "replicated_with_grad_allreduce": Part.partial,
}
PACKED = ("qkv_proj", "gate_up_proj")  # several projections in one matrix, cut each by itself
BY_HEAD = ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj")


def parts(model: Any, *, more: Mapping[str, str]) -> dict[str, Part]:
    """{module name: what becomes of it}, in the order of the model. Raises ValueError as `refusals` says."""
    problems = list(refusals(model, more=more))
    if problems:
        raise ValueError("\n".join(problems))
    return {name: _part(name, style, model) for name, _, style in _planned(model, more=more)}


def refusals(model: Any, *, more: Mapping[str, str]) -> Iterator[str]:
    """Why the table cannot be carried out, by layer."""
    table = {**model.tp_plan, **more}
    for pattern, style in table.items():
        if style not in STYLES:
            yield (
                f"tensor parallelism of {model.config.model_type}: the style {style} of {pattern} is not known; known are "
                f"{', '.join(STYLES)}. Name one of them in tensor.plan, or use tp_size=1."
            )
    planned = {name for name, *_ in _planned(model, more=more)}
    for pattern in more:
        if not any(_matches(name, pattern) for name in planned):
            yield f"tensor.plan names {pattern}, and {model.config.model_type} has no such layer."
    for name, module, style in _planned(model, more=more):
        wanted = _class(style)
        if wanted is not None and not isinstance(module, wanted):
            yield (
                f"{name} is a {type(module).__name__}, which the style {style} cannot cut: merge adapters into the model "
                f"(merge_and_unload) or take unquantised weights, or use tp_size=1."
            )
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding) and name not in planned:
            yield (
                f"{name} of {model.config.model_type} is in no table: say in tensor.plan how it is cut (colwise or rowwise), or "
                f"use tp_size=1."
            )


def refused_sizes(model_config: Any, *, size: int) -> Iterator[str]:
    """Why the heads and the MLP of a model cannot be spread over `size` ranks. Needs no model."""
    heads = Heads.of(model_config, size=size)
    legal = ", ".join(map(str, legal_sizes(model_config)))
    if heads.heads % size:
        yield f"tp_size={size} does not divide the {heads.heads} query heads (num_attention_heads): use tp_size={legal}."
    elif not heads.fits:
        yield (
            f"tp_size={size} and {heads.kv_heads} key/value heads (num_key_value_heads): one must divide the other; use "
            f"tp_size={legal}."
        )
    if model_config.intermediate_size % size:
        yield (
            f"tp_size={size} does not divide the {model_config.intermediate_size} channels of the MLP (intermediate_size): "
            f"use tp_size={legal}."
        )
    if heads.copies > 1 and model_config.model_type == "phi3":
        yield (
            f"tp_size={size} would repeat the {heads.kv_heads} key/value heads, and {model_config.model_type} packs them "
            f"with the queries into one matrix, of which a rank cannot store one part alone: use tp_size="
            f"{max(one for one in legal_sizes(model_config) if heads.kv_heads % one == 0)} or less."
        )


def _planned(model: Any, *, more: Mapping[str, str]) -> Iterator[tuple[str, nn.Module, str]]:
    table = {**model.tp_plan, **more}
    for name, module in model.named_modules():
        if getattr(module, "elsewhere", False):  # on another pipeline rank
            continue
        style = next((style for pattern, style in reversed(table.items()) if _matches(name, pattern)), None)
        if style is not None:
            yield name, module, style


def _matches(name: str, pattern: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), name) is not None


def _part(name: str, style: str, model: Any) -> Part:
    return Part.head if model.get_submodule(name) is model.get_output_embeddings() else STYLES[style]


def _class(style: str) -> type[nn.Module] | None:
    if STYLES.get(style) in (Part.column, Part.row):
        return nn.Linear
    return nn.Embedding if STYLES.get(style) is Part.embedding else None
