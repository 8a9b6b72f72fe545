"""Every key a user may set, with its type and default. Registered with Hydra as `schema/train` and `schema/<group>`.

Sizes and lengths are counts (GPUs, tokens, rows); times are seconds. Values are overridden in this order:
command line > debug > task > tier > train.yaml > group file > the defaults here.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from omegaconf import MISSING


class Precision(StrEnum):
    fp32 = "fp32"
    bf16 = "bf16"  # bf16 weights and activations, fp32 master weights, moments, gradient sums
    fp16 = "fp16"  # always refused, with the reason (legality.py)


class Offload(StrEnum):
    none = "none"
    cpu = "cpu"
    nvme = "nvme"  # always refused, with the reason (legality.py)


class Checkpointing(StrEnum):
    none = "none"
    full = "full"
    every_n = "every_n"
    selective = "selective"


class SourceKind(StrEnum):
    text = "text"  # local files, one document each
    jsonl = "jsonl"  # one JSON object a line
    parquet = "parquet"
    csv = "csv"  # with a header; *.tsv is separated by tabs
    datasets = "datasets"  # anything datasets.load_dataset or load_from_disk takes


class Packing(StrEnum):
    best_fit = "best_fit"  # documents whole, each in the row that it fills best
    concat = "concat"  # one after the other, cut where a row ends
    none = "none"  # one document a row


class LongDocuments(StrEnum):
    """What becomes of a document of more than seq_len tokens."""

    split = "split"  # type: ignore[assignment]  # hides str.split; rows of its own, nothing is lost
    truncate = "truncate"  # its first seq_len tokens
    drop = "drop"  # left out and counted
    error = "error"


class Device(StrEnum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


@dataclass
class RopeScalingConfig:
    """transformers' rope_parameters; unset keys are left out. Example: {rope_type: yarn, factor: 4.0}."""

    rope_type: str | None = None  # linear | dynamic | yarn | longrope | llama3; None: as the model has it
    rope_theta: float | None = None
    factor: float | None = None
    original_max_position_embeddings: int | None = None  # None: the model's max_position_embeddings
    attention_factor: float | None = None  # yarn, longrope
    beta_fast: float | None = None  # yarn
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None
    low_freq_factor: float | None = None  # llama3
    high_freq_factor: float | None = None
    short_factor: list[float] | None = None  # longrope
    long_factor: list[float] | None = None


@dataclass
class ModelConfig:
    path: str = MISSING  # local Hugging Face folder or hub id
    revision: str | None = None
    create: str | None = None  # "tiny_llama": write a small random Llama and tokenizer to `path` if it is not there
    attn_implementation: str = "auto"  # auto | eager | sdpa | flash_attention_2
    rope_scaling: RopeScalingConfig = field(default_factory=RopeScalingConfig)  # written to the export
    max_position_embeddings: int | None = None  # written to the export


@dataclass
class MixtureSource:
    """One entry of data.sources; a key that is not set is that of data itself."""

    path: str = MISSING
    kind: SourceKind | None = None
    pattern: str | None = None
    subset: str | None = None
    split: str | None = None
    text_column: str | None = None
    messages_column: str | None = None
    prompt_column: str | None = None
    completion_column: str | None = None
    input_ids_column: str | None = None
    labels_column: str | None = None
    max_documents: int | None = None
    weight: float | None = None  # share of the rows, relative to the other weights; all sources have one or none
    epochs: float | None = None  # passes over this source in one epoch of the mixture; excludes weights


@dataclass
class DataConfig:
    kind: SourceKind = SourceKind.text
    path: str | None = MISSING  # folder, file, hub id; `stdlib`: the running Python's own; None beside `sources`
    sources: list[MixtureSource] | None = None  # a mixture, instead of `path`
    pattern: str = "**/*"  # kind=text: which files below `path` (`stdlib` too)
    subset: str | None = None  # kind=datasets: configuration name
    split: str = "train"
    # a row's columns, the first kind that it has: messages, prompt and completion, input_ids, text
    text_column: str = "text"
    messages_column: str = "messages"
    prompt_column: str = "prompt"
    completion_column: str = "completion"  # what is to be learned; the prompt is not
    input_ids_column: str = "input_ids"  # tokens already; no bos or eos is added
    labels_column: str = "labels"  # beside input_ids, as long, not shifted: the token itself, or -100
    packing: Packing = Packing.best_fit
    long_documents: LongDocuments = LongDocuments.split
    streaming: bool = False  # never hold the data set; needs max_steps and no num_epochs, holds out its first documents
    max_documents: int | None = None  # blank ones not counted
    eval_path: str | None = None  # same kind, its own documents
    eval_documents: int = 0  # this many documents are held out, chosen by seed; excludes eval_path and sources
    num_proc: int | None = None  # tokenising processes; None: one


@dataclass
class OptimConfig:
    name: str = "adamw"  # adamw | sgd
    learning_rate: float = 2e-5
    weight_decay: float = 0.1  # on matrices only, never on norms and biases
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_epsilon: float = 1e-8
    momentum: float = 0.0  # sgd
    max_grad_norm: float = 1.0  # 0: no clipping; the norm is reported all the same
    lr_scheduler_type: str = "cosine"  # linear | cosine | constant | wsd
    warmup_steps: int = 0
    decay_steps: int | None = None  # wsd: length of the final decay; None: a tenth of the run
    min_lr_ratio: float = 0.0  # cosine and wsd: lowest rate / learning_rate


@dataclass
class OffloadConfig:
    optimizer: Offload = Offload.none
    parameters: Offload = Offload.none  # stage 3 only


@dataclass
class ZeroConfig:
    """DeepSpeed's own key names where there is one, so that its documentation applies."""

    stage: int = 2  # 0 needs dp_shard_size=1
    reduce_bucket_size: int = 50_000_000  # elements
    allgather_bucket_size: int = 500_000_000  # elements, stages 1 and 2
    overlap_comm: bool = True  # inert on CPU
    stage3_param_persistence_threshold: int = 0  # elements; parameters up to this size stay whole on every rank
    stage3_prefetch_bucket_size: int = 50_000_000
    stage3_max_live_parameters: int = 1_000_000_000
    stage3_max_reuse_distance: int = 1_000_000_000
    stage3_module_granularity_threshold: int = 0
    fp32_accumulation: bool = True  # bf16: sum gradients over micro-batches in fp32
    fp32_reduction: bool = True  # bf16: reduce gradients between ranks in fp32
    offload: OffloadConfig = field(default_factory=OffloadConfig)


@dataclass
class AttentionConfig:
    """How the ranks of a cp group compute attention over one row."""

    name: str = "auto"  # auto | local | ulysses | ring | allgather | hybrid | needed_only, or a plugin's
    _target_: str | None = None  # class of the strategy; None: the one that sends the fewest bytes
    balance: str = "auto"  # who holds which tokens: auto | zigzag | greedy | per_document | contiguous
    ulysses_size: str = "auto"  # hybrid: ranks that heads are split over; auto: as many as the key heads allow
    outer: str = "ring"  # hybrid: ring | allgather over the rest


@dataclass
class PipelineConfig:
    """Pipeline parallelism (pp_size > 1). An update's micro-batches are those of the schedule."""

    schedule: str = "1f1b"  # gpipe | 1f1b | looped_bfs | interleaved_1f1b | zero_bubble | zbv | dualpipe_v
    virtual_stages: int | None = None  # a rank; None: 1, or 2 for schedules that loop or go in a V
    split: list[int] | None = None  # layers of each stage; None: balanced, head and embedding counted


@dataclass
class TensorConfig:
    """Tensor parallelism (tp_size > 1)."""

    sequence_parallel: bool = True  # norms and residuals on a part of the tokens each; as many bytes, fewer activations
    overlap: bool = (
        True  # weight gradients computed beside the input gradients' collective; without effect at zero.stage=3
    )
    regather: bool = False  # keep a part of each block's input and gather it again in the backward pass
    plan: dict[str, str] = field(
        default_factory=dict
    )  # {module pattern: style}, for layers that transformers' table lacks


@dataclass
class ActivationConfig:
    checkpointing: Checkpointing = Checkpointing.none
    every_n: int | None = None  # layers in one recomputed stretch; None: round(sqrt(layers))


@dataclass
class TrackerConfig:
    report_to: list[str] = field(default_factory=list)  # names that accelerate knows: tensorboard, wandb, mlflow, ...
    project: str = "fourfold"
    init_kwargs: dict[str, Any] = field(default_factory=dict)  # by tracker name


@dataclass
class ClusterConfig:
    device: Device = Device.auto
    gpus_per_node: int = 8
    ranks_per_row: int = 8  # ranks that a row is spread over: cp_size of tier=long_context, tp_size of tensor
    shrunken: bool = (
        False  # sizes that a recipe writes as ${ranks:8} become 2 (config.py): nd layouts on a few CPU processes
    )
    accelerator: str | None = None  # name in planner/hardware.csv for MFU; None: asked from the device
    timeout: float = 1800.0  # of a collective


@dataclass
class LossConfig:
    chunk_size: int | None = None  # tokens whose logits exist at one time; None: torch chooses


@dataclass
class TrainConfig:
    name: str = MISSING  # of the run
    output_dir: str = "runs/${name}"
    cache_dir: str = "~/.cache/fourfold"
    seed: int = 0
    precision: Precision = Precision.bf16

    # layout: GPUs along each axis; one data size may be -1, the rest
    tp_size: int = 1
    cp_size: int = 1
    pp_size: int = 1
    dp_shard_size: int = -1
    dp_replicate_size: int = 1

    # batch, in rows of seq_len tokens; gradient accumulation follows from these and the layout
    seq_len: int = 2048
    global_batch_size: int = 8
    micro_batch_size: int = 1

    # length
    max_steps: int | None = None
    num_epochs: float | None = None
    eval_every: int = 0  # updates; 0: at the end only (when there is evaluation data)
    save_every: int = 0  # updates; 0: at the end only
    save_async: bool = False  # go on while the disk writes; holds the saved state once more in host memory
    keep_last: int | None = 2  # newest checkpoints kept; None: all
    keep_every: int | None = None  # updates; checkpoints at multiples of it are kept for ever
    max_time: float | None = None  # seconds since the launch after which the run has saved and ended
    log_every: int = 1
    resume: str = "none"  # none | auto (newest sound checkpoint of output_dir, else from the model) | path of one
    overwrite: bool = False  # start afresh in an output folder that holds another run
    export: bool = True  # write a Hugging Face folder at the end
    export_dtype: str | None = None  # bfloat16 | float32 | float16; None: the dtype of the model that was brought

    loss: LossConfig = field(default_factory=LossConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    zero: ZeroConfig = field(default_factory=ZeroConfig)
    tensor: TensorConfig = field(default_factory=TensorConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    activation: ActivationConfig = field(default_factory=ActivationConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
