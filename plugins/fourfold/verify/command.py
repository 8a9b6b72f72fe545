"""`fourfold verify`: shrink a recipe, run its layout on a few processes and the reference on one, compare."""

import os
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from fourfold import legality, ranges
from fourfold.errors import INTERRUPTED_EXIT
from fourfold.layout import Layout
from fourfold.pipeline.schedules import unknown
from fourfold.planner.passes import micro_batches
from fourfold.schema import TrainConfig
from fourfold.verify import axes

UPDATES = 2  # the second has weights that the first one made and published


@dataclass(frozen=True)
class Options:
    max_axis: int = 2
    max_processes: int = 8
    timeout: float = 300.0  # seconds that a pass may take


def verify(config: TrainConfig, *, options: Options, notes: list[str]) -> int:
    """0 if every pass is equal to one process, else 1. ValueError for what a run would refuse."""
    wait = ranges.seconds(options.timeout, knob="--timeout ")
    for problem in [*unknown(config.pipeline), *legality.batch(config, layout=Layout()), *wait]:
        raise ValueError(problem)
    sizes = axes.cut_sizes(config, max_axis=options.max_axis, max_processes=options.max_processes)
    os.environ |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "TOKENIZERS_PARALLELISM": "false"}
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)  # leave as by Ctrl-C: nothing is left behind
    scratch = Path(tempfile.mkdtemp(prefix="fourfold-verify-"))
    try:
        return _verify(config, options=options, sizes=sizes, notes=notes, scratch=scratch)
    except KeyboardInterrupt:
        print("\nfourfold: interrupted, nothing is verified", file=sys.stderr, flush=True)
        return INTERRUPTED_EXIT
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _verify(config: TrainConfig, *, options: Options, sizes: dict[str, int], notes: list[str], scratch: Path) -> int:
    from fourfold.verify import recipe, show
    from fourfold.verify.pool import RankPool

    began = time.monotonic()
    pool = RankPool(patience=options.timeout)
    pool.warm_up()
    layouts = axes.passes(sizes, max_processes=options.max_processes)
    show.progress("reading the model's config and the data")
    from fourfold.verify.small import make_small

    small = make_small(config, layouts=layouts, sizes=sizes, scratch=scratch)
    parted = [
        f"{one} and {other} are together in no pass: give --max-processes more"
        for one, other in axes.apart(sizes, layouts)
    ]
    show.show_start(config.name, small.about, [*notes, *recipe.remarks(config), *small.notes, *parted])
    from fourfold.verify.passes import PassFailed, run_passes

    try:
        found = run_passes(small, layouts=layouts, pool=pool, updates=updates_of(small.recipes, layouts))
    except PassFailed as error:
        print(f"\nNOT VERIFIED: {error}", flush=True)
        return 1
    show.show_passes([one.comparison for one in found])
    show.show_verdict(found, seconds=time.monotonic() - began)
    return 0 if all(one.comparison.equal for one in found) else 1


def updates_of(recipes: list[TrainConfig], layouts: list[Layout]) -> int:
    """One more where ZeRO-3 has one micro-batch in each: it gathers by the order of the modules, which it learns in two."""
    counts = [micro_batches(recipe, layout=layout) for recipe, layout in zip(recipes, layouts, strict=True)]
    return UPDATES + (recipes[0].zero.stage == 3 and 1 in counts)
