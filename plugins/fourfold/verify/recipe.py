"""The recipe of a pass: as the user has it, but for what is made small. Each change that takes something away is told."""

from copy import deepcopy
from dataclasses import replace
from itertools import count

from fourfold.context import select
from fourfold.layout import AXES, Layout
from fourfold.pipeline.schedules import SCHEDULES, stages_per_rank
from fourfold.pipeline.schedules import refusals as schedule_refusals
from fourfold.schema import (
    AttentionConfig,
    ClusterConfig,
    DataConfig,
    Device,
    LongDocuments,
    ModelConfig,
    Offload,
    Precision,
    TrainConfig,
)

SEQ_LEN = 128
DOCUMENTS = 64  # of each source
BUCKET = 20_000  # elements of ZeRO's: several for the small model, as for a large one
CLIP = 0.25  # of the gradient norm, which is about 1 here, so that it is in effect; where a run clips at all
RATE = 1.0  # of SGD: a step that moves weights by about a hundredth


def remarks(config: TrainConfig) -> list[str]:
    """What a run does and this does not."""
    found = []
    if config.precision is not Precision.fp32:
        found.append(f"precision={config.precision.value} is verified in fp32: rounding is not")
    if config.zero.offload.optimizer is not Offload.none or config.zero.offload.parameters is not Offload.none:
        found.append("offload is verified on the CPU: gradients are out of reach and seen by the weights' change only")
    if config.model.attn_implementation.startswith("flash"):
        found.append(f"model.attn_implementation={config.model.attn_implementation} needs a GPU: sdpa or eager instead")
    if config.cluster.device is not Device.cpu:
        found.append("kernels of a GPU and NCCL are not verified: this is the CPU and gloo")
    if config.data.long_documents in (LongDocuments.drop, LongDocuments.error):
        found.append(f"data.long_documents={config.data.long_documents.value}: truncated instead, rows are short here")
    if config.pipeline.split is not None:
        found.append(f"pipeline.split={config.pipeline.split}: the small model's layers are split unevenly instead")
    return found


def row_length(config: TrainConfig) -> int:
    return min(config.seq_len, SEQ_LEN)


def small_data(config: TrainConfig, *, documents: int) -> TrainConfig:
    """For the rows: short, of few documents, none to evaluate on."""
    least = min(documents, config.data.max_documents or documents)
    data: DataConfig = replace(
        config.data,
        max_documents=least,
        eval_documents=0,
        eval_path=None,
        sources=[replace(one, max_documents=min(least, one.max_documents or least)) for one in config.data.sources]
        if config.data.sources is not None
        else None,
    )
    if data.long_documents in (LongDocuments.drop, LongDocuments.error):
        data.long_documents = LongDocuments.truncate
    return replace(config, seq_len=row_length(config), data=data)


def batch_of(config: TrainConfig, *, sizes: dict[str, int], row_by_row: bool) -> tuple[int, int]:
    """(rows of a micro-batch, rows of an update), legal in every pass: accumulation where a run has some. `row_by_row`: the
    model's rotary embedding looks at the longest document of a micro-batch."""
    rows = 1 if row_by_row else min(2, config.micro_batch_size)
    known = max(1, config.dp_shard_size) * max(1, config.dp_replicate_size)
    wanted = max(1, min(2, config.global_batch_size // (config.micro_batch_size * known)))
    shards, replicas, ranks = (sizes.get(axis, 1) for axis in ("dp_shard", "dp_replicate", "pp"))
    data = shards * replicas
    if ranks > 1:
        wanted = max(2 * ranks // data, wanted)
        wanted = next(
            n for n in count(wanted) if _runs(config, ranks=ranks, counts=(n, n * shards, n * replicas, n * data))
        )
    return rows, rows * wanted * data


def _runs(config: TrainConfig, *, ranks: int, counts: tuple[int, ...]) -> bool:
    return not any(list(schedule_refusals(config.pipeline, ranks=ranks, micro_batches=one)) for one in counts)


def recipe(config: TrainConfig, *, layout: Layout, folder: str, batch: tuple[int, int], layers: int) -> TrainConfig:
    """What a rank of this pass is given. The optimizer is SGD: Adam divides by the gradient, and so hides its size."""
    rows, whole = batch
    made = deepcopy(config)
    for axis in AXES:
        setattr(made, f"{axis}_size", layout.size(axis))
    made.precision, made.seq_len = Precision.fp32, row_length(config)
    made.micro_batch_size, made.global_batch_size = rows, whole
    made.max_steps, made.num_epochs, made.max_time = None, 1.0, None
    made.save_every = made.eval_every = 0
    made.model = ModelConfig(path=folder, attn_implementation=_implementation(config))
    made.cluster = ClusterConfig(device=Device.cpu, gpus_per_node=1)
    made.optim = replace(
        config.optim,
        name="sgd",
        learning_rate=RATE,
        max_grad_norm=min(config.optim.max_grad_norm, CLIP),
        momentum=0.0 if config.optim.name != "sgd" else config.optim.momentum,
    )
    made.zero.reduce_bucket_size = min(made.zero.reduce_bucket_size, BUCKET)
    made.zero.allgather_bucket_size = min(made.zero.allgather_bucket_size, BUCKET)
    if layout.cp_size == 1:
        made.attention = AttentionConfig(name="local" if config.attention.name == "local" else "auto")
    elif made.attention.ulysses_size != "auto":
        made.attention.ulysses_size = str(min(2, int(made.attention.ulysses_size)))
    if layout.pp_size == 1:
        made.pipeline.split = None
    elif made.pipeline.split is not None:
        stages = layout.pp_size * stages_per_rank(made.pipeline)
        made.pipeline.split = [1] * (stages - 1) + [layers - stages + 1]
    if made.activation.every_n is not None:
        made.activation.every_n = min(made.activation.every_n, max(1, layers - 1))
    return made


def stages(config: TrainConfig, *, sizes: dict[str, int]) -> int:
    known = config.pipeline.schedule in SCHEDULES  # else refused later, by name
    return sizes["pp"] * stages_per_rank(config.pipeline) if "pp" in sizes and known else 1


def named_attention(config: TrainConfig, *, model_config: object) -> TrainConfig:
    """`auto` at the size of the run, by name, so that the strategy is verified that a run takes."""
    if config.cp_size == 1 or config.attention._target_ is not None:
        return config
    try:
        kind = select.strategy_class(config, model_config=model_config)
    except ValueError:  # none that can serve the heads: refused at the full size
        return config
    chosen = replace(config.attention, name=kind.name, _target_=f"{kind.__module__}.{kind.__qualname__}")
    return replace(config, attention=chosen)


def _implementation(config: TrainConfig) -> str:
    wanted = config.model.attn_implementation
    return "auto" if wanted.startswith("flash") else wanted
