"""One rank of a layout, built on the meta device by what also builds it for training, and counted."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fourfold.context.attention import IMPLEMENTATION, register
from fourfold.dryrun.trace import Traced, Tracer
from fourfold.dryrun.world import differing_groups, fake_world
from fourfold.layout import Layout
from fourfold.mesh import Mesh
from fourfold.model.build import build_on_meta
from fourfold.model.load import tie, tied_parameters
from fourfold.parallelize import Cuts, cut_model, trained_module
from fourfold.pipeline.cut import Cut
from fourfold.planner.held import Stage
from fourfold.schema import Precision, TrainConfig
from fourfold.slices import is_counted, slice_of
from fourfold.zero.optimizer import dimensions


@dataclass(frozen=True, kw_only=True)
class Built:
    """What was counted of one rank."""

    rank: int
    counted: int  # parameters that no other rank of its tp and pp groups counts
    copied: int  # of those that are whole on every tp rank: counted by the first
    stages: list[Stage]
    groups: list[list[int]]  # elements of each parameter as the optimizer has them
    traced: list[Traced]  # of each stage


class Builder:
    """Builds ranks one after the other; stages of equal shapes are traced once."""

    def __init__(self, config: TrainConfig, *, layout: Layout, model_config: Any) -> None:
        register()
        self._config, self._layout = config, layout
        dtype = torch.float32 if config.precision is Precision.fp32 else torch.bfloat16
        self._model = build_on_meta(model_config, dtype=dtype, attn_implementation=IMPLEMENTATION)
        tie(self._model, tied_parameters(self._model))  # as loading does
        self._traced: dict[Any, Traced] = {}

    @property
    def model(self) -> Any:
        """Whole, on the meta device."""
        return self._model

    def build(self, rank: int) -> Built:
        """RuntimeError if a group of the mesh is not the layout's."""
        with fake_world(self._layout, rank=rank) as mesh:
            wrong = differing_groups(mesh)
            if wrong:
                raise RuntimeError(f"rank {rank}: the mesh's groups {', '.join(wrong)} are not those of the layout")
            model = self._own_copy(mesh)
            cuts = cut_model(model, config=self._config, mesh=mesh)
            module = trained_module(model, cuts, config=self._config, mesh=mesh)
            parameters = list(module.parameters())
            counted = [parameter for parameter in parameters if is_counted(parameter)]
            groups = [[p.numel() for p in parameters if (dimensions(p) > 1) is decays] for decays in (True, False)]
            stages = list(self._stages(cuts))
            return Built(
                rank=rank,
                counted=sum(slice_of(parameter).numel() for parameter in counted),
                copied=sum(p.numel() for p in counted if not hasattr(p, "tensor_slice")),
                stages=stages,
                groups=groups,
                traced=list(self._trace(module, model, stages, cuts=cuts, mesh=mesh)),
            )

    def _own_copy(self, mesh: Mesh) -> Any:
        """Of what the rank will keep; the layers of others, which are replaced, are not copied."""
        config, layers = self._config, self._model.model.layers
        mine = set(range(len(layers)))
        if mesh.layout.pp_size > 1:
            pp_rank = mesh.layout.coordinate(mesh.rank)["pp"]
            cut = Cut.of(config.pipeline, model_config=self._model.config, rank=pp_rank, ranks=mesh.layout.pp_size)
            mine = {number for begin, end in cut.layers for number in range(begin, end)}
        return copy.deepcopy(self._model, {id(x): x for number, x in enumerate(layers) if number not in mine})

    def _stages(self, cuts: Cuts) -> Iterator[Stage]:
        if cuts.stages is None:
            yield Stage(self._model.config.num_hidden_layers, True, True)
            return
        for number, (begin, end) in zip(cuts.stages.stages, cuts.stages.layers, strict=True):
            yield Stage(end - begin, number == 0, number == cuts.stages.total - 1)

    def _trace(self, module: Any, model: Any, stages: list[Stage], *, cuts: Cuts, mesh: Mesh) -> Iterator[Traced]:
        tracer = Tracer(
            self._config, model_config=model.config, mesh=mesh, sent=cuts.tensor.sent if cuts.tensor else None
        )
        parts = list(module) if cuts.stages else [module]
        for stage, part in zip(stages, parts, strict=True):
            key = (stage, mesh.layout.coordinate(mesh.rank)["cp"], *_shapes(part))
            if key not in self._traced:
                hidden = None if stage.first else (model.config.hidden_size, model.dtype)
                head = model.lm_head if stage.last else None
                self._traced[key] = tracer.trace(part, head=head, hidden=hidden)
            yield self._traced[key]


def _shapes(module: nn.Module) -> Iterator[tuple[int, ...]]:
    """Of the parameters, and how much of each is no padding."""
    for parameter in module.parameters():
        yield (*parameter.shape, slice_of(parameter).numel())
