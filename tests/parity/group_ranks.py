"""What one rank sees of the timeouts of groups."""

import time
from datetime import timedelta

import torch
import torch.distributed as dist

from fourfold.context.hybrid import Hybrid
from fourfold.context.kernels.cpu import CpuKernel
from fourfold.groups import timeout_of
from fourfold.layout import Layout
from fourfold.mesh import build_mesh
from fourfold.mpu import Mpu


def timeouts(rank: int, *, seconds: float, layout: Layout) -> list[float]:
    """Of every group of this process, once a mesh and a hybrid strategy are made."""
    dist.set_timeout(timedelta(seconds=seconds))
    mesh = build_mesh(layout, device_type="cpu")
    options = {"ulysses_size": "2", "outer": "ring"}
    Hybrid(mesh.axis_groups["cp"], kernel=CpuKernel(), heads=4, kv_heads=2, options=options)
    return [timeout_of(group).total_seconds() for group in dist.distributed_c10d._world.pg_map]


def waited(rank: int, *, seconds: float, layout: Layout) -> float:
    """For the other rank of the tensor-parallel group, which never comes."""
    dist.set_timeout(timedelta(seconds=seconds))
    group = build_mesh(layout, device_type="cpu").axis_groups["tp"]
    if dist.get_rank(group):
        time.sleep(2 * seconds)
        return 0.0
    begin = time.monotonic()
    try:
        dist.all_reduce(torch.ones(1), group=group)
    except RuntimeError:
        return time.monotonic() - begin
    return float("inf")


def megatron_view(rank: int, *, layout: Layout) -> dict[str, object]:
    """What every function of the mpu says on this rank; groups as their ranks."""
    mpu = Mpu(build_mesh(layout, device_type="cpu"))
    answers = {name: getattr(mpu, name)() for name in dir(mpu) if name.startswith("get_")}
    answers["get_data_parallel_group alone"] = mpu.get_data_parallel_group(with_context_parallel=False)
    return {
        name: dist.get_process_group_ranks(answer) if isinstance(answer, dist.ProcessGroup) else answer
        for name, answer in answers.items()
    }
