"""Every rule that refuses a run before a process group or a model exists. Pure: nothing is read or written.

A rule lives with what it is about, and yields a sentence that names both numbers and the knob; here they are collected. Those
that need no model import no torch.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from fourfold import ranges
from fourfold.data import rules as data_rules
from fourfold.layout import AXES, Layout, largest_divisor, product, resolve
from fourfold.nearest import nearest
from fourfold.pipeline import rules as pipeline_rules
from fourfold.pipeline.schedules import stages_per_rank, unknown
from fourfold.pipeline.split import refusals as split_refusals
from fourfold.schema import Precision, TrainConfig
from fourfold.zero.settings import refusals as zero_refusals

SIZES = tuple(f"{axis}_size" for axis in AXES)
EXPORT_DTYPES = ("bfloat16", "float16", "float32")
NOTHING: Mapping[str, str] = MappingProxyType({})


def check(
    config: TrainConfig,
    *,
    world_size: int,
    environment: Mapping[str, str] = NOTHING,
    model_config: Any = None,
    attn_implementation: str | None = None,
) -> Layout:
    """The layout of the run. Raises one ValueError with every reason why there is none, and the nearest that are legal.

    `model_config` and `attn_implementation` are None while they are not known: their rules are left out.
    """
    problems = refusals(
        config,
        world_size=world_size,
        environment=environment,
        model_config=model_config,
        attn_implementation=attn_implementation,
    )
    if problems:
        _raise(problems, more=_nearest(config, world_size=world_size, model_config=model_config))
    return _resolved(config, world_size=world_size)


def refusals(
    config: TrainConfig,
    *,
    world_size: int,
    environment: Mapping[str, str] = NOTHING,
    model_config: Any = None,
    attn_implementation: str | None = None,
) -> list[str]:
    """Every reason of `check`, none if the run is legal."""
    problems = _misplaced(config, world_size=world_size, model_config=model_config)
    problems += settings(config)
    if model_config is not None:
        problems += settings_of_model(config, model_config=model_config, attn_implementation=attn_implementation)
    return problems + list(launcher(config, environment=environment))


def least_world(config: TrainConfig) -> int:
    """Processes of the run if data sizes that are left open are 1."""
    return product(size for size in (getattr(config, name) for name in SIZES) if size > 0)


def check_data(config: TrainConfig) -> None:
    """Rules of the data alone."""
    _raise(list(data_rules.refusals(config.data)))


def check_layers(config: TrainConfig, *, model: Any) -> None:
    """Rules that need the model, on the meta device."""
    from fourfold.tensor.plan import refusals

    _raise(list(refusals(model, more=config.tensor.plan, size=config.tp_size)))


def _resolved(config: TrainConfig, *, world_size: int) -> Layout:
    return resolve(world_size, **{name: getattr(config, name) for name in SIZES})


def _misplaced(config: TrainConfig, *, world_size: int, model_config: Any) -> list[str]:
    try:
        layout = _resolved(config, world_size=world_size)
    except ValueError as error:
        has_sizes = min(config.tp_size, config.cp_size, config.pp_size) > 0
        more = layout_of_model(config, model_config=model_config) if model_config is not None and has_sizes else ()
        return [str(error), *more]
    return list(placed(config, layout=layout, model_config=model_config))


def _nearest(config: TrainConfig, *, world_size: int, model_config: Any) -> str:
    """Empty if the layout is not to blame."""
    if not _misplaced(config, world_size=world_size, model_config=model_config):
        return ""

    def reason(changed: TrainConfig, layout: Layout) -> str | None:
        return next(placed(changed, layout=layout, model_config=model_config), None)

    found = nearest(config, world_size=world_size, reason=reason)
    return f"{found} The model is not read yet: it may refuse some." if found and model_config is None else found


def placed(config: TrainConfig, *, layout: Layout, model_config: Any) -> Iterator[str]:
    """Rules in which the layout has a say."""
    wrong = [*batch(config, layout=layout), *unknown(config.pipeline)]
    yield from wrong
    yield from zero_refusals(config, layout=layout)
    if layout.pp_size > 1 and not wrong:
        yield from pipeline_rules.refusals(config, layout=layout)
    if model_config is not None:
        yield from layout_of_model(config, model_config=model_config)


def layout_of_model(config: TrainConfig, *, model_config: Any) -> Iterator[str]:
    """Those that need the model's config."""
    from fourfold.context import select
    from fourfold.tensor.cuts import refused_sizes

    if config.tp_size > 1:
        yield from refused_sizes(model_config, size=config.tp_size)
    if config.pp_size > 1 and not list(unknown(config.pipeline)):
        each = stages_per_rank(config.pipeline)
        layers, stages = model_config.num_hidden_layers, config.pp_size * each
        yield from split_refusals(config.pipeline, layers=layers, stages=stages, per_rank=each)
    yield from select.refusals(config, model_config=model_config)


def settings(config: TrainConfig) -> Iterator[str]:
    """Rules that hold on any layout."""
    yield from precision(config)
    yield from ranges.refusals(config)
    yield from length(config)
    yield from data_rules.refusals(config.data)
    yield from exported(config)
    yield from optimiser(config)


def settings_of_model(config: TrainConfig, *, model_config: Any, attn_implementation: str | None) -> Iterator[str]:
    """Those that need the model's config."""
    from fourfold.activation.rules import refusals as checkpointing_refusals
    from fourfold.context import select
    from fourfold.context.strategy import IMPLEMENTATION

    yield from context(config, longest=model_config.max_position_embeddings)
    if attn_implementation == IMPLEMENTATION or config.cp_size * config.tp_size * config.pp_size > 1:
        yield from select.selective_refusals(config, model_config=model_config)
    yield from checkpointing_refusals(
        config.activation,
        num_layers=model_config.num_hidden_layers,
        attn_implementation=attn_implementation or "",
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


def length(config: TrainConfig) -> Iterator[str]:
    if config.max_steps is None and config.num_epochs is None:
        yield "Neither max_steps nor num_epochs says when to stop: give one of them (both: whichever comes first)."
    if config.data.streaming and config.max_steps is None:
        yield "data.streaming=true has no known length: give max_steps."


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


def _raise(problems: list[str], *, more: str = "") -> None:
    """`more` is told once, behind them."""
    if len(problems) == 1:
        raise ValueError(" ".join([problems[0], more]).rstrip())
    if problems:
        raise ValueError("".join(f"\n  - {problem}" for problem in problems) + ("\n  " + more if more else ""))
