"""What one rank of a verified layout does: the path of a training run, with what it computes written down on the way."""

import os
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from fourfold import legality
from fourfold.checkpoint.save import Progress
from fourfold.context import select
from fourfold.context.attention import IMPLEMENTATION, register
from fourfold.data.loader import Loader
from fourfold.log import Reporter
from fourfold.loop import TrainingLoop
from fourfold.mesh import Mesh, build_mesh
from fourfold.model.build import build_on_meta
from fourfold.model.source import attention_implementation, read_config
from fourfold.model.weights import Weights
from fourfold.parallelize import parallelize
from fourfold.pipeline.measure import PointToPoint
from fourfold.schema import Offload, TrainConfig
from fourfold.slices import Slice
from fourfold.tensor.group import TensorGroup
from fourfold.verify.rows import KnownRows, key_of
from fourfold.verify.volume import SHARDS, MicroBatch, Volume
from fourfold.zero.engine import ZeroEngine
from fourfold.zero.measure import DataAxes
from fourfold.zero.optimizer import dimensions

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Piece:
    """Elements [start, start + len(values)) of the flattened `part` of a tensor, as one rank has them."""

    name: str
    part: Slice
    start: int
    values: NDArray[np.float32]
    stored: bool  # by this rank; False for a copy that another one stores


@dataclass
class Seen:
    """Of one update on one rank."""

    keys: list[list[bytes]] = field(default_factory=list)  # of the rows of each micro-batch
    losses: list[float] = field(default_factory=list)  # of each micro-batch: the sum over this rank's tokens
    gradients: list[Piece] | None = None  # None where they are out of reach (offload)
    after: list[Piece] = field(default_factory=list)  # weights
    norm: float = float("nan")
    sent: dict[str, int] = field(default_factory=dict)  # bytes, by axis
    reported: dict[str, Any] = field(default_factory=dict)  # by the main rank, as a run would


@dataclass
class Result:
    """Of one rank."""

    coordinate: dict[str, int]
    updates: list[Seen]
    planned: dict[str, int]  # bytes of an update by axis, where there is a formula


def verified_run(rank: int, *, config: TrainConfig, rows: Path, updates: int) -> Result:
    """`updates` epochs of the rows through the training loop."""
    torch.set_num_threads(1)
    model_config = read_config(Path(config.model.path), model=config.model)
    attention = attention_implementation(model_config, model=config.model)
    if select.is_ours(config, model_config=model_config, device=CPU):
        attention = IMPLEMENTATION
        register()
    layout = legality.check(
        config, world_size=dist.get_world_size(), model_config=model_config, attn_implementation=attention
    )
    mesh = build_mesh(layout, device_type="cpu")
    model = build_on_meta(model_config, dtype=torch.float32, attn_implementation=attention)
    if config.tp_size > 1:
        legality.check_layers(config, model=model)
    engine = parallelize(model, Weights(Path(config.model.path)), config=config, mesh=mesh, device=CPU)
    split = select.splitter(config, model_config=model_config, group=mesh.axis_groups["cp"], device=CPU)
    watched = Watched(engine, config=config, mesh=mesh, split=split)
    known = KnownRows.load(rows)
    loader = Loader(
        known,
        seed=config.seed,
        global_batch_size=config.global_batch_size,
        micro_batch_size=config.micro_batch_size,
        data_rank=mesh.data_rank,
        data_size=layout.data_size,
        pad_id=0,
    )
    loop = TrainingLoop(
        config=config,
        engine=cast(ZeroEngine, watched),
        mesh=mesh,
        device=CPU,
        model_config=model_config,
        split=watched.split,
        learning_rate=lambda step: config.optim.learning_rate,
        reporter=Reporter(enabled=False, total_steps=updates, first_step=0, output_dir=Path(os.devnull)),
        track=watched.note,
        peak_flops=None,
    )
    loop.run(
        loader.updates(0, num_epochs=updates, max_steps=None),
        progress=Progress(),
        saver=cast(Any, None),  # nothing is saved or evaluated: save_every=0, eval_every=0
        evaluate=lambda progress: None,
        started=time.time(),
    )
    volume = Volume(
        config=config,
        model_config=model_config,
        layout=layout,
        rank=rank,
        micro_batches=watched.micro_batches,
        updates=updates,
        parameters=held_groups(engine),
    )
    return Result(layout.coordinate(rank), watched.seen, volume.planned())


class Watched:
    """The engine, and what goes in and comes out."""

    def __init__(self, engine: ZeroEngine, *, config: TrainConfig, mesh: Mesh, split: Any) -> None:
        self._engine, self._mesh, self._split = engine, mesh, split
        self._readable = config.zero.offload.optimizer is Offload.none
        self._now = Seen()
        self._strategies: dict[int, Any] = {}
        self._tensor = next(_tensor_groups(engine.module), None)
        self._zero = self._data_axes()
        self.seen: list[Seen] = []
        self.micro_batches: list[MicroBatch] = []  # of the last update

    def split(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        """Called once for each micro-batch of an update, with whole rows."""
        rows = zip(batch["input_ids"], batch["labels"], strict=True)
        self._now.keys.append([key_of(ids, labels) for ids, labels in rows])
        part: dict[str, Any] = self._split(batch)
        context = part.get("context")
        if context is not None:
            self._strategies[id(context.strategy)] = context.strategy
        self.micro_batches.append(MicroBatch(part["labels"], context.sharding if context else None))
        return part

    def forward_backward(self, micro_batches: list[dict[str, Any]], *, targets: int) -> Tensor:
        self.micro_batches = self.micro_batches[-len(micro_batches) :]
        before = self._counted()
        self._zero = self._data_axes()
        with PointToPoint(self._mesh.axis_groups["pp"]) as borders, self._zero:
            losses = self._engine.forward_backward(micro_batches, targets=targets)
        sent = {name: count - before[name] for name, count in self._counted().items()}
        self._now.sent = {**sent, "pp": sum(borders.sent.values())}
        self._now.losses = losses.double().tolist()
        if self._readable:
            self._now.gradients = self._pieces(self._engine.gradients())
        return losses

    def step(self, *, learning_rate: float) -> float:
        with self._zero:
            norm = self._now.norm = self._engine.step(learning_rate=learning_rate)
        self._now.sent |= self._zero.sent
        self._now.after = self._pieces(self._engine.masters())
        self.seen.append(self._now)
        self._now = Seen()
        return norm

    def note(self, metrics: dict[str, Any], step: int) -> None:
        """What the main rank tells of the update that has just ended."""
        self.seen[-1].reported = metrics

    def _data_axes(self) -> DataAxes:
        return DataAxes({SHARDS: self._mesh.shard_group, "dp_replicate": self._mesh.replicate_group})

    def _counted(self) -> dict[str, int]:
        tensor = self._tensor.sent if self._tensor else Counter[str]()
        tp = sum(count for purpose, count in tensor.items() if not purpose.endswith("calls"))
        return {"tp": tp, "cp": sum(sum(one.sent().values()) for one in self._strategies.values())}

    def _pieces(self, buffers: list[Any]) -> list[Piece]:
        return [
            Piece(one.name, one.part, one.start, one.of(buffers).float().numpy().copy(), one.stored)
            for one in self._engine.fragments()
        ]


def held_groups(engine: ZeroEngine) -> list[list[int]]:
    """Elements of each parameter of this rank, before ZeRO shares them, as the optimizer has them."""
    sizes = [(dimensions(one) > 1, getattr(one, "ds_numel", one.numel())) for one in engine.module.parameters()]
    return [[size for is_matrix, size in sizes if is_matrix is wanted] for wanted in (True, False)]


def _tensor_groups(module: Any) -> Any:
    for one in module.modules():
        found = getattr(one, "tensor", None)
        if isinstance(found, TensorGroup):
            yield found
