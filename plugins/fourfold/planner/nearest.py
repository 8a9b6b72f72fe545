"""The nearest setting with which a run fits its GPUs: one override, then two, of the same number of GPUs."""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from itertools import product
from typing import Any

from fourfold import legality
from fourfold.layout import AXES, Layout
from fourfold.planner.fit import RankBytes, rank_bytes
from fourfold.schema import Checkpointing, TrainConfig

Change = tuple[str, Any]  # (key as on the command line, value)


def nearest_that_fits(
    config: TrainConfig, *, layout: Layout, model_config: Any, gpu_bytes: float
) -> tuple[str, RankBytes] | None:
    """(overrides, memory of the fullest rank); None if nothing that is tried fits."""
    singles = [[change] for change in _changes(config, layout)]
    pairs = [[one[0], other[0]] for one, other in product(singles, singles) if one[0][0] < other[0][0]]
    for changes in [*singles, *pairs]:
        found = _with(config, changes, layout=layout, model_config=model_config)
        if found is not None and found.fits(gpu_bytes):
            return " ".join(f"{key}={value}" for key, value in changes), found
    return None


def _changes(config: TrainConfig, layout: Layout) -> Iterator[Change]:
    """Cheapest in time first."""
    if config.micro_batch_size > 1:
        yield "micro_batch_size", 1
    order = [Checkpointing.none, Checkpointing.selective, Checkpointing.full]
    now = config.activation.checkpointing
    for mode in order[order.index(now) + 1 :] if now in order else []:
        yield "activation", mode.value
    for stage in range(config.zero.stage + 1, 4):
        yield "zero", f"stage{stage}"
    for axis in ("tp", "pp", "cp"):
        for times in (2, 4, 8):
            yield f"{axis}_size", layout.size(axis) * times


def _with(config: TrainConfig, changes: list[Change], *, layout: Layout, model_config: Any) -> RankBytes | None:
    """None where that is not legal."""
    other = deepcopy(config)
    sizes = {f"{axis}_size": layout.size(axis) for axis in ("tp", "cp", "pp", "dp_replicate")}
    for key, value in changes:
        if key == "activation":
            other.activation.checkpointing = Checkpointing(value)
        elif key == "zero":
            other.zero.stage = int(value[-1])
        elif key in sizes:
            sizes[key] = value
        else:
            setattr(other, key, value)
    fixed = sizes["tp_size"] * sizes["cp_size"] * sizes["pp_size"]
    if layout.world_size % fixed:
        return None
    data = layout.world_size // fixed
    sizes["dp_replicate_size"] = data if other.zero.stage == 0 else min(sizes["dp_replicate_size"], data)
    changed = replace(layout, **sizes, dp_shard_size=data // sizes["dp_replicate_size"])
    for axis in AXES:
        setattr(other, f"{axis}_size", changed.size(axis))
    against = legality.refusals(
        other, world_size=layout.world_size, model_config=model_config, attn_implementation="fourfold"
    )
    return None if against else rank_bytes(other, layout=changed, model_config=model_config)
