"""All ranks of a layout as one process sees them: a fake process group, whose collectives return at once and move nothing."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from fourfold.layout import AXES, Layout
from fourfold.mesh import Mesh, build_mesh

GROUPS = {  # of a Mesh, and the axes along which its ranks differ
    "shard_group": ("dp_shard", "cp"),
    "replicate_group": ("dp_replicate",),
    "loss_group": ("dp_shard", "dp_replicate", "cp"),
    "model_group": ("pp", "tp"),
    "world_group": AXES,
}


@contextmanager
def fake_world(layout: Layout, *, rank: int) -> Iterator[Mesh]:
    """The mesh as `rank` of layout.world_size has it. RuntimeError inside of a real process group."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise RuntimeError("a dry run makes a process group of its own, and there is one already")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
    try:
        yield build_mesh(layout, device_type="cpu")
    finally:
        dist.destroy_process_group()


def differing_groups(mesh: Mesh) -> list[str]:
    """Live groups whose ranks are not those of the layout; none if the mesh is right."""
    expected: dict[str, tuple[dist.ProcessGroup, tuple[str, ...]]]
    expected = {axis: (mesh.axis_groups[axis], (axis,)) for axis in AXES}
    expected |= {name: (getattr(mesh, name), axes) for name, axes in GROUPS.items()}
    return [
        name
        for name, (group, axes) in expected.items()
        if tuple(dist.get_process_group_ranks(group)) != mesh.layout.group(axes, rank=mesh.rank)
    ]
