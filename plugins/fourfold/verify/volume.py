"""Bytes that a rank has to send in an update, by the formulas that the strategies give of themselves."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fourfold.activation.stretches import stretch_sizes
from fourfold.context import select
from fourfold.context.needed_only import NeededOnly, exchange, exchanged_bytes
from fourfold.context.sharding import Sharding
from fourfold.layout import Layout
from fourfold.model.chunk import default_chunk
from fourfold.pipeline.cost import bytes_to_send
from fourfold.pipeline.cut import Cut
from fourfold.planner.flops import windowed_layers
from fourfold.planner.parameters import SANDWICH_NORMS
from fourfold.planner.passes import FP32, attention_shape
from fourfold.planner.passes import MicroBatch as Plan
from fourfold.planner.traffic import embedding_elements, tensor_shape
from fourfold.schema import Checkpointing, TrainConfig
from fourfold.tensor.cost import sent_bytes
from fourfold.zero.cost import keeps_all
from fourfold.zero.cost import sent_bytes as zero_bytes

SHARDS = "dp_shard x cp"


@dataclass(frozen=True)
class MicroBatch:
    """What of it the bytes depend on."""

    labels: Tensor  # [B, S/cp] of this rank
    sharding: Sharding | None  # None where no row is spread


@dataclass(frozen=True, kw_only=True)
class Volume:
    """Of one rank."""

    config: TrainConfig
    model_config: Any
    layout: Layout
    rank: int
    micro_batches: list[MicroBatch]  # of the last update
    updates: int  # of the run
    parameters: list[
        list[int]
    ]  # elements of each that the rank holds before ZeRO shares them, by the optimizer's groups

    def planned(self) -> dict[str, int]:
        """Bytes of an update by axis; an axis is left out where no formula is exact for this recipe."""
        found = {"pp": self._borders()} if self.layout.pp_size > 1 else {}
        if self.layout.tp_size > 1:
            found["tp"] = sum(self._tensor(one) for one in self.micro_batches)
        if (
            self.layout.cp_size > 1
            and select.strategy_class(self.config, model_config=self.model_config) in select.BY_BYTES
        ):
            found["cp"] = sum(self._context(one) for one in self.micro_batches)
        return found | self._zero()

    def _zero(self) -> dict[str, int]:
        sent = zero_bytes(
            self.parameters,
            zero=self.config.zero,
            precision=self.config.precision,
            ranks=self.layout.partition_size,
            replicas=self.layout.dp_replicate_size,
            micro_batches=len(self.micro_batches),
            pp_size=self.layout.pp_size,
            embedding=embedding_elements(self.model_config, layout=self.layout) if self._cut.first else 0,
        )
        found = {"dp_replicate": sent.get("replicas", 0)}
        if self.config.zero.stage < 3 or self._gathers_by_formula():
            found[SHARDS] = sent.get("gradients", 0) + sent.get("weights", 0)
        return found

    def _gathers_by_formula(self) -> bool:
        """Whether zero/cost.py is exact for ZeRO-3's weights."""
        if self.layout.pp_size > 1:
            return self.config.activation.checkpointing is Checkpointing.none
        seen = (self.updates - 1) * len(self.micro_batches) >= 2  # the order of the modules, by DeepSpeed
        return seen and keeps_all(self.parameters, zero=self.config.zero)

    @property
    def _cut(self) -> Cut:
        """Stages of this rank, all of the model without a pipeline."""
        if self.layout.pp_size == 1:
            return Cut([0], [(0, self.model_config.num_hidden_layers)], 1)
        member = self.layout.coordinate(self.rank)["pp"]
        return Cut.of(self.config.pipeline, model_config=self.model_config, rank=member, ranks=self.layout.pp_size)

    def _borders(self) -> int:
        between = Plan.of(self.config, layout=self.layout).between
        sent = bytes_to_send(
            self.config.pipeline,
            rank=self.layout.coordinate(self.rank)["pp"],
            ranks=self.layout.pp_size,
            micro_batches=len(self.micro_batches),
            hidden_bytes=between * self.model_config.hidden_size * FP32,
        )
        return sum(sent.values())

    def _tensor(self, one: MicroBatch) -> int:
        shape = tensor_shape(self.config, layout=self.layout, model_config=self.model_config)
        activation, cut = self.config.activation, self._cut
        stretches = sum(
            len(stretch_sizes(last - first, checkpointing=activation.checkpointing, every_n=activation.every_n))
            for first, last in cut.layers
        )
        layers = sum(last - first for first, last in cut.layers)
        sent = sent_bytes(shape, layers=layers, losses=sum(self._losses(one.labels)), stretches=stretches)
        if self.model_config.model_type in SANDWICH_NORMS:  # a norm follows the sum at the end of a stretch
            sent["behind"] = stretches * (shape.gather if shape.sequence_parallel else shape.all_reduce)
        absent = [*([] if cut.first else ["embedding"]), *([] if cut.last else ["loss"])]
        return sum(count for purpose, count in sent.items() if not purpose.startswith(tuple(absent)))

    def _losses(self, labels: Tensor) -> Iterator[int]:
        """Tokens of each chunk of the loss that has a label."""
        words = -(-self.model_config.vocab_size // self.layout.tp_size)
        size = self.config.loss.chunk_size or default_chunk(
            labels.numel(), vocabulary=words, hidden=self.model_config.hidden_size
        )
        for chunk in labels.flatten().split(size):
            if (chunk >= 0).any():
                yield chunk.numel()

    def _context(self, one: MicroBatch) -> int:
        kind = select.strategy_class(self.config, model_config=self.model_config)
        member = self.layout.coordinate(self.rank)["cp"]
        shape = attention_shape(self.config, layout=self.layout, model_config=self.model_config)
        options = select.options(self.config.attention)
        windows = [window for first, last in self._cut.layers for window in self._windows()[first:last]]
        again = 1 if self.config.activation.checkpointing is Checkpointing.none else 2
        total = 0
        for window in windows:
            if kind is NeededOnly:
                assert one.sharding is not None
                plan = [exchange(row, rank=member, window=window) for row in one.sharding.rows]
                sent = exchanged_bytes(plan, shape=shape)
            else:
                sent = kind.sent_bytes(shape, cp_size=self.layout.cp_size, rank=member, options=options)
            total += sum(n if name.endswith("_backward") else again * n for name, n in sent.items())
        return total

    def _windows(self) -> list[int | None]:
        """Of each layer."""
        kinds = getattr(self.model_config, "layer_types", None)
        count, window = self.model_config.num_hidden_layers, getattr(self.model_config, "sliding_window", None)
        if kinds:
            return [window if kind == "sliding_attention" else None for kind in kinds]
        return [window if windowed_layers(self.model_config) else None] * count
