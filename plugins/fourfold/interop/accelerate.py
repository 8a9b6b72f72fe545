"""A recipe as a file for `accelerate launch --config_file`, for scripts written with accelerate's Accelerator.

Names: accelerate 1.15, commands/launch.py and utils/dataclasses.py. Over tensor and context ranks and replicas it has FSDP2 with
a parallelism config, else DeepSpeed.
"""

from typing import Any

import yaml

from fourfold.interop.settings import Recipe, Settings
from fourfold.schema import Checkpointing, Offload, Precision

ROTATIONS = {"ring": "alltoall", "allgather": "allgather"}


def settings(recipe: Recipe) -> Settings:
    unsaid: list[str] = []
    layout = recipe.layout
    document: dict[str, Any] = _processes(recipe)
    if layout.pp_size > 1:
        unsaid.append(
            f"pp_size={layout.pp_size}: it has no pipeline for training; these processes are left to dp_shard_size"
        )
    composed = layout.tp_size > 1 or layout.cp_size > 1 or layout.dp_replicate_size > 1
    document |= _fsdp(recipe, unsaid) if composed else _deepspeed(recipe, unsaid)
    unsaid.append(
        f"the batch: the script's DataLoader has micro_batch_size={recipe.config.micro_batch_size} rows of "
        f"{recipe.config.seq_len} tokens"
    )
    unsaid.append("the optimiser and its schedule: the script's own")
    return Settings(yaml.safe_dump(document, sort_keys=False).rstrip(), unsaid)


def _processes(recipe: Recipe) -> dict[str, Any]:
    world, each = recipe.layout.world_size, recipe.config.cluster.gpus_per_node
    return {
        "compute_environment": "LOCAL_MACHINE",
        "num_machines": -(-world // each),
        "num_processes": world,
        "machine_rank": 0,
        "mixed_precision": "bf16" if recipe.config.precision is Precision.bf16 else "no",
    }


def _deepspeed(recipe: Recipe, unsaid: list[str]) -> dict[str, Any]:
    config = recipe.config
    _leave_out_checkpointing(recipe, unsaid)
    return {
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {
            "zero_stage": config.zero.stage,
            "gradient_accumulation_steps": recipe.micro_batches,
            "gradient_clipping": config.optim.max_grad_norm,
            "offload_optimizer_device": config.zero.offload.optimizer.value,
            "offload_param_device": config.zero.offload.parameters.value,
            "zero3_init_flag": config.zero.stage == 3,
            "zero3_save_16bit_model": config.zero.stage == 3,
        },
    }


def _leave_out_checkpointing(recipe: Recipe, unsaid: list[str]) -> None:
    if recipe.config.activation.checkpointing is not Checkpointing.none:
        unsaid.append(
            f"activation.checkpointing={recipe.config.activation.checkpointing.value}: call the model's "
            f"gradient_checkpointing_enable() in the script"
        )


def _fsdp(recipe: Recipe, unsaid: list[str]) -> dict[str, Any]:
    config, layout = recipe.config, recipe.layout
    if recipe.micro_batches > 1:
        unsaid.append(
            f"{recipe.micro_batches} micro-batches an update: Accelerator(gradient_accumulation_steps={recipe.micro_batches})"
        )
    if config.zero.stage < 2 and layout.partition_size > 1:
        unsaid.append(f"zero.stage={config.zero.stage}: FSDP2 shards gradients and parameters too")
    if config.activation.checkpointing in (Checkpointing.selective, Checkpointing.every_n):
        unsaid.append(f"activation.checkpointing={config.activation.checkpointing.value}: every layer or none")
    return {
        "distributed_type": "FSDP",
        "fsdp_config": {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": config.zero.stage == 3,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_cpu_ram_efficient_loading": True,
            "fsdp_offload_params": config.zero.offload.parameters is Offload.cpu,
            "fsdp_activation_checkpointing": config.activation.checkpointing is not Checkpointing.none,
        },
        "parallelism_config": {
            "parallelism_config_dp_replicate_size": layout.dp_replicate_size,
            "parallelism_config_dp_shard_size": layout.dp_shard_size * layout.pp_size,
            "parallelism_config_tp_size": layout.tp_size,
            **_context(recipe, unsaid),
        },
    }


def _context(recipe: Recipe, unsaid: list[str]) -> dict[str, Any]:
    name, cp_size = recipe.attention, recipe.layout.cp_size
    if cp_size == 1:
        return {"parallelism_config_cp_size": 1}
    if name not in ROTATIONS:
        unsaid.append(
            f"attention.name={name}: beside FSDP2 keys go round in a ring (alltoall) or to all at once (allgather)"
        )
    unsaid.append(
        "documents of a packed row: torch's context parallelism takes no mask, attention crosses their borders"
    )
    return {
        "parallelism_config_cp_size": cp_size,
        "parallelism_config_cp_comm_strategy": ROTATIONS.get(name, "allgather"),
    }
