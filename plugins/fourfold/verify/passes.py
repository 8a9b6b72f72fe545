"""The reference once, then every layout on ranks of its own, and what is to be said of each."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fourfold.layout import Layout
from fourfold.schema import TrainConfig
from fourfold.verify import show
from fourfold.verify.compare import Comparison, compare
from fourfold.verify.diagnose import diagnose
from fourfold.verify.pool import RankPool, RanksFailed
from fourfold.verify.ranks import verified_run
from fourfold.verify.reference import Reference, Settings, Truth
from fourfold.verify.rows import KnownRows
from fourfold.verify.small import Small


@dataclass(frozen=True)
class Pass:
    comparison: Comparison
    causes: list[str]  # why it is not equal


class PassFailed(RuntimeError):
    """A layout did not come to its end."""


def run_passes(
    small: Small, *, layouts: list[Layout], pool: RankPool, updates: int, run: Callable[..., Any] = verified_run
) -> list[Pass]:
    """Raises PassFailed if a rank of a pass fails, dies or hangs. `run` is what every rank does."""
    torch.set_num_threads(1)
    show.progress("one process")
    rows = {name: torch.from_numpy(values) for name, values in KnownRows.load(small.rows).columns.items()}
    truths = list(Reference(small.folder).updates(rows, count=updates, settings=_settings(small.recipes[0])))
    found = []
    for number, (layout, config) in enumerate(zip(layouts, small.recipes, strict=True), start=1):
        show.progress(f"pass {number} of {len(layouts)}: {layout.describe()} on {layout.world_size} processes")
        found.append(_one(small, config, layout, truths, rows, pool=pool, updates=updates, run=run))
    show.progress(f"{len(found)} of {len(layouts)} passes are through", last=True)
    return found


def _one(
    small: Small,
    config: TrainConfig,
    layout: Layout,
    truths: list[Truth],
    rows: dict[str, torch.Tensor],
    *,
    pool: RankPool,
    updates: int,
    run: Callable[..., Any],
) -> Pass:
    try:
        results = pool.run(layout.world_size, run, config=config, rows=small.rows, updates=updates)
    except RanksFailed as error:
        raise PassFailed(f"{layout.describe()} did not come to its end. {error}") from None
    comparison = compare(results, truths, layout=layout)
    if comparison.equal:
        return Pass(comparison, [])
    return Pass(comparison, list(diagnose(comparison, results, rows=rows, reference=Reference(small.folder))))


def _settings(config: TrainConfig) -> Settings:
    optim = config.optim
    return Settings(optim.learning_rate, optim.weight_decay, optim.momentum, optim.max_grad_norm)
