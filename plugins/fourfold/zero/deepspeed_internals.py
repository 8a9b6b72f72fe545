"""Everything that leans on the inside of DeepSpeed, checked against 0.19.8. tests/parity/test_deepspeed_canary.py fails
when an upgrade changes one of these.

1. quiet_start: no compiling of the shared-memory collective (138 s), no import of inductor by Muon (10-24 s).
2. use_fp32_shards, share_fp32_masters, skip_reduction, use_flat_gradients, use_blocked_norm: gradients are summed in
   one flat fp32 shard whatever the dtype, and no second copy of a shard is made on the way to the optimizer.
3. new_partitioned_parameter: a ZeRO-3 parameter from a shape, without ever broadcasting it.
4. folding, whole_gradient, use_fp32_gradients: whole gradients of a pipeline's schedule. Its ZeRO-3 never prefetches: stages
   are called past the module whose hook begins a trace (and compares parameter ids over the world, which stages differ in).
5. fragments, averaged_gradients: where a rank's slices of master weights, optimizer state and gradients lie.
"""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def quiet_start(device: torch.device) -> Any:
    """Import DeepSpeed without its slow or noisy parts; returns the module. Call before any other import of it."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    os.environ.setdefault("LOCAL_RANK", "0")  # asserted by its engine, also where no launcher set it
    import deepspeed
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    with _without_compile():
        import deepspeed.runtime.zero.muon.muon_optimizer  # imported later anyway, in its first reduction
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    return deepspeed


@contextmanager
def _without_compile() -> Iterator[None]:
    """`@torch.compile` at import time of DeepSpeed's Muon would import all of inductor; we never use Muon."""
    original = torch.compile

    def leave_alone(function: Any = None, **options: Any) -> Any:
        return function if function is not None else leave_alone

    setattr(torch, "compile", leave_alone)  # noqa: B010
    try:
        yield
    finally:
        setattr(torch, "compile", original)  # noqa: B010


def initialize(module: nn.Module, *, optimizer: torch.optim.Optimizer, settings: dict[str, Any], mpu: Any) -> Any:
    """deepspeed.initialize with our groups; returns the engine."""
    import deepspeed
    from deepspeed.utils import groups

    groups.mpu = None  # module-global there, and never reset: a second engine of one process would inherit it
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=settings, mpu=mpu)
    return engine


def use_fp32_shards(optimizer: Any, *, whole_gradients: bool) -> None:
    """Sum reduced gradients of a stage-2 optimizer in one flat fp32 buffer of the size of this rank's shard.

    That is what it does for bf16 parameters with fp32 sums; for fp32 parameters it would hold two copies of the shard.
    With `whole_gradients` (reduced once, from `grad_accum`) the bucket that is reduced is fp32 as well.
    """
    if optimizer.cpu_offload or optimizer.gradient_accumulation_dtype != torch.float32:
        return
    if optimizer.dtype == torch.float32 or whole_gradients:
        optimizer.use_grad_accum_attribute = True
    if optimizer.dtype == torch.float32:
        optimizer._use_compact_grad_partition_buffer = lambda group_index: True
    if whole_gradients:  # by itself it folds them in after the whole backward: twice the gradients
        reduce = optimizer.process_gradients
        fold = optimizer._fill_param_grad_accum_attribute
        optimizer.process_gradients = lambda p, group: (
            fold(p) if optimizer._coalesce_grad_reduction else reduce(p, group)
        )


def share_fp32_masters(optimizer: Any) -> None:
    """Let the master weights of fp32 parameters be the weights themselves (stages 0 to 2; stage 3 does it by itself):
    DeepSpeed keeps a second copy of the shard and copies it back after every update."""
    if optimizer.dtype != torch.float32 or optimizer.cpu_offload:
        return
    for index, master in enumerate(optimizer.single_partition_of_fp32_groups):
        mine = dist.get_rank(optimizer.real_dp_process_group[index])
        master.data = optimizer.parallel_partitioned_bit16_groups[index][mine].data
    optimizer._link_all_hp_params()  # its views of the copy would keep it


def skip_reduction(optimizer: Any) -> None:
    """For a shard group of one rank: add gradients to the flat fp32 shard without any collective or copy."""
    if not optimizer.cpu_offload and all(
        map(optimizer._use_compact_grad_partition_buffer, range(len(optimizer.bit16_groups)))
    ):
        optimizer.average_tensor = optimizer._add_full_reduction_to_compact_grad_partition


def use_flat_gradients(optimizer: Any) -> None:
    """Stage 3: hand the optimizer the flat buffer that gradients are summed in, not a copy of it (one more shard)."""
    if optimizer.offload_optimizer or optimizer.gradient_accumulation_dtype != torch.float32:
        return

    def prepare(group: int) -> None:
        master = optimizer.fp32_partitioned_groups_flat[group]
        start = optimizer.averaged_gradients[group][0].storage_offset()
        master.grad = optimizer.grad_partitions_flat_buffer.narrow(0, start, master.numel())
        optimizer.averaged_gradients[group] = None

    optimizer._prepare_fp32_grad_for_sub_group = prepare


NORM_BLOCK = 2**16
GATHERED = 2**22  # elements of each rank that are published at a time


def use_blocked_norm(optimizer: Any) -> None:
    """Gradient norm by fp32 sums over blocks, added up in fp64: as exact as DeepSpeed's (3e-7 on 12M elements, a plain
    fp32 norm 5e-4), without its fp64 copy of every gradient (7% of a small model's step; the largest parameter twice)."""

    def norm(gradients: Any, params: Any, norm_type: float = 2.0) -> Tensor:
        from deepspeed.runtime.utils import is_model_parallel_parameter, mask_nan_or_inf_with_val_inplace

        assert norm_type == 2.0
        real = (gradient for gradient in gradients if not getattr(gradient, "_zero_padding", False))
        total = torch.zeros((), dtype=torch.float64, device=optimizer.device)
        for gradient, parameter in zip(real, params, strict=False):
            if is_model_parallel_parameter(parameter) and not getattr(parameter, "ds_pipe_replicated", False):
                total += _sum_of_squares(gradient)
        total = total.float()
        dist.all_reduce(total, group=optimizer.dp_process_group)
        optimizer._model_parallel_all_reduce(tensor=total, op=dist.ReduceOp.SUM)
        total.sqrt_()
        mask_nan_or_inf_with_val_inplace(total, device=optimizer.device)
        return total

    optimizer.get_grad_norm_direct = norm


def _sum_of_squares(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1)
    whole = len(flat) // NORM_BLOCK * NORM_BLOCK
    norms = torch.linalg.vector_norm(flat[:whole].view(-1, NORM_BLOCK), dim=1)
    return norms.double().square().sum() + torch.linalg.vector_norm(flat[whole:]).double().square()


def partitioner(*, group: dist.ProcessGroup, settings: dict[str, Any], mpu: Any) -> Any:
    """DeepSpeed's context for ZeRO-3 parameters over `group`; used as an object, never entered."""
    import deepspeed

    return deepspeed.zero.Init(
        data_parallel_group=group, config_dict_or_path=settings, mpu=mpu, mem_efficient_linear=False
    )


def new_partitioned_parameter(shape: torch.Size, *, dtype: torch.dtype, partitioner: Any) -> nn.Parameter:
    """A ZeRO-3 parameter of global `shape` whose local slice (`ds_tensor`) is still to be filled."""
    parameter: Any = nn.Parameter(torch.empty(shape, dtype=dtype, device=partitioner.local_device))
    partitioner._convert_to_deepspeed_param(parameter)
    parameter.partition()
    return parameter


def averaged_gradients(engine: Any) -> list[Tensor]:
    """This rank's shard of the averaged gradients, between the last backward and step(): tensors to change in place."""
    tensors: list[Tensor] = []
    for group in engine.optimizer.averaged_gradients.values():
        tensors += [tensor for tensor in _parts(group) if tensor is not None]
    return tensors


def owned_slices(engine: Any) -> Iterator[tuple[Any, int, int, int, int]]:
    """(parameter, start in the flattened parameter, index of the flat fp32 buffer, start in that buffer, elements) of
    each slice whose master weight this rank keeps. Collective-free; order is the same on every call."""
    optimizer = engine.optimizer
    for parameter in engine.module.parameters():
        if not parameter.requires_grad:
            continue
        if hasattr(parameter, "ds_id"):
            buffer, offset, _ = optimizer.grad_position[optimizer.get_param_id(parameter)]
            size = parameter.ds_tensor.ds_numel
            start = optimizer._get_param_partition_rank(parameter) * size
            count = min(size, parameter.ds_numel - start)
        else:
            mapping = parameter._hp_mapping
            if mapping is None:
                continue
            buffer, offset = mapping.param_group_index, mapping.hp_fragment_address.start
            start, count = mapping.lp_fragment_address.start, mapping.lp_fragment_address.numel
        if count > 0:
            yield parameter, int(start), int(buffer), int(offset), int(count)


def master_buffers(engine: Any) -> list[nn.Parameter]:
    """Flat fp32 buffers of this rank: the very tensors that the torch optimizer updates."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        return list(optimizer.fp32_partitioned_groups_flat)
    return list(optimizer.single_partition_of_fp32_groups)


def gradient_buffers(engine: Any) -> list[Tensor]:
    """Averaged gradients in the order of `master_buffers`; valid between the last backward and step()."""
    groups = engine.optimizer.averaged_gradients
    parts = [_parts(groups[index]) for index in range(len(master_buffers(engine)))]
    return [one[0].reshape(-1) if len(one) == 1 else torch.cat([tensor.reshape(-1) for tensor in one]) for one in parts]


def _parts(group: Any) -> list[Tensor]:
    """What the averaged gradients of a parameter group lie in: one flat tensor, or one for each parameter."""
    flat = getattr(group, "flat_partition", None)
    return list(group or []) if flat is None else [flat]


def folding(optimizer: Any) -> Callable[[nn.Parameter], None]:
    """What adds a parameter's `grad` to its fp32 sum, where the optimizer keeps one (stages 1 and 2)."""
    if getattr(optimizer, "use_grad_accum_attribute", False):
        fold: Callable[[nn.Parameter], None] = optimizer._fill_param_grad_accum_attribute
        return fold
    return lambda parameter: None


def whole_gradient(parameter: Any) -> Tensor:
    """This rank's gradient of a parameter, before anything was reduced."""
    gradient: Tensor | None = getattr(parameter, "grad_accum", None)
    return parameter.grad if gradient is None else gradient


def use_fp32_gradients(module: nn.Module) -> None:
    """Whole gradients in fp32 (stage 3 where it reduces once): autograd adds to `grad` in that type."""
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.grad_dtype = torch.float32


def gradient_views(engine: Any, buffer: int, *, start: int, count: int) -> list[Tensor]:
    """Elements [start, start + count) of a gradient buffer, as views of the tensors that `step` will read."""
    views, at = [], 0
    for tensor in _parts(engine.optimizer.averaged_gradients[buffer]):
        first, last = max(start - at, 0), min(start + count - at, tensor.numel())
        if first < last:
            views.append(tensor.view(-1)[first:last])
        at += tensor.numel()
    return views


@torch.no_grad()
def publish_masters(engine: Any) -> None:
    """Make the training weights of every rank equal to the master weights. Collective over the shard group."""
    optimizer = engine.optimizer
    if not hasattr(optimizer, "fp32_partitioned_groups_flat"):
        for index, master in enumerate(optimizer.single_partition_of_fp32_groups):
            partitions, group = (
                optimizer.parallel_partitioned_bit16_groups[index],
                optimizer.real_dp_process_group[index],
            )
            partitions[dist.get_rank(group)].copy_(master)
            _gather_partitions(partitions, group=group)
            optimizer._update_model_bit16_weights(index)
        return
    buffers = master_buffers(engine)
    for parameter, _, buffer, offset, count in owned_slices(engine):
        parameter.ds_tensor.data[:count].copy_(buffers[buffer][offset : offset + count])
    persistent = optimizer.persistent_parameters
    if persistent:
        for parameter in persistent:
            parameter.partition()
        persistent[0].all_gather(persistent)


def _gather_partitions(partitions: list[Tensor], *, group: dist.ProcessGroup) -> None:
    """Every rank's own partition to all, a little at a time: gloo holds what it gathers twice."""
    mine = partitions[dist.get_rank(group)]
    for start in range(0, mine.numel(), GATHERED):
        parts = [partition[start : start + GATHERED] for partition in partitions]
        dist.all_gather(parts, mine[start : start + GATHERED], group=group)
