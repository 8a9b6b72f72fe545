"""A recipe as arguments of Megatron-LM's pretrain_gpt.py.

Names: NVIDIA/Megatron-LM d98e8a6 (August 2026), megatron/training/arguments.py and the config classes that it makes
arguments of. Order of ranks: --use-tp-pp-dp-mapping is tp, cp, pp, dp, as here; without it pp is outermost.
"""

from typing import Any

from fourfold.interop.settings import Recipe, Settings
from fourfold.pipeline.schedules import stages_per_rank
from fourfold.pipeline.split import layers_of_stages
from fourfold.planner.parameters import head_dim
from fourfold.schema import Checkpointing, Offload, Precision

Arguments = dict[str, str | None]  # None: a flag
COMM_TYPES = {"ring": "p2p", "allgather": "allgather", "ulysses": "a2a", "hybrid": "a2a+p2p"}
SHARDING = {2: "optim_grads", 3: "optim_grads_params"}
DECAYS = {"linear": "linear", "cosine": "cosine", "constant": "constant", "wsd": "WSD"}


def settings(recipe: Recipe) -> Settings:
    unsaid: list[str] = []
    arguments: Arguments = {"use-tp-pp-dp-mapping": None, "calculate-per-token-loss": None}
    for part in (_axes, _zero, _context, _pipeline, _activation, _batch, _optimiser, _model):
        arguments |= part(recipe, unsaid)
    lines = [f"  --{name}" if value is None else f"  --{name} {value}" for name, value in arguments.items()]
    start = f"torchrun --nproc-per-node {min(recipe.layout.world_size, recipe.config.cluster.gpus_per_node)} pretrain_gpt.py"
    return Settings(" \\\n".join([start, *lines]), unsaid)


def _axes(recipe: Recipe, unsaid: list[str]) -> Arguments:
    layout, tensor = recipe.layout, recipe.config.tensor
    found: Arguments = {
        "tensor-model-parallel-size": str(layout.tp_size),
        "context-parallel-size": str(layout.cp_size),
        "pipeline-model-parallel-size": str(layout.pp_size),
    }
    if layout.tp_size > 1 and tensor.sequence_parallel:
        found["sequence-parallel"] = None
    if layout.tp_size > 1 and tensor.sequence_parallel != tensor.regather:
        unsaid.append(
            f"tensor.regather={str(tensor.regather).lower()}: with --sequence-parallel it always gathers a block's input again "
            f"in the backward pass, without it never"
        )
    return found


def _zero(recipe: Recipe, unsaid: list[str]) -> Arguments:
    zero, replicas = recipe.config.zero, recipe.layout.dp_replicate_size
    found: Arguments = {}
    if zero.stage >= 1:
        found["use-distributed-optimizer"] = None
        if replicas > 1:
            found["num-distributed-optimizer-instances"] = str(replicas)
    # beside a pipeline stage 2 reduces once an update, here and there: what the distributed optimizer does
    if zero.stage == 3 or (zero.stage == 2 and recipe.layout.pp_size == 1):
        found |= {
            "use-megatron-fsdp": None,
            "data-parallel-sharding-strategy": SHARDING[zero.stage],
            "ckpt-format": "fsdp_dtensor",
        }
    if not zero.fp32_reduction:
        found["grad-reduce-in-bf16"] = None
    if zero.offload.optimizer is Offload.cpu:
        found["optimizer-cpu-offload"] = None
    if zero.offload.parameters is not Offload.none:
        unsaid.append(f"zero.offload.parameters={zero.offload.parameters.value}: parameters stay on the GPU")
    return found


def _context(recipe: Recipe, unsaid: list[str]) -> Arguments:
    attention, cp_size = recipe.config.attention, recipe.layout.cp_size
    if cp_size == 1:
        return {}
    if attention.balance not in ("auto", "zigzag"):
        unsaid.append(f"attention.balance={attention.balance}: tokens are always dealt in zigzag")
    if recipe.attention not in COMM_TYPES:
        unsaid.append(f"attention.name={recipe.attention}: one of p2p, a2a, allgather, a2a+p2p (--cp-comm-type)")
        return {}
    found: Arguments = {"cp-comm-type": COMM_TYPES[recipe.attention]}
    if recipe.attention == "hybrid":
        found |= _hybrid(recipe, unsaid)
    return found


def _hybrid(recipe: Recipe, unsaid: list[str]) -> Arguments:
    attention, cp_size = recipe.config.attention, recipe.layout.cp_size
    if attention.outer != "ring":
        unsaid.append(f"attention.outer={attention.outer}: a2a+p2p has a ring outside")
    if attention.ulysses_size == "auto":
        unsaid.append("attention.ulysses_size=auto: give --hierarchical-context-parallel-sizes <inner> <outer>")
        return {}
    inner = int(attention.ulysses_size)
    return {"hierarchical-context-parallel-sizes": f"{inner} {cp_size // inner}"}


def _pipeline(recipe: Recipe, unsaid: list[str]) -> Arguments:
    pipeline, ranks = recipe.config.pipeline, recipe.layout.pp_size
    if ranks == 1:
        return {}
    if pipeline.schedule not in ("1f1b", "interleaved_1f1b"):
        unsaid.append(
            f"pipeline.schedule={pipeline.schedule}: 1F1B or interleaved 1F1B, by the number of stages a rank"
        )
        return {}
    each = stages_per_rank(pipeline)
    if recipe.model is None:
        return {"num-virtual-stages-per-pipeline-rank": str(each)} if each > 1 else {}
    ranges = layers_of_stages(pipeline, model_config=recipe.model, stages=ranks * each)
    return {"pipeline-model-parallel-layout": f"'{layer_layout([last - first for first, last in ranges])}'"}


def layer_layout(counts: list[int]) -> str:
    """Of --pipeline-model-parallel-layout: E embedding, t a layer, L head and loss, | between stages, lowest first."""
    return "E" + "|".join(f"t*{count}" for count in counts) + "L"


def _activation(recipe: Recipe, unsaid: list[str]) -> Arguments:
    activation = recipe.config.activation
    if activation.checkpointing is Checkpointing.none:
        return {}
    if activation.checkpointing is Checkpointing.selective:
        unsaid.append(
            "activation.checkpointing=selective: here all but attention is computed again; its own keeps attention's inputs too"
        )
        return {"recompute-granularity": "selective", "recompute-modules": "layernorm mlp"}
    stretch = activation.every_n if activation.checkpointing is Checkpointing.every_n else 1
    if stretch is None:
        unsaid.append("activation.every_n=null: give --recompute-num-layers, about the root of a stage's layers")
    size: Arguments = {"recompute-num-layers": str(stretch)} if stretch else {}
    return {"recompute-granularity": "full", "recompute-method": "uniform"} | size


def _batch(recipe: Recipe, unsaid: list[str]) -> Arguments:
    config = recipe.config
    found: Arguments = {
        "seq-length": str(config.seq_len),
        "micro-batch-size": str(config.micro_batch_size),
        "global-batch-size": str(config.global_batch_size),
        "seed": str(config.seed),
        "distributed-timeout-minutes": str(max(1, round(config.cluster.timeout / 60))),
    }
    if config.max_steps is not None:
        found["train-iters"] = str(config.max_steps)
    if config.precision is Precision.bf16:
        found |= {"bf16": None}
    return found


def _optimiser(recipe: Recipe, unsaid: list[str]) -> Arguments:
    optim = recipe.config.optim
    found: Arguments = {"optimizer": "adam" if optim.name == "adamw" else "sgd", "lr": str(optim.learning_rate)}
    if optim.name == "adamw":
        found |= {
            "adam-beta1": str(optim.adam_beta1),
            "adam-beta2": str(optim.adam_beta2),
            "adam-eps": str(optim.adam_epsilon),
        }
    else:
        found["sgd-momentum"] = str(optim.momentum)
    found |= {
        "weight-decay": str(optim.weight_decay),
        "clip-grad": str(optim.max_grad_norm),
        "lr-decay-style": DECAYS[optim.lr_scheduler_type],
        "lr-warmup-iters": str(optim.warmup_steps),
        "min-lr": f"{optim.min_lr_ratio * optim.learning_rate:.6g}",
    }
    if optim.lr_scheduler_type == "wsd":
        found["lr-wsd-decay-style"] = "linear"
        if optim.decay_steps is not None:
            found["lr-wsd-decay-iters"] = str(optim.decay_steps)
    return found


def _model(recipe: Recipe, unsaid: list[str]) -> Arguments:
    model = recipe.model
    if model is None:
        unsaid.append(f"the model's own sizes: model.path={recipe.config.model.path} is not within reach")
        return {}
    if model.model_type != "llama":
        unsaid.append(f"the model's own sizes: written for model_type=llama, and this one is {model.model_type}")
        return {}
    return _llama(model, unsaid)


def _llama(model: Any, unsaid: list[str]) -> Arguments:
    found: Arguments = {
        "num-layers": str(model.num_hidden_layers),
        "hidden-size": str(model.hidden_size),
        "ffn-hidden-size": str(model.intermediate_size),
        "num-attention-heads": str(model.num_attention_heads),
        "group-query-attention": None,
        "num-query-groups": str(model.num_key_value_heads),
        "kv-channels": str(head_dim(model)),
        "max-position-embeddings": str(model.max_position_embeddings),
        "normalization": "RMSNorm",
        "swiglu": None,
        "disable-bias-linear": None,
        "position-embedding-type": "rope",
    }
    if not model.tie_word_embeddings:
        found["untie-embeddings-and-output-weights"] = None
    rope = getattr(model, "rope_parameters", None) or {}
    if "rope_theta" in rope:
        found["rotary-base"] = str(int(rope["rope_theta"]))
    if rope.get("rope_type", "default") == "llama3":
        found |= {"use-rope-scaling": None, "rope-scaling-factor": str(rope["factor"])}
    elif rope.get("rope_type", "default") != "default":
        unsaid.append(f"rope_type={rope['rope_type']} of the model")
    if hasattr(model, "rms_norm_eps"):
        found["norm-epsilon"] = str(model.rms_norm_eps)
    else:
        unsaid.append("rope and the norms' epsilon: of a model that is not on this disk only the sizes are known")
    return found
