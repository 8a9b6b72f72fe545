"""Which parameters a rank holds, after pipeline and tensor parallelism have cut the model, before ZeRO shares them. From the
Hugging Face config alone, for the kinds of parameters.py; imports no torch.

Shapes are those of tensor/cuts.py: heads and the MLP's channels in equal parts, key heads of which there are fewer than ranks
on several, the vocabulary filled up to a multiple of the ranks, norms and the biases that follow a sum on all.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fourfold.layout import Layout
from fourfold.pipeline.schedules import stages_of, stages_per_rank
from fourfold.pipeline.split import layers_of_stages
from fourfold.planner.parameters import HEAD_NORMS, SANDWICH_NORMS, query_size
from fourfold.schema import PipelineConfig
from fourfold.tensor.cuts import Heads, rounded_up


@dataclass(frozen=True)
class Stage:
    """Part of a model: so many layers, with the embedding before the first and the norm and head behind the last."""

    layers: int
    first: bool
    last: bool


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """On one rank of a tp group."""

    elements: int  # with padding
    counted: int  # of those that no other rank of the tp group, and no other stage, counts
    decays: bool = True  # a matrix: the optimizer has them in one group, vectors in another


def stages_of_rank(settings: PipelineConfig, *, layout: Layout, model_config: Any, rank: int) -> list[Stage]:
    """Those of pipeline rank `rank`, in order; without a pipeline all of the model is one."""
    if layout.pp_size == 1:
        return [Stage(model_config.num_hidden_layers, True, True)]
    total = layout.pp_size * stages_per_rank(settings)
    ranges = layers_of_stages(settings, model_config=model_config, stages=total)
    return [
        Stage(ranges[stage][1] - ranges[stage][0], stage == 0, stage == total - 1)
        for stage in stages_of(rank, ranks=layout.pp_size, settings=settings)
    ]


def held_parameters(model_config: Any, *, stages: list[Stage], tp_size: int, tp_rank: int = 0) -> list[Parameter]:
    """Of one rank: every layer's, then those outside of the layers."""
    layers = sum(stage.layers for stage in stages)
    once = list(_of_layer(model_config, tp_size=tp_size, tp_rank=tp_rank))
    first, last = any(stage.first for stage in stages), any(stage.last for stage in stages)
    return [*once * layers, *_outside(model_config, first=first, last=last, tp_size=tp_size, tp_rank=tp_rank)]


def counted_parameters(settings: PipelineConfig, *, layout: Layout, model_config: Any) -> int:
    """Sum over all ranks of the tp and pp groups of what each counts: the model's number of parameters."""
    return sum(
        one.counted
        for rank in range(layout.pp_size)
        for stages in [stages_of_rank(settings, layout=layout, model_config=model_config, rank=rank)]
        for tp_rank in range(layout.tp_size)
        for one in held_parameters(model_config, stages=stages, tp_size=layout.tp_size, tp_rank=tp_rank)
    )


def _of_layer(config: Any, *, tp_size: int, tp_rank: int) -> Iterator[Parameter]:
    heads, hidden, inner = Heads.of(config, size=tp_size), config.hidden_size, config.intermediate_size // tp_size
    queries = query_size(config) // tp_size
    keys = heads.local_kv * heads.head_dim
    counts_keys, counts_copies = tp_rank % heads.copies == 0, tp_rank == 0
    if config.model_type == "phi3":
        yield _parameter((queries + 2 * keys) * hidden)
        yield _parameter(2 * inner * hidden)
    else:
        yield _parameter(queries * hidden)
        yield from [_parameter(keys * hidden, counts=counts_keys)] * 2
        yield from [_parameter(inner * hidden)] * 2
    yield _parameter(hidden * queries)
    yield _parameter(hidden * inner)
    norms = 4 if config.model_type in SANDWICH_NORMS else 2
    yield from [_parameter(hidden, counts=counts_copies, decays=False)] * norms
    if config.model_type in HEAD_NORMS:
        yield from [_parameter(heads.head_dim, counts=counts_copies, decays=False)] * 2
    biased = getattr(config, "attention_bias", False)
    if biased or config.model_type == "qwen2":
        yield _parameter(queries, decays=False)
        yield from [_parameter(keys, counts=counts_keys, decays=False)] * 2
    if biased and config.model_type != "qwen2":
        yield _parameter(hidden, counts=counts_copies, decays=False)
    if getattr(config, "mlp_bias", False):
        yield from [_parameter(inner, decays=False)] * 2
        yield _parameter(hidden, counts=counts_copies, decays=False)


def _outside(config: Any, *, first: bool, last: bool, tp_size: int, tp_rank: int) -> Iterator[Parameter]:
    hidden, tied = config.hidden_size, getattr(config, "tie_word_embeddings", False)
    ((begin, end),) = rounded_up(config.vocab_size, size=tp_size)[tp_rank]
    table, real = -(-config.vocab_size // tp_size) * hidden, (end - begin) * hidden
    if first:
        yield Parameter(elements=table, counted=real)
    if last:
        yield _parameter(hidden, counts=tp_rank == 0, decays=False)
        if not (tied and first):
            yield Parameter(elements=table, counted=0 if tied else real)


def _parameter(elements: int, *, counts: bool = True, decays: bool = True) -> Parameter:
    return Parameter(elements=elements, counted=elements if counts else 0, decays=decays)
