"""Which layers each stage has. Pure.

`auto` gives every stage about the same work, counting the embedding (a look-up) and the head with the loss as parts of a
layer: Llama 3 takes one layer off the first and the last stage for them (arXiv:2407.21783 section 3.3.2).
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

from fourfold.pipeline.schedules import SCHEDULES, Placement
from fourfold.planner.parameters import layer_matmul_parameters
from fourfold.schema import PipelineConfig


def layers_of_stages(settings: PipelineConfig, *, model_config: Any, stages: int) -> list[tuple[int, int]]:
    """[first, last) of each stage; assumes that nothing is refused."""
    counts = settings.split or balanced(
        model_config.num_hidden_layers, stages=stages, head=head_weight(model_config), embedding=EMBEDDING
    )
    ranges, at = [], 0
    for count in counts:
        ranges.append((at, at + count))
        at += count
    return ranges


EMBEDDING = 0.2  # of a layer: it costs no product, but its memory


def head_weight(model_config: Any) -> float:
    """Work of the head in layers: products only, 2 FLOPs a weight and token in both."""
    return float(model_config.hidden_size * model_config.vocab_size / layer_matmul_parameters(model_config))


@cache  # asked for each rank, and looks through all stages for each layer
def balanced(layers: int, *, stages: int, head: float, embedding: float) -> tuple[int, ...]:
    """Layers of each stage so that the largest load is as small as can be, at least one each; the more even of equals."""
    counts = [1] * stages
    extra = [0.0] * stages
    extra[0] += embedding
    extra[-1] += head
    for _ in range(layers - stages):
        lightest = min(range(stages), key=lambda stage: (counts[stage] + extra[stage], -stage))
        counts[lightest] += 1
    return tuple(counts)


def refusals(settings: PipelineConfig, *, layers: int, stages: int, per_rank: int) -> Iterator[str]:
    """Why the layers cannot be cut so."""
    if layers < stages:
        ranks = stages // per_rank
        if SCHEDULES[settings.schedule].placement is Placement.loop and layers >= ranks:
            fewer = f"pipeline.virtual_stages={layers // ranks}"
        else:
            most = max(1, layers // per_rank)
            fewer = f"pp_size={most}" + (" or less" if most > 1 else "")
        yield (
            f"{ranks} pipeline ranks of {per_rank} stages need {stages} layers, and the model has {layers} (num_hidden_layers): "
            f"use {fewer}."
        )
    split = settings.split
    if split is None:
        return
    if len(split) != stages:
        yield f"pipeline.split={split} has {len(split)} numbers for {stages} stages: give one for each, or use pipeline.split=null."
    elif min(split) < 1:
        yield f"pipeline.split={split} has a stage of {min(split)} layers: every stage needs one at least; or use pipeline.split=null."
    elif sum(split) != layers:
        yield f"pipeline.split={split} has {sum(split)} layers, and the model {layers} (num_hidden_layers): place them all, or use pipeline.split=null."
