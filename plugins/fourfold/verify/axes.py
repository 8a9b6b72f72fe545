"""A layout cut down to a few processes, in passes that still have its axes together. Pure: imports no torch."""

from itertools import combinations

from fourfold.layout import AXES, Layout, product
from fourfold.schema import TrainConfig


def cut_sizes(config: TrainConfig, *, max_axis: int, max_processes: int) -> dict[str, int]:
    """{axis: ranks} of every axis that a run of the recipe spreads over: `max_axis` of them at most. A data size of -1 is the
    rest of a cluster, which has more than one.

    `hybrid` attention has two axes in one, and needs four ranks for both. ValueError where nothing can be spread.
    """
    for name, value in (("--max-axis", max_axis), ("--max-processes", max_processes)):
        if value < 2:
            raise ValueError(f"{name} {value}: use 2 or more, or there is nothing to verify.")
    wanted = {axis: getattr(config, f"{axis}_size") for axis in AXES}
    sizes = {axis: min(max_axis, max_processes, size if size > 0 else max_axis) for axis, size in wanted.items()}
    if config.attention.name == "hybrid" and wanted["cp"] >= 4 <= max_processes:
        sizes["cp"] = 4
    spread = {axis: size for axis, size in sizes.items() if size > 1}
    if not spread:
        raise ValueError("The recipe spreads nothing: every size is 1, so that it is one process already. Give a tier.")
    return spread


def passes(sizes: dict[str, int], *, max_processes: int) -> list[Layout]:
    """Layouts of `max_processes` ranks at most in which as many axes are together as fit, so that every pair (and every
    triple, where three fit) is in one of them."""
    fitting = [
        set(axes)
        for count in range(len(sizes), 0, -1)
        for axes in combinations(sizes, count)
        if product(sizes[axis] for axis in axes) <= max_processes
    ]
    largest = [axes for axes in fitting if not any(axes < other for other in fitting)]
    return [Layout(**{f"{axis}_size": sizes[axis] for axis in axes}) for axes in largest]


def apart(sizes: dict[str, int], layouts: list[Layout]) -> list[tuple[str, str]]:
    """Pairs of axes that are together in no pass: `max_processes` is too small for them."""
    return [
        pair
        for pair in combinations(sizes, 2)
        if not any(all(layout.size(axis) > 1 for axis in pair) for layout in layouts)
    ]
