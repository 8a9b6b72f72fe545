"""Learning rate as a pure function of the update: nothing to save, nothing that could be stepped once too often."""

import math
from collections.abc import Callable

from fourfold.schema import OptimConfig


def learning_rates(optim: OptimConfig, *, total_steps: int) -> Callable[[int], float]:
    """Rate of update 1, 2, ..., total_steps.

    The curves are transformers' own schedules (`get_scheduler`), read one update ahead: the rate of update u is what
    transformers has after u scheduler steps, so that warm-up does not begin with an update at rate zero and a decay
    ends at its minimum. Raises ValueError if warm-up and decay do not fit into the run.
    """
    factor = _transformers_curve(optim, total_steps=total_steps)
    return lambda step: optim.learning_rate * factor(min(step, total_steps))


def _transformers_curve(optim: OptimConfig, *, total_steps: int) -> Callable[[int], float]:
    import torch
    from transformers import get_scheduler

    if optim.warmup_steps > total_steps:
        raise ValueError(
            f"optim.warmup_steps={optim.warmup_steps} is longer than the run of {total_steps} updates: "
            f"use at most {total_steps}, or a longer run (max_steps, num_epochs)."
        )
    name, extra = _transformers_name(optim, total_steps=total_steps)
    placeholder = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = get_scheduler(
        name,
        optimizer=placeholder,
        num_warmup_steps=optim.warmup_steps,
        num_training_steps=total_steps,
        scheduler_specific_kwargs=extra,
    )
    return schedule.lr_lambdas[0]


def _transformers_name(optim: OptimConfig, *, total_steps: int) -> tuple[str, dict[str, float]]:
    if optim.lr_scheduler_type == "wsd":
        decay = optim.decay_steps if optim.decay_steps is not None else max(1, math.ceil(total_steps / 10))
        if optim.warmup_steps + decay > total_steps:
            raise ValueError(
                f"optim.warmup_steps={optim.warmup_steps} and a final decay of {decay} updates are longer than the run "
                f"of {total_steps}: lower optim.warmup_steps or optim.decay_steps."
            )
        return "warmup_stable_decay", {"num_decay_steps": decay, "min_lr_ratio": optim.min_lr_ratio}
    if optim.lr_scheduler_type == "constant":
        return "constant_with_warmup", {}
    if optim.lr_scheduler_type == "cosine" and optim.min_lr_ratio > 0:
        return "cosine_with_min_lr", {"min_lr_rate": optim.min_lr_ratio}
    return optim.lr_scheduler_type, {}
