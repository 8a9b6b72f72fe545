"""Numbers that mean nothing below a bound, and floats that are no numbers. Pure."""

from collections.abc import Iterator, Mapping
from math import inf
from operator import attrgetter

from fourfold.schema import TrainConfig

LONGEST_WAIT = 1e9  # seconds, 31 years


def refusals(config: TrainConfig) -> Iterator[str]:
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
    yield from at_least(config, least=least)
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
    yield from seconds(config.cluster.timeout, knob="cluster.timeout=")


def seconds(value: float, *, knob: str) -> Iterator[str]:
    """Of a wait. Libraries count in nanoseconds, of which 64 bits hold 292 years."""
    if not 0 < value <= LONGEST_WAIT:
        yield f"{knob}{value}: use more than 0 seconds, and {LONGEST_WAIT:.0e} at most."


def at_least(settings: object, *, least: Mapping[str, int], prefix: str = "") -> Iterator[str]:
    """A sentence for each key of `least` that is below its bound."""
    for key, bound in least.items():
        value = attrgetter(key)(settings)
        if value is not None and value < bound:
            yield f"{prefix}{key}={value}: use {bound} or more."
