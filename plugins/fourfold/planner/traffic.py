"""Bytes that one rank sends in an update, by group. Parts: tensor/cost.py, the attention strategy's sent_bytes, pipeline/cost.py,
zero/cost.py. Not counted: single numbers (losses, norms), and the sums of norms' gradients over tp ranks, a few vectors."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fourfold.layout import Layout
from fourfold.pipeline.cost import bytes_to_send
from fourfold.planner.held import Stage
from fourfold.planner.passes import MicroBatch, attention_shape, micro_batches, stretches, whole_length
from fourfold.schema import TrainConfig
from fourfold.tensor.cost import Shape
from fourfold.tensor.cost import sent_bytes as tensor_bytes
from fourfold.zero.cost import sent_bytes as zero_bytes

GROUPS = ("tp", "cp", "pp", "dp_shard x cp", "dp_replicate")


@dataclass(frozen=True, kw_only=True)
class Sent:
    """In one pass of a stage, forward and backward, by purpose."""

    tensor: dict[str, int]
    context: dict[str, int]


def sent_in_pass(config: TrainConfig, stage: Stage, *, layout: Layout, model_config: Any, cp_rank: int = 0) -> Sent:
    return Sent(
        tensor=_tensor(config, stage, layout=layout, model_config=model_config),
        context=_context(config, stage, layout=layout, model_config=model_config, cp_rank=cp_rank),
    )


def sent_in_update(
    passes: Sequence[Sent],
    groups: Sequence[Sequence[int]],
    config: TrainConfig,
    *,
    layout: Layout,
    model_config: Any,
    pp_rank: int,
) -> dict[str, int]:
    """By group; `passes` are of the rank's stages, `groups` its parameters as the optimizer has them."""
    count, batch = micro_batches(config, layout=layout), MicroBatch.of(config, layout=layout)
    zero = zero_bytes(
        groups,
        zero=config.zero,
        precision=config.precision,
        ranks=layout.partition_size,
        replicas=layout.dp_replicate_size,
        micro_batches=count,
        pp_size=layout.pp_size,
        embedding=embedding_elements(model_config, layout=layout) if pp_rank == 0 else 0,
    )
    borders: dict[int, int] = {}
    if layout.pp_size > 1:
        borders = bytes_to_send(
            config.pipeline,
            rank=pp_rank,
            ranks=layout.pp_size,
            micro_batches=count,
            hidden_bytes=batch.between * model_config.hidden_size * batch.itemsize,
        )
    sums = (
        count * sum(sum(one.tensor.values()) for one in passes),
        count * sum(sum(one.context.values()) for one in passes),
        sum(borders.values()),
        zero.get("gradients", 0) + zero.get("weights", 0),
        zero.get("replicas", 0),
    )
    return dict(zip(GROUPS, sums, strict=True))


def embedding_elements(model_config: Any, *, layout: Layout) -> int:
    """Of a tp rank's part of the table, filled up."""
    return int(-(-model_config.vocab_size // layout.tp_size) * model_config.hidden_size)


def tensor_shape(config: TrainConfig, *, layout: Layout, model_config: Any) -> Shape:
    """Of a micro-batch on one cp rank."""
    batch = MicroBatch.of(config, layout=layout)
    return Shape(
        rows=batch.rows,
        length=whole_length(config, layout=layout) // layout.cp_size,
        hidden=model_config.hidden_size,
        itemsize=batch.itemsize,
        tp_size=layout.tp_size,
        sequence_parallel=config.tensor.sequence_parallel,
        regather=config.tensor.regather,
    )


def _tensor(config: TrainConfig, stage: Stage, *, layout: Layout, model_config: Any) -> dict[str, int]:
    found = tensor_bytes(
        tensor_shape(config, layout=layout, model_config=model_config),
        layers=stage.layers,
        losses=MicroBatch.of(config, layout=layout).tokens,
        stretches=len(stretches(config, stage)),
    )
    return {
        purpose: sent
        for purpose, sent in found.items()
        if (stage.first or not purpose.startswith("embedding")) and (stage.last or not purpose.startswith("loss"))
    }


def _context(config: TrainConfig, stage: Stage, *, layout: Layout, model_config: Any, cp_rank: int) -> dict[str, int]:
    """The forward pass's twice where it is run again."""
    if layout.cp_size == 1:
        return {}
    from fourfold.context.select import options, strategy_class

    once = strategy_class(config, model_config=model_config).sent_bytes(
        attention_shape(config, layout=layout, model_config=model_config),
        cp_size=layout.cp_size,
        rank=cp_rank,
        options=options(config.attention),
    )
    forwards = 2 if stretches(config, stage) else 1
    return {
        purpose: sent * stage.layers * (1 if purpose.endswith("_backward") else forwards)
        for purpose, sent in once.items()
    }
