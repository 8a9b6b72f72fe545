"""Live groups of a layout."""

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fourfold.groups import new_group, timeout_of
from fourfold.layout import AXES, Layout

SLOWEST_FIRST = tuple(reversed(AXES))


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """A layout with its process groups. Groups of one rank exist too, so that no caller needs a special case."""

    layout: Layout
    rank: int
    axis_groups: dict[str, dist.ProcessGroup]
    shard_group: dist.ProcessGroup  # shares one copy of parameters, gradients and optimizer state: dp_shard x cp
    replicate_group: dist.ProcessGroup  # holds the same shard
    loss_group: dist.ProcessGroup  # whose token losses add up to the loss of the global batch: dp x cp
    model_group: dist.ProcessGroup  # holds one copy of the model between them: pp x tp
    world_group: dist.ProcessGroup

    @property
    def data_rank(self) -> int:
        return self.layout.data_rank(self.rank)

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def build_mesh(layout: Layout, *, device_type: str) -> Mesh:
    """Collective over all processes of the default group, whose number must be the layout's. Its timeout is that of all
    groups."""
    assert dist.get_world_size() == layout.world_size, (dist.get_world_size(), layout)
    shape = tuple(layout.size(axis) for axis in SLOWEST_FIRST)
    device_mesh = init_device_mesh(device_type, shape, mesh_dim_names=SLOWEST_FIRST)
    axis_groups = {axis: device_mesh.get_group(axis) for axis in AXES}
    world_group = dist.group.WORLD
    assert world_group is not None
    made = Mesh(
        layout=layout,
        rank=dist.get_rank(),
        axis_groups=axis_groups,
        shard_group=_flat_group(device_mesh, "dp_shard", "cp"),
        replicate_group=axis_groups["dp_replicate"],
        loss_group=_flat_group(device_mesh, "dp_replicate", "dp_shard", "cp"),
        model_group=_flat_group(device_mesh, "pp", "tp"),
        world_group=world_group,
    )
    timeout = timeout_of()
    for group in (*axis_groups.values(), made.shard_group, made.loss_group, made.model_group):
        dist.set_timeout(timeout, group)
    return made


def _flat_group(device_mesh: DeviceMesh, *axes: str) -> dist.ProcessGroup:
    return device_mesh[axes]._flatten("_".join(axes)).get_group()


def neighbours(group: dist.ProcessGroup, *, size: int) -> dist.ProcessGroup:
    """The group of `size` neighbouring ranks of `group` that has this one. Collective over those."""
    ranks = dist.get_process_group_ranks(group)
    first = dist.get_rank(group) // size * size
    return new_group(ranks[first : first + size], like=group)
