"""L01: the rest is derived where there is one answer; otherwise one message with the world, the degrees, the product."""

import re

import pytest

from fourfold.layout import Layout, resolve


@pytest.mark.parametrize(
    ("world", "sizes", "layout"),
    [
        (4, {"tp_size": 2, "dp_shard_size": -1}, Layout(tp_size=2, dp_shard_size=2)),
        (8, {"dp_shard_size": 4, "dp_replicate_size": -1}, Layout(dp_shard_size=4, dp_replicate_size=2)),
        (8, {"dp_shard_size": -1, "dp_replicate_size": 2}, Layout(dp_shard_size=4, dp_replicate_size=2)),
        (8, {"dp_shard_size": -1}, Layout(dp_shard_size=8)),
        (1, {"dp_shard_size": -1}, Layout()),
        (1, {}, Layout()),
        (
            16_384,
            {"tp_size": 8, "cp_size": 16, "pp_size": 16, "dp_shard_size": -1},
            Layout(tp_size=8, cp_size=16, pp_size=16, dp_shard_size=8),
        ),
    ],
)
def test_derived(world: int, sizes: dict[str, int], layout: Layout) -> None:
    assert resolve(world, **sizes) == layout


REFUSED = [
    (4, {"tp_size": 3, "dp_shard_size": -1}, ["tp_size=3", "multiple of 3", "4 were started", "Start 3"]),
    (4, {"tp_size": 3}, ["tp_size=3 makes 3 processes", "4 were started"]),
    (
        4,
        {"tp_size": 2, "cp_size": 2, "pp_size": 2, "dp_shard_size": -1},
        ["tp_size=2 x cp_size=2 x pp_size=2", "multiple of 8", "4 were started", "Start 8"],
    ),
    (8, {"dp_shard_size": 4}, ["dp_shard_size=4 makes 4 processes", "8 were started", "Start 4"]),
    (1, {"tp_size": 2, "dp_shard_size": -1}, ["tp_size=2", "multiple of 2", "1 was started", "Start 2"]),
    (6, {"dp_shard_size": 4, "dp_replicate_size": -1}, ["multiple of 4", "6 were started", "Start 4"]),
    (12, {"dp_replicate_size": 5, "dp_shard_size": -1}, ["multiple of 5", "12 were started", "Start 10"]),
    (8, {}, ["all sizes 1", "8 were started"]),
]


@pytest.mark.parametrize(("world", "sizes", "parts"), REFUSED)
def test_refused_with_both_numbers_and_a_way_out(world: int, sizes: dict[str, int], parts: list[str]) -> None:
    with pytest.raises(ValueError, match=r"were started|was started") as caught:
        resolve(world, **sizes)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message
    started = re.search(r"Start (\d+) \(accelerate launch --num_processes\)", message)
    assert started
    assert resolve(int(started[1]), **sizes).world_size == int(started[1]), "the number it names must work"


@pytest.mark.parametrize("name", ["tp_size", "cp_size", "pp_size", "dp_shard_size", "dp_replicate_size"])
@pytest.mark.parametrize("size", [0, -1, -2])
def test_degrees_that_are_none(name: str, size: int) -> None:
    if size == -1 and name.startswith("dp"):
        assert resolve(4, **{name: size}).world_size == 4
        return
    also = "or -1 for the rest" if name.startswith("dp") else "use 1 or more."
    with pytest.raises(ValueError, match=f"{name}={size} is not a number of GPUs: .*{also}"):
        resolve(4, **{name: size})


def test_two_open_sizes() -> None:
    with pytest.raises(ValueError, match="dp_shard_size=-1 and dp_replicate_size=-1"):
        resolve(4, dp_shard_size=-1, dp_replicate_size=-1)
