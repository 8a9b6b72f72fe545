"""Every rule that refuses a run before a process group or a model exists. Pure: no torch, nothing is read or written.

A rule yields a sentence that names both numbers and the knob; all of them are told at once.
"""

from collections.abc import Iterator, Mapping
from math import inf
from operator import attrgetter
from typing import Any

from fourfold.layout import Layout, largest_divisor, resolve
from fourfold.pipeline.schedules import SCHEDULES, stages_per_rank, unknown
from fourfold.pipeline.schedules import refusals as schedule_refusals
from fourfold.pipeline.split import refusals as split_refusals
from fourfold.schema import Checkpointing, DataConfig, MixtureSource, Precision, TrainConfig
from fourfold.zero.settings import refusals as zero_refusals

EXPORT_DTYPES = ("bfloat16", "float16", "float32")


def check(config: TrainConfig, *, world_size: int, environment: Mapping[str, str]) -> Layout:
    """The layout of the run. Raises one ValueError with every reason why there is none."""
    problems: list[str] = []
    layout = None
    try:
        layout = resolve(
            world_size,
            tp_size=config.tp_size,
            cp_size=config.cp_size,
            pp_size=config.pp_size,
            dp_shard_size=config.dp_shard_size,
            dp_replicate_size=config.dp_replicate_size,
        )
    except ValueError as error:
        problems.append(str(error))
    problems += precision(config)
    problems += ranges(config)
    problems += length(config)
    problems += data(config)
    problems += exported(config)
    problems += optimiser(config)
    problems += launcher(config, environment=environment)
    if layout is not None:
        problems += zero_refusals(config, layout=layout)
        wrong = [*batch(config, layout=layout), *unknown(config.pipeline)]
        problems += wrong
        if layout.pp_size > 1 and not wrong:
            problems += pipeline(config, layout=layout)
    _raise(problems)
    assert layout is not None
    return layout


def check_data(config: TrainConfig) -> None:
    """Rules of the data alone."""
    _raise(list(data(config)))


def check_model(config: TrainConfig, *, model_config: Any, attn_implementation: str) -> None:
    """Rules that need the model's config."""
    from fourfold.activation.rules import refusals as checkpointing_refusals
    from fourfold.context import select
    from fourfold.context.attention import IMPLEMENTATION
    from fourfold.tensor.plan import refused_sizes

    problems = list(context(config, longest=model_config.max_position_embeddings))
    problems += select.refusals(config, model_config=model_config)
    if config.tp_size > 1:
        problems += refused_sizes(model_config, size=config.tp_size)
    if config.pp_size > 1:
        each = stages_per_rank(config.pipeline)
        layers, stages = model_config.num_hidden_layers, config.pp_size * each
        problems += split_refusals(config.pipeline, layers=layers, stages=stages, per_rank=each)
    if attn_implementation == IMPLEMENTATION:
        problems += select.selective_refusals(config, model_config=model_config)
    problems += checkpointing_refusals(
        config.activation,
        num_layers=model_config.num_hidden_layers,
        attn_implementation=attn_implementation,
    )
    _raise(problems)


def check_layers(config: TrainConfig, *, model: Any) -> None:
    """Rules that need the model, on the meta device."""
    from fourfold.tensor.plan import refusals

    _raise(list(refusals(model, more=config.tensor.plan, size=config.tp_size)))


def pipeline(config: TrainConfig, *, layout: Layout) -> Iterator[str]:
    rows = config.micro_batch_size * layout.data_size
    yield from schedule_refusals(
        config.pipeline,
        ranks=layout.pp_size,
        micro_batches=config.global_batch_size // rows,
        zero_stage=config.zero.stage,
        rows=rows,
    )
    if not SCHEDULES[config.pipeline.schedule].splits_backward:
        return
    name = f"pipeline.schedule={config.pipeline.schedule} computes weight gradients on their own"
    if layout.tp_size > 1 and config.tensor.regather:
        yield (
            f"{name}, and tensor.regather=true would gather for both halves of the backward pass: use tensor.regather=false, "
            f"or pipeline.schedule=interleaved_1f1b."
        )
    mode = config.activation.checkpointing
    if mode is not Checkpointing.none:
        yield (
            f"{name}, and activation.checkpointing={mode.value} would compute a layer again for each of its weights: use "
            f"activation.checkpointing=none, or pipeline.schedule=interleaved_1f1b."
        )


def precision(config: TrainConfig) -> Iterator[str]:
    if config.precision is Precision.fp16:
        yield (
            "precision=fp16 is not supported: its gradients underflow without loss scaling, and a loss scale skips "
            "updates, so that a run would differ from one process. Use bf16 (same memory) or fp32."
        )


def batch(config: TrainConfig, *, layout: Layout) -> Iterator[str]:
    for key in ("global_batch_size", "micro_batch_size", "seq_len"):
        if getattr(config, key) < 1:
            yield f"{key}={getattr(config, key)}: use 1 or more."
            return
    unit = config.micro_batch_size * layout.data_size
    if config.global_batch_size % unit:
        below, above = config.global_batch_size // unit * unit, -(-config.global_batch_size // unit) * unit
        legal = " or ".join(str(size) for size in (below, above) if size)
        each = config.global_batch_size // layout.data_size
        if config.global_batch_size % layout.data_size == 0:
            smaller = f", or micro_batch_size={largest_divisor(each, at_most=config.micro_batch_size)}"
        else:
            smaller = ""
        yield (
            f"global_batch_size={config.global_batch_size} rows is no multiple of micro_batch_size="
            f"{config.micro_batch_size} x {layout.data_size} data-parallel ranks = {unit}: use "
            f"global_batch_size={legal}{smaller}."
        )


def ranges(config: TrainConfig) -> Iterator[str]:
    """Numbers that mean nothing below a bound, and floats that are no numbers."""
    least = {
        "seed": 0,
        "log_every": 1,
        "save_every": 0,
        "eval_every": 0,
        "keep_last": 1,
        "keep_every": 1,
        "max_steps": 1,
        "loss.chunk_size": 1,
        "zero.reduce_bucket_size": 1,
        "zero.allgather_bucket_size": 1,
        "zero.stage3_param_persistence_threshold": 0,
        "optim.warmup_steps": 0,
        "optim.decay_steps": 0,
        "cluster.gpus_per_node": 1,
        "cluster.ranks_per_row": 1,
    }
    yield from _at_least(config, least=least)
    for key in ("learning_rate", "weight_decay", "max_grad_norm", "adam_epsilon", "momentum"):
        value = getattr(config.optim, key)
        if not 0 <= value < inf:
            yield f"optim.{key}={value}: use 0 or more."
    for key in ("adam_beta1", "adam_beta2"):
        value = getattr(config.optim, key)
        if not 0 <= value < 1:
            yield f"optim.{key}={value}: use 0 or more and less than 1."
    if not 0 <= config.optim.min_lr_ratio <= 1:
        yield f"optim.min_lr_ratio={config.optim.min_lr_ratio}: use 0 to 1."
    if config.num_epochs is not None and not 0 < config.num_epochs < inf:
        yield f"num_epochs={config.num_epochs}: use more than 0."
    if config.max_time is not None and not 0 < config.max_time < inf:
        yield f"max_time={config.max_time}: use more than 0 seconds."
    if config.keep_every and (not config.save_every or config.keep_every % config.save_every):
        yield (
            f"keep_every={config.keep_every} is no multiple of save_every={config.save_every}, so that not every such "
            f"checkpoint is written: use a multiple of it."
        )
    if not 0 < config.cluster.timeout < inf:
        yield f"cluster.timeout={config.cluster.timeout}: use more than 0 seconds."


def length(config: TrainConfig) -> Iterator[str]:
    if config.max_steps is None and config.num_epochs is None:
        yield "Neither max_steps nor num_epochs says when to stop: give one of them (both: whichever comes first)."
    if config.data.streaming and config.max_steps is None:
        yield "data.streaming=true has no known length: give max_steps."


def data(config: TrainConfig) -> Iterator[str]:
    settings = config.data
    yield from _at_least(settings, least={"eval_documents": 0, "max_documents": 1, "num_proc": 1}, prefix="data.")
    if settings.eval_path is not None and settings.eval_documents:
        yield (
            f"data.eval_path={settings.eval_path} and data.eval_documents={settings.eval_documents} are two sources of "
            f"evaluation data: keep one."
        )
    if settings.sources is None and settings.path is None:
        yield "Neither data.path nor data.sources says where the data lie: give one of them."
    if settings.sources is not None:
        yield from mixture(settings, sources=settings.sources)


def mixture(settings: DataConfig, *, sources: list[MixtureSource]) -> Iterator[str]:
    if not sources:
        yield "data.sources=[] is a mixture of nothing: list a source, or use data.path."
    if settings.path is not None:
        yield f"data.path={settings.path} and data.sources ({len(sources)}) exclude each other: set data.path=null."
    if settings.eval_documents:
        yield (
            f"data.eval_documents={settings.eval_documents} would be held out of which of the {len(sources)} sources? "
            f"Use data.eval_path=<documents to evaluate on> and data.eval_documents=0."
        )
    for number, source in enumerate(sources):
        name = f"data.sources[{number}]"
        yield from _at_least(source, least={"max_documents": 1}, prefix=f"{name}.")
        for key in ("weight", "epochs"):
            value = getattr(source, key)
            if value is not None and not 0 < value < inf:
                yield f"{name}.{key}={value}: use more than 0, or take the source out."
    weighted = sum(source.weight is not None for source in sources)
    repeated = sum(source.epochs is not None for source in sources)
    if 0 < weighted < len(sources):
        yield f"{weighted} of {len(sources)} data.sources have a weight: give one to all of them or to none."
    if weighted and repeated:
        yield "data.sources has weights and epochs, which both say how much of a source is taken: keep one of the two."
    if settings.streaming and repeated:
        yield "data.sources with epochs and data.streaming=true: a stream has no known length; use weights."


def _at_least(settings: object, *, least: Mapping[str, int], prefix: str = "") -> Iterator[str]:
    for key, bound in least.items():
        value = attrgetter(key)(settings)
        if value is not None and value < bound:
            yield f"{prefix}{key}={value}: use {bound} or more."


def exported(config: TrainConfig) -> Iterator[str]:
    if config.export_dtype not in (None, *EXPORT_DTYPES):
        yield f"export_dtype={config.export_dtype}: use one of {', '.join(EXPORT_DTYPES)}."


def optimiser(config: TrainConfig) -> Iterator[str]:
    optim = config.optim
    if optim.name not in ("adamw", "sgd"):
        yield f"optim.name={optim.name}: use adamw or sgd."
    if optim.lr_scheduler_type not in ("linear", "cosine", "constant", "wsd"):
        yield f"optim.lr_scheduler_type={optim.lr_scheduler_type}: use linear, cosine, constant or wsd."


def context(config: TrainConfig, *, longest: int) -> Iterator[str]:
    if config.seq_len > longest:
        yield (
            f"seq_len={config.seq_len} is longer than the {longest} positions of the model "
            f"(max_position_embeddings): use seq_len={longest}, or stretch it with model.max_position_embeddings="
            f"{config.seq_len} and model.rope_scaling."
        )


def launcher(config: TrainConfig, *, environment: Mapping[str, str]) -> Iterator[str]:
    """accelerate's file says how many processes and where; how they share the work has one source, the recipe."""
    sources = {
        "ACCELERATE_USE_DEEPSPEED": "DeepSpeed settings of its own (a DeepSpeed file or --use_deepspeed)",
        "ACCELERATE_USE_FSDP": "FSDP settings of its own",
        "ACCELERATE_USE_MEGATRON_LM": "Megatron settings of its own",
        "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism config of its own",
    }
    for variable, meaning in sources.items():
        if environment.get(variable, "false").lower() in ("true", "1"):
            yield (
                f"The accelerate config brings {meaning} ({variable}={environment[variable]}), and this recipe says "
                f"zero.stage={config.zero.stage}: two sources of one setting. Launch with a file of tools/launch/, "
                f"which says only how many processes and where."
            )
    mixed = environment.get("ACCELERATE_MIXED_PRECISION", "no")
    if mixed not in ("no", config.precision.value):
        yield (
            f"The accelerate config says mixed_precision={mixed} and this run precision={config.precision.value}: set "
            f"mixed_precision to no in the former, or precision={mixed}."
        )
    steps = environment.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    if steps not in ("1", "auto"):
        yield (
            f"The accelerate config says gradient_accumulation_steps={steps}; here accumulation follows from "
            f"global_batch_size={config.global_batch_size}, micro_batch_size={config.micro_batch_size} and the layout. "
            f"Remove it there."
        )


def _raise(problems: list[str]) -> None:
    if problems:
        raise ValueError(problems[0] if len(problems) == 1 else "".join(f"\n  - {problem}" for problem in problems))
