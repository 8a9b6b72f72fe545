"""Which strategy and kernel a run gets, whether they can serve its model, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from fourfold.context.allgather import AllGather
from fourfold.context.balance import BALANCES
from fourfold.context.hybrid import Hybrid
from fourfold.context.local import Local
from fourfold.context.needed_only import NeededOnly
from fourfold.context.ring import Ring
from fourfold.context.strategy import AttentionShape, ContextStrategy, Options
from fourfold.context.ulysses import Ulysses
from fourfold.context.work import unit
from fourfold.planner.parameters import head_dim
from fourfold.schema import AttentionConfig, Checkpointing, Precision, TrainConfig

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch import Tensor

    from fourfold.context.kernels.kernel import Kernel

# by preference where they send about as much
BY_BYTES: tuple[type[ContextStrategy], ...] = (Ulysses, NeededOnly, Hybrid, Ring, AllGather)


def is_ours(config: TrainConfig, *, model_config: Any, device: torch.device) -> bool:
    """Whether attention goes through a strategy of this package rather than one of transformers' implementations.

    Where no row and no model is spread over ranks those are taken for a model with dropout in attention, and on a GPU unless attention=local is asked for:
    its CUDA kernel is proven on no GPU yet.
    """
    if config.cp_size * config.tp_size * config.pp_size > 1 or config.attention.name == "local":
        return True
    return config.model.attn_implementation == "auto" and device.type == "cpu" and not _dropout(model_config)


def _dropout(model_config: Any) -> float:
    return float(getattr(model_config, "attention_dropout", None) or 0.0)


def splitter(
    config: TrainConfig, *, model_config: Any, group: dist.ProcessGroup, device: torch.device
) -> Callable[[dict[str, Tensor]], dict[str, Any]]:
    """From whole rows to what this rank computes. Collective over the cp group."""
    if not is_ours(config, model_config=model_config, device=device):
        return lambda batch: batch
    import torch.distributed as dist

    from fourfold.context.split import Splitter

    strategy = build(config, model_config=model_config, group=group, device=device)
    data_size = dist.get_world_size() // (config.cp_size * config.tp_size * config.pp_size)
    return Splitter(
        strategy,
        group=group,
        balance=config.attention.balance,
        device=device,
        compared=config.global_batch_size // (config.micro_batch_size * data_size),
        parts=sequence_parts(config),
    )


def sequence_parts(config: TrainConfig) -> int:
    """In which tensor parallelism cuts the tokens of a cp rank between its blocks."""
    return config.tp_size if config.tensor.sequence_parallel else 1


def strategy_class(config: TrainConfig, *, model_config: Any) -> type[ContextStrategy]:
    """Raises ValueError if `attention._target_` is no strategy."""
    if config.cp_size == 1:
        return Local
    if config.attention._target_ is None:
        return cheapest(config, model_config=model_config)[0]
    return _named(config.attention)


def cheapest(config: TrainConfig, *, model_config: Any) -> tuple[type[ContextStrategy], dict[str, int]]:
    """The strategy whose busiest rank sends the fewest bytes for a layer, and those of each that can serve the model.

    Rows are taken as one document, the dearest case. All are balanced (balance.py), so that bytes decide.
    """
    sent = {}
    wanted = config.attention.balance
    for kind in [kind for kind in BY_BYTES if wanted == "auto" or wanted in kind.balances]:
        if not list(
            kind.refusals(cp_size=config.cp_size, **_heads(config, model_config), options=options(config.attention))
        ):
            sent[kind.name] = most_bytes(kind, config, model_config=model_config)
    best = min(sent.values())
    return next(kind for kind in BY_BYTES if sent.get(kind.name, best + 1) <= best), sent


def most_bytes(kind: type[ContextStrategy], config: TrainConfig, *, model_config: Any) -> int:
    """Of the ranks of a cp group, for one layer and micro-batch, forward and backward."""
    whole = unit(config.cp_size, parts=sequence_parts(config))
    shape = AttentionShape(
        rows=config.micro_batch_size,
        length=-(-config.seq_len // whole) * whole,
        **_heads(config, model_config),
        head_dim=head_dim(model_config),
        itemsize=2 if config.precision is Precision.bf16 else 4,
    )
    ranks = range(config.cp_size)
    chosen = options(config.attention)
    return max(
        sum(kind.sent_bytes(shape, cp_size=config.cp_size, rank=rank, options=chosen).values()) for rank in ranks
    )


def refusals(config: TrainConfig, *, model_config: Any) -> Iterator[str]:
    """Why the model's attention cannot be computed as the run wants it; all reasons."""
    settings, cp_size = config.attention, config.cp_size
    if settings.balance not in ("auto", *BALANCES):
        yield f"attention.balance={settings.balance}: use auto or one of {', '.join(BALANCES)}."
    if cp_size == 1:
        if settings.name != "local" and (settings.name != "auto" or settings._target_ is not None):
            given = settings.name if settings.name != "auto" else settings._target_
            yield f"attention={given} spreads a row over ranks and cp_size=1: use cp_size=2 or more, or attention=auto."
        if settings.name == "local" or config.tp_size * config.pp_size > 1:
            yield from _other_attention(config, model_config=model_config)
        return
    yield from _other_attention(config, model_config=model_config)
    if config.seq_len < unit(cp_size):
        yield (
            f"seq_len={config.seq_len} is too short for cp_size={cp_size}, which cuts a row into {unit(cp_size)} chunks, some of "
            f"nothing but padding: use seq_len={unit(cp_size)} or more, or a smaller cp_size."
        )
    if settings._target_ is None:
        yield from _unchosen(config, model_config=model_config)
        return
    try:
        kind = _named(settings)
    except ValueError as error:
        yield str(error)
        return
    yield from kind.refusals(cp_size=cp_size, **_heads(config, model_config), options=options(settings))
    if settings.balance in BALANCES and settings.balance not in kind.balances:
        yield (
            f"attention.balance={settings.balance} with attention={kind.name}: use auto or {' or '.join(kind.balances)}."
        )


def _unchosen(config: TrainConfig, *, model_config: Any) -> Iterator[str]:
    settings = config.attention
    if settings.name != "auto":
        yield (
            f"attention.name={settings.name} alone names no class (attention._target_ is null), and cp_size={config.cp_size} "
            f"would take any: use attention={settings.name}, or attention.name=auto."
        )


def _other_attention(config: TrainConfig, *, model_config: Any) -> Iterator[str]:
    """What the attention of this package would pass over in silence."""
    if config.model.attn_implementation != "auto":
        yield (
            f"model.attn_implementation={config.model.attn_implementation} is transformers' own, which sees one rank's tokens "
            f"only, and attention={config.attention.name} with cp_size={config.cp_size} tp_size={config.tp_size} "
            f"pp_size={config.pp_size} is not: use "
            f"model.attn_implementation=auto."
        )
    if _dropout(model_config):
        yield (
            f"attention_dropout={_dropout(model_config)} of the model is in none of the attention strategies: set it to 0 in "
            f"its config.json, or use attention=auto cp_size=1 tp_size=1 pp_size=1."
        )


def selective_refusals(config: TrainConfig, *, model_config: Any) -> Iterator[str]:
    """Of models that run with the attention of this package: a soft-cap is computed without any fused op."""
    cap = getattr(model_config, "attn_logit_softcapping", None)
    if config.activation.checkpointing is Checkpointing.selective and cap is not None:
        yield (
            f"activation.checkpointing=selective keeps the outputs of the fused attention op, and attn_logit_softcapping="
            f"{cap} of {model_config.model_type} is computed by plain products: use activation.checkpointing=full."
        )


def build(config: TrainConfig, *, model_config: Any, group: dist.ProcessGroup, device: torch.device) -> ContextStrategy:
    """Collective over the cp group."""
    kernel = choose_kernel(config, model_config=model_config, device=device)
    return with_kernel(config, model_config=model_config, group=group, kernel=kernel)


def with_kernel(config: TrainConfig, *, model_config: Any, group: dist.ProcessGroup, kernel: Kernel) -> ContextStrategy:
    """Collective over the cp group."""
    kind = strategy_class(config, model_config=model_config)
    return kind(group, kernel=kernel, **_heads(config, model_config), options=options(config.attention))


def choose_kernel(config: TrainConfig, *, model_config: Any, device: torch.device) -> Kernel:
    """The fused one of the device, flash-attn's where it is installed. Plain products for what those have not: a soft-cap,
    fp32 on a GPU, odd heads. (Not FlexAttention, which is nothing without a compiler; none is wanted here.)"""
    from fourfold.context.kernels.cpu import CpuKernel
    from fourfold.context.kernels.plain import PlainKernel

    capped = getattr(model_config, "attn_logit_softcapping", None) is not None
    if device.type == "cpu":
        return PlainKernel() if capped else CpuKernel()
    size = head_dim(model_config)
    if config.precision is Precision.fp32 or size % 8 or size > 256:
        return PlainKernel()
    import torch

    from fourfold.context.kernels.cuda import CudaKernel
    from fourfold.context.kernels.flash import installed

    flash = installed(torch.cuda.get_device_capability(device)[0])
    return flash or (PlainKernel() if capped else CudaKernel())


def described(config: TrainConfig, *, model_config: Any) -> str:
    """For the table at the start: the strategy and, if it was chosen here, why."""
    kind = strategy_class(config, model_config=model_config)
    if kind is Local:
        return "local"
    text = f"{kind.name} over {config.cp_size} ranks, balance {config.attention.balance}"
    if config.attention._target_ is not None:
        return text
    _, sent = cheapest(config, model_config=model_config)
    others = ", ".join(f"{name} {count / 1e6:.4g}" for name, count in sorted(sent.items(), key=lambda one: one[1]))
    return f"{text}: it sends the least, MB a layer and rank: {others}"


def options(settings: AttentionConfig) -> Options:
    return {"ulysses_size": settings.ulysses_size, "outer": settings.outer}


def _heads(config: TrainConfig, model_config: Any) -> dict[str, int]:
    """Of one tp rank."""
    heads, kv_heads = model_config.num_attention_heads, model_config.num_key_value_heads
    return {"heads": max(1, heads // config.tp_size), "kv_heads": max(1, kv_heads // config.tp_size)}


def _named(settings: AttentionConfig) -> type[ContextStrategy]:
    from hydra.utils import get_class

    try:
        kind = get_class(str(settings._target_))
    except Exception as error:
        raise ValueError(
            f"attention._target_={settings._target_} cannot be imported: {error}. Use attention=auto, or name a class that can."
        ) from None
    if not issubclass(kind, ContextStrategy):
        raise ValueError(
            f"attention._target_={settings._target_} is no ContextStrategy (fourfold/context/strategy.py): use attention=auto, or one."
        )
    return kind
