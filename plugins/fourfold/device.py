"""The only file that asks which device there is. CUDA with NCCL if every process of a node gets its own GPU, else CPU
with gloo; everything else takes the torch.device from here."""

import os
import resource
from datetime import timedelta

import torch
import torch.distributed as dist

from fourfold.errors import local_rank, rank, world_size
from fourfold.schema import ClusterConfig, Device


def choose_device(wanted: Device) -> torch.device:
    """Device of this process. Raises ValueError if CUDA is asked for and a process would have no GPU of its own."""
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    gpus = torch.cuda.device_count() if wanted is not Device.cpu else 0
    if wanted is Device.cuda and gpus < local_world:
        raise ValueError(
            f"cluster.device=cuda with {local_world} processes on this node, which shows {gpus} GPUs: start at most "
            f"{gpus} processes (accelerate launch --num_processes), or use cluster.device=cpu."
        )
    if gpus >= local_world:
        return torch.device("cuda", local_rank())
    return torch.device("cpu")


def start_process_group(device: torch.device, *, cluster: ClusterConfig) -> None:
    """One process group over all processes that the launcher started; a store in memory if it started just this one."""
    if dist.is_initialized():
        return
    timeout = timedelta(seconds=cluster.timeout)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout, store=dist.HashStore(), rank=0, world_size=1)
    assert (dist.get_world_size(), dist.get_rank()) == (world_size(), rank())


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def peak_memory(device: torch.device) -> int:
    """Bytes: most that was allocated on the GPU since the start, or the peak resident set of a CPU process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def seed_everything(seed: int, *, rank: int) -> None:
    """Random numbers of this process: dropout differs between ranks with other tokens (weights are read, never drawn)."""
    torch.manual_seed(seed * 100_003 + rank)
