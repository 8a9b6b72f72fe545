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

from fourfold.tensor.cuts import Heads


class Part(StrEnum):
    """What becomes of a layer."""

    column = "column"
    row = "row"
    embedding = "embedding"
    head = "head"  # the output projection: cut by vocabulary, together with the loss
    partial = "partial"  # whole on every rank, sees a part of the heads: gradients are summed


HOW = "+tensor.plan={model.layers.*.mlp.side_proj:colwise}"
COLUMN = {"colwise", "packed_colwise", "colwise_gather_output", "colwise_rep"}  # a gather is left out: a row follows
STYLES = {
    **dict.fromkeys(COLUMN, Part.column),
    **dict.fromkeys(["rowwise", "rowwise_split_input", "rowwise_rep"], Part.row),
    "embedding_rowwise": Part.embedding,
    "replicated_with_grad_allreduce": Part.partial,
}


def parts(model: Any, *, more: Mapping[str, str]) -> dict[str, Part]:
    """{module name: what becomes of it}, in the order of the model, of a model for which nothing is refused."""
    return {name: _part(name, style, model) for name, _, style in _planned(model, more=more)}


def refusals(model: Any, *, more: Mapping[str, str], size: int) -> Iterator[str]:
    """Why the table, extended by `more`, cannot be carried out over `size` ranks; once for layers that are alike."""
    kind, table = model.config.model_type, dict(model.tp_plan)
    for pattern, style in {**table, **more}.items():
        if style not in STYLES:
            yield (
                f"tensor parallelism of {kind}: the style {style} of {pattern} is not known; known are {', '.join(STYLES)}. "
                f"Name one of them ({HOW}), or use tp_size=1."
            )
    names = [name for name, _ in model.named_modules()]
    for pattern, style in more.items():
        if table.get(pattern, style) != style:
            yield (
                f"tensor.plan says {style} for {pattern}, which {kind}'s own table cuts as {table[pattern]}: leave it out, the "
                f"others depend on it."
            )
        if not any(_matches(name, pattern) for name in names):
            yield f"tensor.plan names {pattern}, and {kind} has no such layer."
    yield from _once_for_all_layers(_unfit_layers(model, more=more, size=size))


def _unfit_layers(model: Any, *, more: Mapping[str, str], size: int) -> Iterator[tuple[str, str]]:
    """(name of a layer, what is wrong with it)"""
    planned = {name: (module, STYLES.get(style)) for name, module, style in _planned(model, more=more)}
    blocks = {name.rpartition(".")[0] for name, (_, part) in planned.items() if part is Part.column}
    repeated = ("k_proj", "v_proj") if Heads.of(model.config, size=size).copies > 1 else ()  # whole heads on each rank
    for name, (module, part) in planned.items():
        if part is Part.partial and name.rpartition(".")[0] not in blocks:
            yield (
                name,
                "sees all channels on every rank, so that its gradients must not be summed: leave it out of tensor.plan.",
            )
        if part in (Part.column, Part.row) and not isinstance(module, nn.Linear):
            yield (
                name,
                f"is a {type(module).__name__}, which cannot be cut: merge adapters into the model (merge_and_unload) or take "
                f"unquantised weights, or use tp_size=1.",
            )
        elif isinstance(module, nn.Linear) and part in (Part.column, Part.row):
            width = module.out_features if part is Part.column else module.in_features
            if width % size and name != "lm_head" and name.rpartition(".")[2] not in repeated:
                yield name, f"has {width} channels, which tp_size={size} does not divide: use a tp_size that does."
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding) and name not in planned:
            yield name, f"is in no table: say whether it is cut as colwise or rowwise ({HOW}), or use tp_size=1."


def _once_for_all_layers(problems: Iterator[tuple[str, str]]) -> Iterator[str]:
    alike: dict[tuple[str, str], list[str]] = {}
    for name, problem in problems:
        alike.setdefault((re.sub(r"\.\d+\.", ".*.", name), problem), []).append(name)
    for (_, problem), names in alike.items():
        others = f" and {len(names) - 1} like it" if len(names) > 1 else ""
        yield f"{names[0]}{others} {problem}"


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
