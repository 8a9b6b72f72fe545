"""Where every rank of a layout sits, checked over all of them. Pure."""

from fourfold.layout import AXES, Layout


def wrong_places(layout: Layout) -> list[str]:
    """What is not as it has to be; nothing for a right layout. Ranks and coordinates are one to one, and the groups along each
    axis have every rank once, at the distance of the faster axes' product."""
    wrong = []
    places = [layout.coordinate(rank) for rank in range(layout.world_size)]
    if len({tuple(place.values()) for place in places}) != layout.world_size:
        wrong.append("two ranks have the same coordinate")
    if any(layout.rank(place) != rank for rank, place in enumerate(places)):
        wrong.append("a rank's coordinate is another rank's")
    stride = 1
    for axis in AXES:
        size = layout.size(axis)
        firsts = [rank for rank, place in enumerate(places) if place[axis] == 0]
        groups = [layout.group([axis], rank=first) for first in firsts]
        if any(group != tuple(range(group[0], group[0] + size * stride, stride)) for group in groups):
            wrong.append(f"a group along {axis} is not {size} ranks at a distance of {stride}")
        if sorted(rank for group in groups for rank in group) != list(range(layout.world_size)):
            wrong.append(f"the groups along {axis} do not have every rank once")
        stride *= size
    return wrong


def crosses_servers(layout: Layout, *, gpus_per_node: int) -> bool:
    """Whether some group of tp ranks, which talk most, lies in more than one server."""
    groups = (range(first, first + layout.tp_size) for first in range(0, layout.world_size, layout.tp_size))
    return any(group[0] // gpus_per_node != group[-1] // gpus_per_node for group in groups)
