"""A recipe as lines of a torchtitan configuration function, on its `config`.

Names: pytorch/torchtitan b5bcd76 (August 2026), torchtitan/config/configs.py and trainer.py. Its order of ranks is tp, cp,
dp_shard, dp_replicate, pp: the pipeline is outermost.
"""

from fourfold.interop.settings import Recipe, Settings
from fourfold.pipeline.schedules import SCHEDULES, stages_per_rank
from fourfold.schema import Checkpointing, Offload, Precision

Lines = list[tuple[str, object]]
SCHEDULE_NAMES = {
    name: schedule.class_name.removeprefix("Schedule") for name, schedule in SCHEDULES.items()
}  # it asks torch for the class by that name


def settings(recipe: Recipe) -> Settings:
    unsaid: list[str] = []
    imports, more = _objects(recipe, unsaid)
    lines = [*_parallelism(recipe, unsaid), *_training(recipe, unsaid), *_schedule(recipe)]
    text = [f"config.{name} = {value!r}" for name, value in lines]
    return Settings("\n".join([*imports, "", *text, *more]), unsaid)


def _parallelism(recipe: Recipe, unsaid: list[str]) -> Lines:
    config, layout = recipe.config, recipe.layout
    found: Lines = [
        ("parallelism.data_parallel_replicate_degree", layout.dp_replicate_size),
        ("parallelism.data_parallel_shard_degree", layout.dp_shard_size),
        ("parallelism.tensor_parallel_degree", layout.tp_size),
        ("parallelism.enable_sequence_parallel", config.tensor.sequence_parallel),
        ("parallelism.context_parallel_degree", layout.cp_size),
        ("parallelism.pipeline_parallel_degree", layout.pp_size),
    ]
    if layout.partition_size > 1:
        if config.zero.stage == 1:
            unsaid.append("zero.stage=1: FSDP shards gradients and parameters too; the nearest keeps the latter whole")
        always = "always" if config.zero.stage == 3 else "never"
        found.append(("parallelism.fsdp_reshard_after_forward", always))
    if layout.cp_size > 1:
        unsaid.append(f"attention.name={recipe.attention}: torch's context parallelism exchanges keys in its own way")
    if layout.pp_size > 1:
        unsaid.append("the order of ranks: its pipeline is the outermost axis, here data parallelism is")
        found += _pipeline(recipe, unsaid)
    return found


def _pipeline(recipe: Recipe, unsaid: list[str]) -> Lines:
    settings = recipe.config.pipeline
    found: Lines = [
        ("parallelism.pipeline_parallel_schedule", SCHEDULE_NAMES[settings.schedule]),
        ("parallelism.num_pp_microbatches", recipe.micro_batches),
    ]
    if settings.split is not None:
        unsaid.append(f"pipeline.split={settings.split}: write parallelism.module_fqns_per_model_part")
    elif recipe.model is not None:
        stages = recipe.layout.pp_size * stages_per_rank(settings)
        found.append(
            ("parallelism.pipeline_parallel_layers_per_stage", -(-recipe.model.num_hidden_layers // stages)),
        )
    return found


def _training(recipe: Recipe, unsaid: list[str]) -> Lines:
    config = recipe.config
    bf16 = config.precision is Precision.bf16
    found: Lines = [
        ("training.num_tokens_per_microbatch_per_dp_rank", config.micro_batch_size * config.seq_len),
        ("training.num_tokens_per_train_step", config.global_batch_size * config.seq_len),
        ("training.max_context_length", config.seq_len),
        ("training.max_norm", config.optim.max_grad_norm),
        ("training.dtype", "float32"),
        ("training.mixed_precision_param", "bfloat16" if bf16 else "float32"),
        ("training.enable_cpu_offload", config.zero.offload.optimizer is Offload.cpu),
        ("comm.train_timeout_seconds", round(config.cluster.timeout)),
        ("debug.seed", config.seed),
    ]
    if config.max_steps is not None:
        found.insert(3, ("training.steps", config.max_steps))
    if config.optim.max_grad_norm == 0:
        unsaid.append("optim.max_grad_norm=0: there is no value that clips nothing but a large one")
    if bf16 and not config.zero.fp32_reduction:
        unsaid.append("zero.fp32_reduction=false: it reduces gradients in float32")
    if Offload.cpu in (config.zero.offload.optimizer, config.zero.offload.parameters):
        unsaid.append(
            "zero.offload by part: training.enable_cpu_offload moves parameters, gradients and optimizer states"
        )
    return found


def _schedule(recipe: Recipe) -> Lines:
    optim = recipe.config.optim
    constant = optim.lr_scheduler_type in ("constant", "wsd")
    found: Lines = [
        ("lr_scheduler.warmup_steps", optim.warmup_steps),
        ("lr_scheduler.decay_type", "cosine" if optim.lr_scheduler_type == "cosine" else "linear"),
        ("lr_scheduler.min_lr_factor", 1.0 if optim.lr_scheduler_type == "constant" else optim.min_lr_ratio),
    ]
    if constant:
        steps, wanted = recipe.config.max_steps, optim.decay_steps
        found.append(("lr_scheduler.decay_ratio", wanted / steps if wanted and steps else 0.1))
    return found


def _objects(recipe: Recipe, unsaid: list[str]) -> tuple[list[str], list[str]]:
    """Imports, and assignments of what is no plain value."""
    optim, mode = recipe.config.optim, recipe.config.activation.checkpointing
    policy = {
        Checkpointing.none: "None",
        Checkpointing.full: "FullAC.Config()",
        Checkpointing.selective: "SelectiveAC.Config()",
    }.get(mode)
    if mode is Checkpointing.selective:
        unsaid.append("activation.checkpointing=selective: its policy keeps some of the products too")
    if policy is None:
        unsaid.append(f"activation.checkpointing={mode.value}: every layer or none; the nearest is every layer")
        policy = "FullAC.Config()"
    if optim.name != "adamw":
        unsaid.append(f"optim.name={optim.name}: it has Adam, AdamW and Muon")
    betas = (optim.adam_beta1, optim.adam_beta2)
    adamw = f"default_adamw(lr={optim.learning_rate}, betas={betas}, eps={optim.adam_epsilon}, weight_decay={optim.weight_decay})"
    if optim.name == "adamw" and optim.weight_decay:
        unsaid.append(
            "weight decay on matrices only: default_adamw decays norms too; list ParamGroupConfig to change it"
        )
    return (
        [
            "from torchtitan.components.optimizer.optimizer import default_adamw",
            "from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC",
        ],
        [f"config.activation_checkpoint = {policy}", f"config.optimizer = {adamw}"],
    )
