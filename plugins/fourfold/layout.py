"""How many GPUs lie along each axis, and who sits where. Pure arithmetic: no torch, no process group.

Axes, fastest first: tp, cp, pp, dp_shard, dp_replicate (Llama 3's order, arXiv:2407.21783 section 3.3.2: the axis that
talks most lies on the fastest links). dp = dp_replicate x dp_shard. Rank = sum of coordinate x stride.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields

AXES = ("tp", "cp", "pp", "dp_shard", "dp_replicate")  # fastest first
DATA_AXES = ("dp_shard", "dp_replicate")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes of the axes, all positive. Their product is the number of processes."""

    tp_size: int = 1
    cp_size: int = 1
    pp_size: int = 1
    dp_shard_size: int = 1
    dp_replicate_size: int = 1

    def size(self, axis: str) -> int:
        return int(getattr(self, f"{axis}_size"))

    @property
    def world_size(self) -> int:
        return product(self.size(axis) for axis in AXES)

    @property
    def data_size(self) -> int:
        """Ranks that read different rows."""
        return self.dp_shard_size * self.dp_replicate_size

    @property
    def partition_size(self) -> int:
        """Ranks over which ZeRO partitions: dp_shard x cp."""
        return self.dp_shard_size * self.cp_size

    def coordinate(self, rank: int) -> dict[str, int]:
        """Position of `rank` on every axis."""
        assert 0 <= rank < self.world_size, f"rank {rank} outside a world of {self.world_size}"
        position = {}
        for axis in AXES:
            rank, position[axis] = divmod(rank, self.size(axis))
        return position

    def rank(self, coordinate: dict[str, int]) -> int:
        """The inverse of `coordinate`; axes left out are 0."""
        rank = 0
        for axis in reversed(AXES):
            index = coordinate.get(axis, 0)
            assert 0 <= index < self.size(axis), f"{axis}={index} outside 0..{self.size(axis) - 1}"
            rank = rank * self.size(axis) + index
        return rank

    def data_rank(self, rank: int) -> int:
        """Which share of the rows `rank` reads, 0..data_size-1; equal for ranks that differ in tp, cp or pp only."""
        position = self.coordinate(rank)
        return position["dp_replicate"] * self.dp_shard_size + position["dp_shard"]

    def group(self, axes: Iterable[str], *, rank: int) -> tuple[int, ...]:
        """Ranks that share every coordinate with `rank` except those of `axes`, in rank order."""
        members = [self.coordinate(rank)]
        for axis in axes:
            members = [{**member, axis: index} for member in members for index in range(self.size(axis))]
        return tuple(sorted(self.rank(member) for member in members))

    def describe(self) -> str:
        """`dp_shard 4 x dp_replicate 2`; axes of size 1 are left out."""
        return " x ".join(f"{axis} {self.size(axis)}" for axis in AXES if self.size(axis) > 1) or "one process"


def resolve(world_size: int, **sizes: int) -> Layout:
    """Layout of the requested `<axis>_size`s; one data size may be -1: the rest of the world.

    Raises ValueError naming the world, the degrees and their product.
    """
    known = {field.name for field in fields(Layout)}
    assert set(sizes) <= known, f"not sizes of a layout: {set(sizes) - known}"
    requested = {f"{axis}_size": sizes.get(f"{axis}_size", 1) for axis in AXES}
    _refuse_impossible_degrees(requested)
    open_axes = [name for name, size in requested.items() if size == -1]
    fixed = product(size for size in requested.values() if size > 0)
    if open_axes and world_size % fixed == 0:
        requested[open_axes[0]] = world_size // fixed
    layout = Layout(**{name: size if size > 0 else 1 for name, size in requested.items()})
    if layout.world_size != world_size:
        raise ValueError(_mismatch(world_size, sizes=requested, fixed=fixed, is_open=bool(open_axes)))
    return layout


def largest_divisor(number: int, *, at_most: int) -> int:
    return next(divisor for divisor in range(min(number, max(at_most, 1)), 0, -1) if number % divisor == 0)


def product(numbers: Iterable[int]) -> int:
    result = 1
    for number in numbers:
        result *= number
    return result


def _refuse_impossible_degrees(requested: dict[str, int]) -> None:
    for name, size in requested.items():
        may_be_open = name in ("dp_shard_size", "dp_replicate_size")
        if size < 1 and not (size == -1 and may_be_open):
            also = ", or -1 for the rest of the processes" if may_be_open else ""
            raise ValueError(f"{name}={size} is not a number of GPUs: use 1 or more{also}.")
    if requested["dp_shard_size"] == requested["dp_replicate_size"] == -1:
        raise ValueError(
            "dp_shard_size=-1 and dp_replicate_size=-1 leave the split open: use a number for one of them."
        )


def _mismatch(world_size: int, *, sizes: dict[str, int], fixed: int, is_open: bool) -> str:
    degrees = " x ".join(f"{name}={size}" for name, size in sizes.items() if size != 1) or "all sizes 1"
    problem = f"{degrees} needs a multiple of {fixed} processes" if is_open else f"{degrees} makes {fixed} processes"
    return (
        f"{problem}, but {world_size} {'was' if world_size == 1 else 'were'} started. "
        f"Start {fixed if not is_open else max(fixed, world_size // fixed * fixed)} (accelerate launch "
        f"--num_processes), or use other sizes."
    )
