"""Whether a layout fits a GPU: bytes of one rank, by term. Imports no torch.

Parts: held.py (parameters), zero/cost.py (ZeRO's shares), passes.py (activations of a stage). Not counted: what is held for
a moment inside of a layer, the allocator's gaps, NCCL; RESERVE stands for them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from fourfold.context.work import Work
from fourfold.layout import Layout
from fourfold.model.chunk import default_chunk
from fourfold.pipeline.schedules import stages_per_rank
from fourfold.planner.flops import windowed_layers
from fourfold.planner.held import Parameter, Stage, held_parameters, stages_of_rank
from fourfold.planner.memory import zero_state_bytes
from fourfold.planner.passes import FP32, MicroBatch, Pass, attention_work, micro_batches, stage_pass
from fourfold.schema import Offload, PipelineConfig, Precision, TrainConfig
from fourfold.zero.cost import shard_elements

RESERVE = 0.1  # of a GPU's memory: what is not counted, and fragmentation
GATHERED = 2  # layers that ZeRO-3 holds whole: one at work, the next on its way


@dataclass(frozen=True)
class RankBytes:
    weights: float
    gradients: float  # in bf16, and their sums over micro-batches in fp32
    optimizer: float  # master weights and moments
    activations: float  # of all passes in flight
    buffers: float  # of collectives: keys and values of other ranks, gradients, weights; and the loss's logits

    @property
    def total(self) -> float:
        return float(sum(getattr(self, term) for term in TERMS))

    @property
    def largest(self) -> str:
        """The term."""
        return max(TERMS, key=lambda term: float(getattr(self, term)))

    def fits(self, gpu_bytes: float) -> bool:
        return self.total <= gpu_bytes * (1 - RESERVE)


TERMS = tuple(field.name for field in fields(RankBytes))


@dataclass(frozen=True, kw_only=True)
class Rank:
    """What one rank has: counted here by formulas, in a dry run on the model itself."""

    stages: list[Stage]
    groups: list[list[int]]  # elements of each parameter: of those that decay, of the others
    passes: list[Pass]  # of each stage


def rank_bytes(config: TrainConfig, *, layout: Layout, model_config: Any, work: Work | None = None) -> RankBytes:
    """Of the fullest rank. AdamW, or SGD as it is set; `layout` and the model's sizes must be legal for `config`. `work`
    is that of a layer's attention, by default what the strategy says of the fullest cp rank."""
    ranks = all_ranks(config, layout=layout, model_config=model_config, work=work)
    return max(ranks, key=lambda one: one.total)


def all_ranks(config: TrainConfig, *, layout: Layout, model_config: Any, work: Work | None = None) -> list[RankBytes]:
    """Of each pipeline rank."""
    if work is None:
        cp_rank = fullest_cp_rank(config, layout=layout, model_config=model_config)
        work = work_of(config, layout=layout, model_config=model_config, cp_rank=cp_rank)
    return [
        bytes_of(
            planned(config, layout=layout, model_config=model_config, pp_rank=rank, work=work),
            config,
            layout=layout,
            model_config=model_config,
            pp_rank=rank,
            work=work,
        )
        for rank in range(layout.pp_size)
    ]


def work_of(config: TrainConfig, *, layout: Layout, model_config: Any, cp_rank: int) -> Work:
    """Of a layer's attention."""
    return attention_work(
        config, layout=layout, model_config=model_config, cp_rank=cp_rank, window=window_of(model_config)
    )


def fullest_cp_rank(config: TrainConfig, *, layout: Layout, model_config: Any) -> int:
    """All have as many tokens, but selective checkpointing keeps what each call of the kernel gives, and some call it more often."""

    def total(cp_rank: int) -> float:
        about: dict[str, Any] = {"layout": layout, "model_config": model_config}
        work = work_of(config, cp_rank=cp_rank, **about)
        return bytes_of(planned(config, pp_rank=0, work=work, **about), config, pp_rank=0, work=work, **about).total

    return max(range(layout.cp_size), key=total)


def planned(
    config: TrainConfig, *, layout: Layout, model_config: Any, pp_rank: int, work: Work, tp_rank: int = 0
) -> Rank:
    stages = stages_of_rank(config.pipeline, layout=layout, model_config=model_config, rank=pp_rank)
    held = held_parameters(model_config, stages=stages, tp_size=layout.tp_size, tp_rank=tp_rank)
    passes = [
        stage_pass(config, stage, layout=layout, model_config=model_config, work=work, tp_rank=tp_rank)
        for stage in stages
    ]
    return Rank(stages=stages, groups=groups_of(held), passes=passes)


def groups_of(held: Sequence[Parameter]) -> list[list[int]]:
    """As the optimizer has them."""
    return [[one.elements for one in held if one.decays is decays] for decays in (True, False)]


def window_of(model_config: Any) -> int | None:
    """Of attention where all layers have one; models that mix are counted without."""
    windowed = windowed_layers(model_config) == model_config.num_hidden_layers
    return int(model_config.sliding_window) if windowed and model_config.num_hidden_layers else None


def bytes_of(
    rank: Rank, config: TrainConfig, *, layout: Layout, model_config: Any, pp_rank: int, work: Work
) -> RankBytes:
    """What a rank's parts come to, with the passes in flight of its schedule."""
    stage, shards, settings = config.zero.stage, layout.partition_size, config.zero
    parameters = sum(map(sum, rank.groups))
    share = shard_elements(rank.groups, stage=stage, ranks=shards)
    width = 4 if config.precision is Precision.fp32 else 2
    # a pipeline reduces once an update, after its schedule: until then every rank has its gradients whole
    sharded = stage >= 2 and layout.pp_size == 1
    sums = 0 if config.precision is Precision.fp32 or not settings.fp32_accumulation else FP32
    on_gpu = settings.offload.optimizer is Offload.none
    return RankBytes(
        weights=width * (share if stage == 3 else parameters),
        gradients=(width + sums) * (share if sharded else parameters),
        optimizer=optimizer_bytes(config, share) if on_gpu else 0,
        activations=_activations(rank, config, layout=layout, pp_rank=pp_rank),
        buffers=_buffers(rank, config, layout=layout, model_config=model_config, work=work),
    )


def optimizer_bytes(config: TrainConfig, share: int) -> float:
    """Master weights, of bf16, and moments, of `share` elements."""
    found = zero_state_bytes(share, stage=1, shard_size=1, precision=config.precision)
    moments = found.moments if config.optim.name == "adamw" else share * FP32 * (config.optim.momentum > 0)
    return found.master + moments


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


def losses_in_flight(settings: PipelineConfig, *, ranks: int, micro_batches: int) -> int:
    """Passes through the last stage: in 1F1B each goes backward at once."""
    return 1 if ranks == 1 or settings.schedule in ("1f1b", "interleaved_1f1b") else micro_batches


def _activations(rank: Rank, config: TrainConfig, *, layout: Layout, pp_rank: int) -> float:
    count, settings, ranks = micro_batches(config, layout=layout), config.pipeline, layout.pp_size
    passes = in_flight(settings, rank=pp_rank, ranks=ranks, micro_batches=count)
    losses = losses_in_flight(settings, ranks=ranks, micro_batches=count)
    held, heads = sum(one.held for one in rank.passes), sum(one.head for one in rank.passes)
    return passes * held + losses * heads + max(one.recomputed for one in rank.passes)


def _buffers(rank: Rank, config: TrainConfig, *, layout: Layout, model_config: Any, work: Work) -> float:
    logits = _logits(rank, config, layout=layout, model_config=model_config)
    return work.buffers + logits + _buckets(config, layout=layout, model_config=model_config)


def _logits(rank: Rank, config: TrainConfig, *, layout: Layout, model_config: Any) -> float:
    """Of one chunk of tokens, in fp32 and in the activations' type."""
    if not any(stage.last for stage in rank.stages):
        return 0.0
    batch = MicroBatch.of(config, layout=layout)
    words = -(-model_config.vocab_size // layout.tp_size)
    chunk = config.loss.chunk_size or default_chunk(batch.tokens, vocabulary=words, hidden=model_config.hidden_size)
    width = FP32 + (batch.itemsize if batch.itemsize < FP32 else 0)
    return min(chunk, batch.tokens) * words * width


def _buckets(config: TrainConfig, *, layout: Layout, model_config: Any) -> float:
    """Of gradients to reduce, two where one is sent while the other fills; of weights that ZeRO-3 has gathered."""
    settings, shards = config.zero, layout.partition_size
    if shards == 1:
        return 0.0
    fp32 = config.precision is Precision.fp32
    buckets = 1 if settings.stage == 3 or not settings.overlap_comm else 2
    found = buckets * settings.reduce_bucket_size * (FP32 if fp32 or settings.fp32_reduction else 2)
    if settings.stage == 3:
        layer = held_parameters(model_config, stages=[Stage(1, False, False)], tp_size=layout.tp_size)
        found += GATHERED * sum(one.elements for one in layer) * (FP32 if fp32 else 2)
    return found
