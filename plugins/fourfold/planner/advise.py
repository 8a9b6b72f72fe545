"""The scaling guide as code: which layout a model, a number of GPUs and a length ask for, and why. Imports no torch.

The guide (CS231N lecture 11, 2025 and 2026, and Llama 3, arXiv:2407.21783 section 3.3.2): data parallelism to about 128 GPUs
and 1B parameters; ZeRO-3 (FSDP) above; activation checkpointing when activations do not fit; HSDP above 256 GPUs; context,
pipeline and tensor parallelism above 1K GPUs, 50B parameters or 16K tokens, the last inside a server; and the batch is a
budget of rows that pipelines and data ranks both spend.

It is a walk, not a search for the fastest: layouts are tried in the guide's order (`ladder`), and the first that is legal,
keeps to the budget and fits the memory is taken. Step times are not compared.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from math import inf
from typing import Any

from fourfold import legality
from fourfold.layout import Layout, largest_divisor
from fourfold.pipeline.schedules import stages_per_rank
from fourfold.planner.fit import RankBytes, rank_bytes
from fourfold.planner.parameters import parameter_count
from fourfold.planner.passes import gathered_work, micro_batches
from fourfold.schema import Checkpointing, TrainConfig
from fourfold.tensor.cuts import legal_sizes

DP_GPUS, DP_PARAMETERS = 128, 1e9  # plain data parallelism up to
HSDP_GPUS = 256  # replicas above
ND_GPUS, ND_PARAMETERS, ND_TOKENS = 1024, 50e9, 16384  # context, pipeline and tensor parallelism above
TOKENS_A_RANK = 8192  # of a row: what Llama 3 leaves each context rank
SERVER = 8  # GPUs
BATCH_TOKENS, LARGE_BATCH_TOKENS = 2**22, 2**24  # OLMo's 4M; Llama 3 405B's 16M, above ND_PARAMETERS
MOST_CONTEXT, MOST_PIPELINE = 64, 64  # ranks; the longest published are 16 and 64
IDLE = 0.1  # of a pipeline's time above which two stages a rank are taken
POWERS = tuple(2**power for power in range(7))


@dataclass(frozen=True, kw_only=True)
class Question:
    model: Any  # Hugging Face config, or what planner/shapes.py makes
    gpus: int
    seq_len: int
    batch_tokens: int | None = None  # of an update; None: the guide's
    gpu_gb: float = 80  # of 1e9 bytes

    def __post_init__(self) -> None:
        for name in ("gpus", "seq_len", "gpu_gb", "batch_tokens"):
            value = getattr(self, name)
            if value is not None and not 0 < value < inf:
                raise ValueError(f"--{name.replace('_', '-')} {value}: use more than 0.")

    @property
    def parameters(self) -> int:
        return parameter_count(self.model)

    @property
    def node(self) -> int:
        """GPUs of a server; all servers have equally many."""
        return largest_divisor(self.gpus, at_most=SERVER)

    @property
    def rows(self) -> int:
        """The budget of an update, at least one."""
        default = LARGE_BATCH_TOKENS if self.parameters > ND_PARAMETERS else BATCH_TOKENS
        return max(1, (self.batch_tokens or default) // self.seq_len)

    @property
    def has_dropout(self) -> bool:
        """In attention: what no rank that shares a row or a model with others computes (context/select.py)."""
        return bool(getattr(self.model, "attention_dropout", None))

    @property
    def is_long(self) -> bool:
        return self.seq_len > ND_TOKENS

    @property
    def is_large(self) -> bool:
        """Too large for data parallelism and ZeRO alone; for length there is context parallelism."""
        return self.parameters > ND_PARAMETERS or self.gpus > ND_GPUS


@dataclass(frozen=True, kw_only=True)
class Advice:
    question: Question
    config: TrainConfig
    layout: Layout
    memory: RankBytes
    fits: bool
    in_budget: bool
    passed: list[str] = field(default_factory=list)  # why simpler layouts were not taken, once each


@dataclass(frozen=True, kw_only=True)
class Rung:
    """Degrees to try; the data ranks are the rest of the GPUs, in shard groups of `shard` (None: all in one)."""

    tp: int = 1
    cp: int = 1
    pp: int = 1
    stage: int = 3
    shard: int | None = None

    def layout(self, gpus: int) -> Layout | None:
        data, over = divmod(gpus, self.tp * self.cp * self.pp)
        shard = 1 if self.stage == 0 else min(self.shard or data, data)
        if over or data % shard:
            return None
        return Layout(
            tp_size=self.tp, cp_size=self.cp, pp_size=self.pp, dp_shard_size=shard, dp_replicate_size=data // shard
        )


def advise(question: Question) -> Advice:
    """The first rung that is legal, within the batch and fits; else the one nearest to fitting, within the batch if any is."""
    found = list(_until_one_fits(question, in_budget=True))
    if not any(one.fits for one in found):
        found += _until_one_fits(question, in_budget=False)
    if not found:
        raise ValueError(f"No layout of {question.gpus} GPUs is legal for this model and {question.seq_len} tokens.")
    best = min(found, key=lambda one: (not one.fits, not one.in_budget, one.memory.total))
    return replace(best, passed=_passed(found, taken=best))


def ladder(question: Question) -> Iterator[Rung]:
    """Rungs in the guide's order."""
    contexts, tensors = context_sizes(question), tensor_sizes(question)
    if not question.is_large:
        for cp, tp in product(contexts, tensors):
            # beside tensor parallelism ZeRO-1: whole weights are cut already, and gathers would be added to its own
            yield from (
                _sharded(question, cp=cp) if tp == 1 else [Rung(tp=tp, cp=cp, stage=1), Rung(tp=tp, cp=cp, stage=3)]
            )
    for tp, cp, pp in product(reversed(tensors), contexts, pipeline_sizes(question)):
        yield Rung(tp=tp, cp=cp, pp=pp, stage=1)
    for tp, cp in product(reversed(tensors), contexts):
        yield Rung(tp=tp, cp=cp, stage=3)


def _sharded(question: Question, *, cp: int) -> Iterator[Rung]:
    """ZeRO alone."""
    if question.parameters <= DP_PARAMETERS and question.gpus <= DP_GPUS and cp == 1:
        yield from (Rung(stage=stage) for stage in (0, 1, 2))
    if question.gpus > HSDP_GPUS:
        servers = (question.node * power for power in POWERS)
        yield from (Rung(cp=cp, stage=3, shard=max(1, size // cp)) for size in servers if size < question.gpus)
    yield Rung(cp=cp, stage=3)


def context_sizes(question: Question) -> list[int]:
    """Up from the fewest ranks that leave each a published number of tokens; none for rows of the usual length at first."""
    least = -(-question.seq_len // TOKENS_A_RANK) if question.is_long else 1
    if question.has_dropout:
        return [1]
    legal = [size for size in POWERS if question.gpus % size == 0 and 2 * size <= question.seq_len]
    return [size for size in legal if least <= size <= MOST_CONTEXT] or legal[-1:]


def tensor_sizes(question: Question) -> list[int]:
    """Inside a server, and within the heads and the MLP."""
    most = 1 if question.has_dropout else question.node
    return [size for size in legal_sizes(question.model, up_to=most) if question.node % size == 0]


def pipeline_sizes(question: Question) -> list[int]:
    most = 1 if question.has_dropout else min(MOST_PIPELINE, question.model.num_hidden_layers)
    return [size for size in POWERS if size <= most]


def _until_one_fits(question: Question, *, in_budget: bool) -> Iterator[Advice]:
    for rung, checkpointing in product(ladder(question), (Checkpointing.none, Checkpointing.full)):
        layout = rung.layout(question.gpus)
        config = layout and _config(
            question, layout=layout, rung=rung, checkpointing=checkpointing, in_budget=in_budget
        )
        if not layout or not config:
            continue
        memory = memory_of(config, layout=layout, model_config=question.model)
        fits = memory.fits(question.gpu_gb * 1e9)
        if fits:
            config, memory = _filled(question, config=config, layout=layout, memory=memory)
        yield Advice(question=question, config=config, layout=layout, memory=memory, fits=fits, in_budget=in_budget)
        if fits:
            return


def memory_of(config: TrainConfig, *, layout: Layout, model_config: Any) -> RankBytes:
    work = gathered_work(config, layout=layout, model_config=model_config)
    return rank_bytes(config, layout=layout, model_config=model_config, work=work)


def _config(
    question: Question, *, layout: Layout, rung: Rung, checkpointing: Checkpointing, in_budget: bool
) -> TrainConfig | None:
    """The settings of a rung with as many rows as the budget allows, or where it allows none the fewest that are legal; None
    if none are."""
    unit = layout.data_size * layout.pp_size  # as many micro-batches as pipeline ranks, at least
    if (question.rows >= unit) != in_budget:
        return None
    batch = max(1, question.rows // unit) * unit
    config = TrainConfig(name="advice", max_steps=1, seq_len=question.seq_len, global_batch_size=batch)
    for axis in ("tp", "cp", "pp", "dp_shard", "dp_replicate"):
        setattr(config, f"{axis}_size", layout.size(axis))
    config.zero.stage, config.activation.checkpointing, config.data.path = rung.stage, checkpointing, "docs.jsonl"
    if idle(config, layout) > IDLE and question.model.num_hidden_layers >= 2 * layout.pp_size:
        config.pipeline.schedule = "interleaved_1f1b"
    return None if legality.refusals(config, world_size=question.gpus) else config


def idle(config: TrainConfig, layout: Layout) -> float:
    """(p-1) / (V m + p-1), of p ranks, V stages a rank and m micro-batches (arXiv:2104.04473 section 2.2)."""
    extra = layout.pp_size - 1
    return extra / (stages_per_rank(config.pipeline) * micro_batches(config, layout=layout) + extra)


def _filled(
    question: Question, *, config: TrainConfig, layout: Layout, memory: RankBytes
) -> tuple[TrainConfig, RankBytes]:
    """Always fill the memory: micro-batches twice as large while they fit; not in a pipeline, which is idle for want of them."""
    while layout.pp_size == 1 and config.global_batch_size % (2 * config.micro_batch_size * layout.data_size) == 0:
        config.micro_batch_size *= 2
        larger = memory_of(config, layout=layout, model_config=question.model)
        if not larger.fits(question.gpu_gb * 1e9):
            config.micro_batch_size //= 2
            break
        memory = larger
    return config, memory


def _passed(tried: list[Advice], *, taken: Advice) -> list[str]:
    """Of the layouts before the one that is taken: the last without and the last with recomputation."""
    before = [one for one in tried if one is not taken]
    text = []
    for mode in (Checkpointing.none, Checkpointing.full):
        failed = [one for one in before if one.config.activation.checkpointing is mode]
        if failed:
            last = failed[-1]
            what = f"{last.layout.describe()}, zero {last.config.zero.stage}"
            text.append(f"{what}, activation={mode.value} would hold {last.memory.total / 1e9:,.0f} GB a GPU")
    return text
