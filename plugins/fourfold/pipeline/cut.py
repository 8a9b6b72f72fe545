"""Cut a Hugging Face causal LM on the meta device down to the layers of one pipeline rank, and into its stages.

What other ranks have is replaced before anything is loaded, so that no rank builds or reads it. Layers keep their places in
the list, and so parameters their names.
"""

import copy
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fourfold.context.attention import KEYWORD, Context
from fourfold.model.build import GlobalRotary
from fourfold.pipeline.schedules import stages_of, stages_per_rank
from fourfold.pipeline.split import layers_of_stages
from fourfold.schema import PipelineConfig


@dataclass(frozen=True)
class Cut:
    """What a pipeline rank has: its stages by number, lowest first, of `total`, and [first, last) of the layers of each."""

    stages: list[int]
    layers: list[tuple[int, int]]
    total: int

    @classmethod
    def of(cls, settings: PipelineConfig, *, model_config: Any, rank: int, ranks: int) -> "Cut":
        total = ranks * stages_per_rank(settings)
        everything = layers_of_stages(settings, model_config=model_config, stages=total)
        mine = stages_of(rank, ranks=ranks, settings=settings)
        return cls(mine, [everything[stage] for stage in mine], total)

    @property
    def first(self) -> bool:
        return self.stages[0] == 0

    @property
    def last(self) -> bool:
        return self.stages[-1] == self.total - 1


class Elsewhere(nn.Module):
    """In the place of what another rank, or another stage, has: hands its first argument on."""

    elsewhere = True

    def forward(self, hidden: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        return hidden


def keep(model: Any, cut: Cut) -> None:
    """Leave this rank's layers, the embedding if it has the first stage, final norm and head if the last."""
    mine = {layer for begin, end in cut.layers for layer in range(begin, end)}
    for number in range(len(model.model.layers)):
        if number not in mine:
            model.model.layers[number] = Elsewhere()
    if not cut.first:
        model.model.embed_tokens = Elsewhere()
    if not cut.last:
        model.model.norm = Elsewhere()
        model.lm_head = Elsewhere()


def untie(model: Any, cut: Cut) -> None:
    """A tied head without the embedding beside it gets a parameter of its own, a copy for ever: it is named like the
    embedding in checkpoints, and not counted or stored here."""
    if not model.config.tie_word_embeddings or not cut.last or cut.first:
        return
    model.lm_head.weight.stored_as = "model.embed_tokens.weight"
    model.lm_head.weight.tensor_model_parallel = False


def stages_of_model(model: Any, cut: Cut) -> list["Stage"]:
    """One module for each; call it when everything else is done to the model."""
    rotary = GlobalRotary(model.model.rotary_emb)
    return [
        Stage(model, layers, rotary=rotary, first=stage == 0, last=stage == cut.total - 1)
        for stage, layers in zip(cut.stages, cut.layers, strict=True)
    ]


class Stage(nn.Module):
    """One stage of the model. Several of one rank share nothing but the rotary embedding."""

    def __init__(self, model: Any, layers: tuple[int, int], *, rotary: GlobalRotary, first: bool, last: bool) -> None:
        super().__init__()
        self.base = _view(model.model, layers, first=first, last=last)
        self.head = model.lm_head if last else None
        self.rotary = rotary
        self.first = first

    def forward(
        self,
        x: Tensor,
        position_ids: Tensor,
        labels: Tensor,
        document_ids: Tensor | None = None,
        context: Context | None = None,
    ) -> Tensor:
        """x: input_ids[B, S] of the first stage, else hidden[B, s, D] of the one before -> hidden[B, s, D], or of the last
        stage the sum of token losses."""
        self.rotary.last_position = None if context is None else context.last_position
        more = {} if context is None else {KEYWORD: context}
        given = {"input_ids": x} if self.first else {"inputs_embeds": x}
        output = self.base(**given, position_ids=position_ids, use_cache=False, **more).last_hidden_state
        loss: Tensor = output if self.head is None else self.head(output, labels)
        return loss


def _view(base: Any, layers: tuple[int, int], *, first: bool, last: bool) -> Any:
    """The model with these layers alone: another module of the same submodules."""
    view = copy.copy(base)
    for name, value in vars(base).items():  # hooks, submodules and so on: not the same dictionaries
        if isinstance(value, dict):
            vars(view)[name] = value.copy()
    kept = [layer if layers[0] <= number < layers[1] else Elsewhere() for number, layer in enumerate(base.layers)]
    view.layers = nn.ModuleList(kept)
    if not first:
        view.embed_tokens = Elsewhere()
    if not last:
        view.norm = Elsewhere()
    return view
