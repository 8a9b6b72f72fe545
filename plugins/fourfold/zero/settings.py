"""The DeepSpeed JSON that a recipe stands for. Pure: the same dictionary is planned with, trained with and written out."""

from collections.abc import Iterator
from typing import Any

from fourfold.layout import Layout
from fourfold.schema import Offload, OffloadConfig, Precision, TrainConfig, ZeroConfig


def deepspeed_json(config: TrainConfig, *, layout: Layout) -> dict[str, Any]:
    """Settings for deepspeed.initialize.

    Accumulation is ours (zero/engine.py), so DeepSpeed is told of one micro-batch a step and never divides by it.
    """
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": config.micro_batch_size,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.optim.max_grad_norm,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,  # our optimizers are torch's; "untested" means not DeepSpeed's own
        "zero_force_ds_cpu_optimizer": False,  # its CPU Adam is compiled at first use, for minutes
        "zero_optimization": _zero_section(config.zero, layout=layout),
    }
    if config.precision is Precision.bf16:
        # an overflow check makes DeepSpeed skip the update when the norm is not finite, as it does by itself in fp32
        settings["bf16"] = {"enabled": True, "check_grad_overflow": True}
        settings["data_types"] = {"grad_accum_dtype": "fp32" if config.zero.fp32_accumulation else "bf16"}
        settings["communication_data_type"] = "fp32" if config.zero.fp32_reduction else "bf16"
    return settings


def refusals(config: TrainConfig, *, layout: Layout) -> Iterator[str]:
    """Why ZeRO cannot shard this layout as the run wants it; all reasons."""
    settings, offload = config.zero, config.zero.offload
    if settings.stage not in (0, 1, 2, 3):
        yield f"zero.stage={settings.stage}: use 0, 1, 2 or 3."
    if settings.stage == 0 and layout.dp_shard_size > 1:
        yield (
            f"zero.stage=0 shards nothing, but dp_shard_size={layout.dp_shard_size}: use dp_shard_size=1 "
            f"dp_replicate_size={layout.data_size}, or zero=stage1."
        )
    if settings.stage == 0 and layout.cp_size > 1:
        yield (
            f"zero.stage=0 shards nothing, but the cp_size={layout.cp_size} ranks of a row share optimizer state: use "
            f"zero=stage1, or cp_size=1."
        )
    if offload.parameters is not Offload.none and settings.stage != 3:
        yield (
            f"zero.offload.parameters={offload.parameters.value} needs parameters that are sharded, and zero.stage="
            f"{settings.stage}: use zero=stage3, or zero.offload.parameters=none."
        )
    wanted = {offload.optimizer, offload.parameters}
    if Offload.nvme in wanted:
        yield (
            "zero.offload to nvme is not supported: DeepSpeed swaps the master weights out of reach between updates, so "
            "that no checkpoint of them could be written. Use cpu, or more GPUs with zero=stage3."
        )
    if wanted != {Offload.none} and layout.dp_replicate_size > 1:
        yield (
            f"zero.offload with dp_replicate_size={layout.dp_replicate_size} is not proven: DeepSpeed keeps offloaded "
            f"gradients out of reach of the reduction over replicas. Use dp_replicate_size=1, or no offload."
        )
    for axis, why in (("tp", "the sums over tensor ranks"), ("pp", "one reduction after a pipeline's schedule")):
        if wanted != {Offload.none} and layout.size(axis) > 1:
            yield (
                f"zero.offload with {axis}_size={layout.size(axis)} is not proven: DeepSpeed keeps offloaded gradients out of "
                f"reach of {why}. Use {axis}_size=1, or no offload."
            )
    if wanted != {Offload.none} and settings.stage < 2:
        yield f"zero.offload with zero.stage={settings.stage} is not proven: use zero=stage2 or zero=stage3."


def engine_stage(zero: ZeroConfig) -> int:
    """DeepSpeed's stage for ours. Its stages 0 and 1 are not used: stage 0 takes a step of its own under bf16 and
    reports no norm, stage 1 hands bf16 with fp32 sums to another optimizer that cannot defer the reduction. Ours are
    stage 2 that keeps whole gradients until the boundary, stage 0 over a shard group of one."""
    return 3 if zero.stage == 3 else 2


def _zero_section(zero: ZeroConfig, *, layout: Layout) -> dict[str, Any]:
    section: dict[str, Any] = {
        "stage": engine_stage(zero),
        "contiguous_gradients": True,
        # stages 1 and 2 all-reduce whole buckets either way (use_multi_rank_bucket_allreduce); False: in place
        "reduce_scatter": zero.stage == 3,
        "overlap_comm": zero.overlap_comm,
        "reduce_bucket_size": zero.reduce_bucket_size,
    }
    if zero.stage == 3:
        section |= {
            "stage3_param_persistence_threshold": zero.stage3_param_persistence_threshold,
            "stage3_prefetch_bucket_size": zero.stage3_prefetch_bucket_size,
            "stage3_max_live_parameters": zero.stage3_max_live_parameters,
            "stage3_max_reuse_distance": zero.stage3_max_reuse_distance,
            "stage3_module_granularity_threshold": zero.stage3_module_granularity_threshold,
            "memory_efficient_linear": False,  # would replace torch.nn.functional.linear for the whole process
        }
    else:
        section["allgather_bucket_size"] = zero.allgather_bucket_size
        if layout.partition_size == 1:
            # nothing is sent: without a bucket each gradient is added to the flat shard from where it is
            section |= {"reduce_bucket_size": 1, "overlap_comm": False}
    return section | _offload_section(zero.offload)


def _offload_section(offload: OffloadConfig) -> dict[str, Any]:
    section = {}
    for key, place in (("offload_optimizer", offload.optimizer), ("offload_param", offload.parameters)):
        if place is not Offload.none:
            section[key] = {"device": place.value, "pin_memory": True}
    return section
