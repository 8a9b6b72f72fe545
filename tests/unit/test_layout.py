"""Rank arithmetic against numpy's own order, and exhaustively up to 16,384 ranks."""

import itertools

import numpy as np
import pytest

from fourfold.layout import AXES, Layout, largest_divisor, product

LARGE = Layout(tp_size=8, cp_size=16, pp_size=16, dp_shard_size=8)
SMALL = [
    Layout(tp_size=tp, cp_size=cp, pp_size=pp, dp_shard_size=shard, dp_replicate_size=replicate)
    for tp, cp, pp, shard, replicate in itertools.product((1, 2, 3), repeat=5)
    if tp * cp * pp * shard * replicate <= 48
]
NOTABLE = [LARGE, Layout(tp_size=2, cp_size=3, pp_size=2, dp_shard_size=4, dp_replicate_size=5)]
GROUPS = [*((axis,) for axis in AXES), ("dp_shard", "cp"), ("cp", "dp_shard", "dp_replicate"), ("tp", "pp"), AXES]


def grid(layout: Layout) -> np.ndarray:
    """rank[dp_replicate, dp_shard, pp, cp, tp]: the last index is the fastest."""
    return np.arange(layout.world_size).reshape([layout.size(axis) for axis in reversed(AXES)])


def test_there_is_something_to_test() -> None:
    assert LARGE.world_size == 16_384
    assert len(SMALL) > 150
    assert AXES == ("tp", "cp", "pp", "dp_shard", "dp_replicate")


@pytest.mark.parametrize("layout", [*NOTABLE, *SMALL[::7]], ids=lambda layout: layout.describe())
def test_rank_and_coordinate_are_inverse(layout: Layout) -> None:
    ranks = grid(layout)
    for index in np.ndindex(*ranks.shape):
        position = dict(zip(reversed(AXES), index, strict=True))
        rank = int(ranks[index])
        assert layout.coordinate(rank) == position
        assert layout.rank(position) == rank


@pytest.mark.parametrize("axes", GROUPS, ids="+".join)
def test_groups_partition_the_largest_world(axes: tuple[str, ...]) -> None:
    check_groups(LARGE, axes)


@pytest.mark.parametrize("layout", [NOTABLE[1], *SMALL], ids=lambda layout: layout.describe())
def test_groups_partition_the_world(layout: Layout) -> None:
    for axes in GROUPS:
        check_groups(layout, axes)


def check_groups(layout: Layout, axes: tuple[str, ...]) -> None:
    """Every group is what numpy's axes say, every rank is in one, and every member names the same group."""
    places = [list(reversed(AXES)).index(axis) for axis in axes]
    moved = np.moveaxis(grid(layout), places, range(-len(axes), 0)).reshape(-1, product(map(layout.size, axes)))
    expected = {tuple(sorted(row)) for row in moved.tolist()}
    assert sum(map(len, expected)) == layout.world_size
    for members in expected:
        assert layout.group(axes, rank=members[0]) == members
        assert layout.group(axes, rank=members[-1]) == members


@pytest.mark.parametrize("layout", [*NOTABLE, *SMALL[::5]], ids=lambda layout: layout.describe())
def test_data_ranks(layout: Layout) -> None:
    """Ranks that differ in tp, cp or pp read the same rows; each share is read by as many ranks; shares lie in order."""
    shares = [layout.data_rank(rank) for rank in range(layout.world_size)]
    assert sorted(set(shares)) == list(range(layout.data_size))
    assert all(shares.count(share) * layout.data_size == layout.world_size for share in set(shares))
    model = layout.tp_size * layout.cp_size * layout.pp_size
    assert shares == [rank // model for rank in range(layout.world_size)]


def test_derived_sizes() -> None:
    layout = Layout(tp_size=2, cp_size=3, dp_shard_size=4, dp_replicate_size=5)
    assert (layout.world_size, layout.data_size, layout.partition_size) == (120, 20, 12)
    assert layout.describe() == "tp 2 x cp 3 x dp_shard 4 x dp_replicate 5"
    assert Layout().describe() == "one process"


def test_largest_divisor() -> None:
    for number, at_most in itertools.product(range(1, 60), range(-1, 60)):
        allowed = [d for d in range(1, number + 1) if number % d == 0 and d <= max(at_most, 1)]
        assert largest_divisor(number, at_most=at_most) == max(allowed)
