"""What one rank holds and computes in a pass of a stage over one micro-batch, of rows of one document each, the dearest
case. Pure formulas; a dry run counts the same on the module itself (dryrun/trace.py), to the byte for models of Llama's kind.
"""

from dataclasses import dataclass
from typing import Any

from fourfold.activation.stretches import stretch_sizes
from fourfold.context.balance import BALANCES
from fourfold.context.work import AttentionShape, Work, alone, gathered, unit
from fourfold.layout import Layout
from fourfold.planner.held import Stage
from fourfold.planner.memory import Cut, layer_elements
from fourfold.planner.parameters import SANDWICH_NORMS, head_dim, query_size
from fourfold.schema import Checkpointing, Precision, TrainConfig
from fourfold.tensor.cuts import Heads, rounded_up

FP32 = 4  # bytes


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """As one rank sees it."""

    rows: int
    tokens: int  # of all rows, on this cp rank
    between: int  # of these, on this tp rank between the blocks
    itemsize: int  # bytes of an activation

    @classmethod
    def of(cls, config: TrainConfig, *, layout: Layout) -> "MicroBatch":
        parts = layout.tp_size if config.tensor.sequence_parallel else 1
        tokens = config.micro_batch_size * (whole_length(config, layout=layout) // layout.cp_size)
        itemsize = FP32 if config.precision is Precision.fp32 else 2
        return cls(rows=config.micro_batch_size, tokens=tokens, between=tokens // parts, itemsize=itemsize)


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One stage, forward and backward."""

    held: int  # bytes from its forward to its backward pass, without those of the head
    head: int  # the same of the head: the loss makes its gradients in its forward pass
    recomputed: int  # bytes more while its backward pass has a stretch of layers again
    model_flops: int  # 6 for each matrix element and token, 12 head_dim for each pair that the mask allows
    flops: int  # with what is computed again


def whole_length(config: TrainConfig, *, layout: Layout) -> int:
    """Tokens of a row, filled up to what the ranks need."""
    parts = layout.tp_size if config.tensor.sequence_parallel else 1
    whole = unit(layout.cp_size, parts=parts)
    return -(-config.seq_len // whole) * whole


def micro_batches(config: TrainConfig, *, layout: Layout) -> int:
    return config.global_batch_size // (config.micro_batch_size * layout.data_size)


def attention_work(
    config: TrainConfig, *, layout: Layout, model_config: Any, cp_rank: int, window: int | None = None
) -> Work:
    """Of one layer. Asks the strategy where there is one."""
    shape = attention_shape(config, layout=layout, model_config=model_config)
    if layout.cp_size == 1:
        return alone(rows=shape.rows, length=shape.length, heads=shape.heads, kv_heads=shape.kv_heads, window=window)
    from fourfold.context.select import options, strategy_class

    return strategy_class(config, model_config=model_config).work(
        shape,
        cp_size=layout.cp_size,
        rank=cp_rank,
        options=options(config.attention),
        balance=config.attention.balance,
        window=window,
    )


def gathered_work(config: TrainConfig, *, layout: Layout, model_config: Any) -> Work:
    """The same of a strategy that gathers keys and values, whichever is set: no more than others hold."""
    shape = attention_shape(config, layout=layout, model_config=model_config)
    return gathered(shape, cp_size=layout.cp_size, rank=0, among=tuple(BALANCES), balance="auto", window=None)


def attention_shape(config: TrainConfig, *, layout: Layout, model_config: Any) -> AttentionShape:
    """Of the heads of one tp rank, rows filled up to what the ranks need."""
    heads = Heads.of(model_config, size=layout.tp_size)
    return AttentionShape(
        rows=config.micro_batch_size,
        length=whole_length(config, layout=layout),
        heads=heads.local,
        kv_heads=heads.local_kv,
        head_dim=heads.head_dim,
        itemsize=FP32 if config.precision is Precision.fp32 else 2,
    )


def stage_pass(
    config: TrainConfig, stage: Stage, *, layout: Layout, model_config: Any, work: Work, tp_rank: int = 0
) -> Pass:
    """`work` is attention_work's."""
    batch = MicroBatch.of(config, layout=layout)
    layer, kept = _layer_bytes(config, layout=layout, model_config=model_config, batch=batch, work=work)
    sizes = stretches(config, stage)
    model, again = _flops(config, stage, layout=layout, model_config=model_config, batch=batch, work=work)
    head, head_flops = _head(stage, layout=layout, model_config=model_config, batch=batch, tp_rank=tp_rank)
    hidden = batch.between * model_config.hidden_size * batch.itemsize
    return Pass(
        held=(len(sizes) * kept if sizes else stage.layers * layer)
        + _outside(config, stage, layout=layout, model_config=model_config, batch=batch, hidden=hidden),
        head=head,
        recomputed=max(sizes) * layer - kept if sizes else 0,
        model_flops=model + head_flops,
        flops=model + head_flops + again,
    )


def stretches(config: TrainConfig, stage: Stage) -> list[int]:
    settings = config.activation
    return stretch_sizes(stage.layers, checkpointing=settings.checkpointing, every_n=settings.every_n)


def _layer_bytes(
    config: TrainConfig, *, layout: Layout, model_config: Any, batch: MicroBatch, work: Work
) -> tuple[int, int]:
    """(what a layer saves, what a recomputed stretch keeps of it). Norms keep a copy of their input and the inverse of its size in
    fp32, attention its log-sum-exp."""
    heads, size = Heads.of(model_config, size=layout.tp_size), head_dim(model_config)
    cut = Cut(layout.tp_size, sequence_parallel=config.tensor.sequence_parallel, regather=config.tensor.regather)
    elements = layer_elements(model_config, seq_len=0, attention="fourfold", tokens=batch.tokens, cut=cut)
    queries, keys = work.queries - batch.tokens * heads.local, work.keys - batch.tokens * heads.local_kv
    elements += queries * (2 * size + 1) + keys * 2 * size + work.again * size
    norms = 4 if model_config.model_type in SANDWICH_NORMS else 2
    wide = norms * batch.between * (model_config.hidden_size + 1) + work.queries
    kept = batch.between * model_config.hidden_size * batch.itemsize
    if config.activation.checkpointing is Checkpointing.selective:
        kept += work.called * (size * batch.itemsize + FP32)
    return elements * batch.itemsize + wide * (FP32 - batch.itemsize), kept


def _outside(
    config: TrainConfig, stage: Stage, *, layout: Layout, model_config: Any, batch: MicroBatch, hidden: int
) -> int:
    """Of the layers: rotary tables, a stage's input and output, which the schedule keeps, ids of a cut embedding, the last norm."""
    recomputes = config.activation.checkpointing is not Checkpointing.none
    rotary = (
        2 * (batch.tokens + batch.rows) * head_dim(model_config) * batch.itemsize
    )  # one position more: the last of all
    found = rotary
    if stage.first and layout.tp_size > 1:
        found += batch.tokens * (8 + 1)  # ids, and which are elsewhere
    if not stage.first and not recomputes and batch.itemsize < FP32:
        found += hidden  # else the first layer keeps it
    if not stage.last:
        return found + hidden
    norm = batch.between * (model_config.hidden_size + 1) * FP32
    return found + hidden + norm


def _head(stage: Stage, *, layout: Layout, model_config: Any, batch: MicroBatch, tp_rank: int) -> tuple[int, int]:
    """(bytes, FLOPs): the gradient of the hidden states, that of the weight in fp32, the loss."""
    if not stage.last:
        return 0, 0
    hidden, vocabulary = model_config.hidden_size, model_config.vocab_size
    ((first, last),) = rounded_up(vocabulary, size=layout.tp_size)[tp_rank]
    table = -(-vocabulary // layout.tp_size) * hidden
    return (
        batch.tokens * hidden * batch.itemsize + table * FP32 + FP32,
        6 * batch.tokens * hidden * (last - first),
    )


def _flops(
    config: TrainConfig, stage: Stage, *, layout: Layout, model_config: Any, batch: MicroBatch, work: Work
) -> tuple[int, int]:
    """(of the layers, of what is computed again: flops.py says what that is)."""
    heads, hidden = Heads.of(model_config, size=layout.tp_size), model_config.hidden_size
    inner = model_config.intermediate_size // layout.tp_size
    queries, keys = query_size(model_config) // layout.tp_size, heads.local_kv * heads.head_dim
    layer = hidden * (2 * queries + 2 * keys + 3 * inner)
    attention = 4 * heads.head_dim * work.pairs
    forward = stage.layers * (2 * batch.tokens * layer + attention)
    sizes = stretches(config, stage)
    spared = 0 if model_config.model_type in SANDWICH_NORMS else hidden * inner
    again = 2 * batch.tokens * (sum(sizes) * layer - len(sizes) * spared)
    if config.activation.checkpointing is not Checkpointing.selective:
        again += sum(sizes) * attention
    return 3 * forward, again
