"""Whether a layout fits a GPU: bytes of the fullest rank, by term. Imports no torch.

Parts: memory.py (ZeRO states, activations of a layer), pipeline/split.py (layers of a stage). Not counted: logits of one
chunk of the loss, keys and values that context parallelism receives, collectives' buffers; RESERVE stands for them.
"""

from copy import copy
from dataclasses import dataclass
from typing import Any

from fourfold.layout import Layout
from fourfold.pipeline.schedules import stages_of, stages_per_rank
from fourfold.pipeline.split import layers_of_stages
from fourfold.planner.memory import Cut, activation_elements, zero_state_bytes
from fourfold.planner.parameters import parameter_count
from fourfold.schema import PipelineConfig, TrainConfig

RESERVE = 0.1  # of a GPU's memory: what is not counted, and fragmentation
GATHERED = 2  # layers that ZeRO-3 holds whole: one at work, the next on its way


@dataclass(frozen=True)
class RankBytes:
    """Of the fullest rank."""

    weights: float
    gradients: float  # in bf16, and their sums over micro-batches in fp32
    optimizer: float  # master weights and moments
    activations: float  # of all passes in flight

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations

    def fits(self, gpu_bytes: float) -> bool:
        return self.total <= gpu_bytes * (1 - RESERVE)


def rank_bytes(config: TrainConfig, *, layout: Layout, model_config: Any) -> RankBytes:
    """bf16 with AdamW and sums in fp32. `layout` and the model's sizes must be legal for `config`."""
    held = _held(config.pipeline, layout=layout, model_config=model_config)
    ranks = (
        _of_rank(config, layout=layout, model_config=model_config, rank=rank, layers=layers, parameters=parameters)
        for rank, (layers, parameters) in enumerate(held)
    )
    return max(ranks, key=lambda one: one.total)


def in_flight(settings: PipelineConfig, *, rank: int, ranks: int, micro_batches: int) -> float:
    """Passes through all layers of pipeline rank `rank` whose activations are held at one time, V stages a rank.

    1F1B: p - rank (arXiv:2006.09503); interleaved: 2 (p - rank - 1) + (V - 1) p + 1 passes through one of V stages
    (arXiv:2104.04473 section 2.2); others: all of an update.
    """
    if ranks == 1:
        return 1.0
    each = stages_per_rank(settings)
    stage_passes = {"1f1b": ranks - rank, "interleaved_1f1b": 2 * (ranks - rank - 1) + (each - 1) * ranks + 1}
    return min(stage_passes.get(settings.schedule, each * micro_batches), each * micro_batches) / each


def _of_rank(
    config: TrainConfig, *, layout: Layout, model_config: Any, rank: int, layers: int, parameters: int
) -> RankBytes:
    parameters = -(-parameters // layout.tp_size)
    stage, shards = config.zero.stage, layout.partition_size
    state = zero_state_bytes(parameters, stage=stage, shard_size=shards, precision=config.precision)
    # a pipeline reduces once an update, after its schedule: until then every rank has its gradients whole
    part = shards if stage >= 2 and layout.pp_size == 1 else 1
    gathered = 2 * GATHERED * _layer(model_config) / layout.tp_size if stage == 3 else 0.0
    micro_batches = config.global_batch_size // (config.micro_batch_size * layout.data_size)
    return RankBytes(
        weights=state.weights + gathered,
        gradients=(2 + 4) * parameters / part,
        optimizer=state.master + state.moments,
        activations=_activations(
            config,
            layout=layout,
            model_config=with_layers(model_config, layers),
            passes=in_flight(config.pipeline, rank=rank, ranks=layout.pp_size, micro_batches=micro_batches),
        ),
    )


def _activations(config: TrainConfig, *, layout: Layout, model_config: Any, passes: float) -> float:
    unit = layout.tp_size if config.tensor.sequence_parallel else 1
    length = -(-config.seq_len // layout.cp_size // unit) * unit
    found = activation_elements(
        model_config,
        batch=config.micro_batch_size,
        seq_len=length,
        checkpointing=config.activation.checkpointing,
        attention="fourfold",
        cut=Cut(layout.tp_size, sequence_parallel=config.tensor.sequence_parallel, regather=config.tensor.regather),
    )
    return 2 * (found.kept * passes + found.recomputed)


def _held(settings: PipelineConfig, *, layout: Layout, model_config: Any) -> list[tuple[int, int]]:
    """Layers and parameters of every pipeline rank, before tensor parallelism cuts them."""
    ranks = layout.pp_size
    if ranks == 1:
        return [(model_config.num_hidden_layers, parameter_count(model_config))]
    stages = ranks * stages_per_rank(settings)
    ranges = layers_of_stages(settings, model_config=model_config, stages=stages)
    layer, table = _layer(model_config), model_config.vocab_size * model_config.hidden_size
    held = []
    for rank in range(ranks):
        mine = stages_of(rank, ranks=ranks, settings=settings)
        layers = sum(ranges[stage][1] - ranges[stage][0] for stage in mine)
        ends = (0 in mine) + (stages - 1 in mine)  # embedding and head, a tied one on both
        held.append((layers, layers * layer + ends * table))
    return held


def _layer(model_config: Any) -> int:
    """Parameters of one layer."""
    return parameter_count(with_layers(model_config, 1)) - parameter_count(with_layers(model_config, 0))


def with_layers(model_config: Any, layers: int) -> Any:
    other = copy(model_config)
    other.num_hidden_layers = layers
    return other
