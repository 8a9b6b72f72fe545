"""Counts for pipeline.py, of a small random Llama: bytes sent over each border, passes in flight, bytes read by each rank."""

import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from common import Team, llama_folder, packed_rows, table

from fourfold.layout import Layout
from fourfold.pipeline.cost import bytes_to_send
from fourfold.pipeline.measure import PointToPoint, reads
from fourfold.pipeline.schedules import stages_per_rank
from fourfold.planner import schedule as simulator
from fourfold.schema import AttentionConfig, PipelineConfig, Precision, TensorConfig, TrainConfig, ZeroConfig

LAYERS, HIDDEN, VOCABULARY, LENGTH, ROWS, MICRO_BATCHES = 8, 256, 1024, 128, 2, 8
FP32 = 4
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Way:
    schedule: str
    layout: Layout
    tensor: TensorConfig = field(default_factory=TensorConfig)
    stage: int = 1

    def config(self) -> TrainConfig:
        sizes = {f"{axis}_size": self.layout.size(axis) for axis in ("tp", "cp", "pp")}
        config = TrainConfig(
            name="bench", precision=Precision.fp32, zero=ZeroConfig(stage=self.stage), tensor=self.tensor, **sizes
        )
        config.pipeline = PipelineConfig(schedule=self.schedule)
        if self.layout.cp_size > 1:
            config.attention = AttentionConfig(name="ring", _target_="fourfold.context.ring.Ring")
        return config

    def describe(self) -> str:
        parallel = ", sequence parallel" if self.layout.tp_size > 1 and self.tensor.sequence_parallel else ""
        return f"{self.schedule}, {self.layout.describe()}{parallel}"

    def shape(self) -> tuple[int, int, int]:
        """Of hidden states that cross a border."""
        parts = self.layout.cp_size * (self.layout.tp_size if self.tensor.sequence_parallel else 1)
        return ROWS, LENGTH // parts, HIDDEN


WHOLE = TensorConfig(sequence_parallel=False)
SENT = [
    Way("1f1b", Layout(pp_size=2)),
    Way("1f1b", Layout(pp_size=4)),
    Way("interleaved_1f1b", Layout(pp_size=4)),
    Way("zbv", Layout(pp_size=4)),
    Way("1f1b", Layout(pp_size=2, cp_size=2)),
    Way("zero_bubble", Layout(pp_size=2, tp_size=2)),
    Way("1f1b", Layout(pp_size=2, tp_size=2), tensor=WHOLE),
    Way("interleaved_1f1b", Layout(pp_size=2, cp_size=2, tp_size=2)),
]
READ = [
    Way("1f1b", Layout(pp_size=4)),
    Way("zbv", Layout(pp_size=4)),
    Way("1f1b", Layout(pp_size=4), stage=3),
]


class Rank:
    """One rank with its part of the model in `folder`."""

    def __init__(self, *, rank: int, world: int, folder: str, way: Way) -> None:
        from transformers.utils import logging

        from fourfold.context.attention import register
        from fourfold.zero.deepspeed_internals import quiet_start

        logging.set_verbosity_error()
        quiet_start(CPU)
        register()
        self.folder, self.way = Path(folder), way

    def read(self) -> tuple[Counter[str], int]:
        """(bytes by tensor, bytes of this rank's parameters) while it is built and filled."""
        with reads() as found:
            engine = self._build()[0]
        own = sum(getattr(p, "ds_shape", p.shape).numel() * p.element_size() for p in engine.module.parameters())
        return found, own

    def sent(self) -> tuple[dict[int, int], set[tuple[int, ...]], int]:
        """(bytes by pipeline rank, shapes, bytes of greetings) of an update after a first one."""
        from fourfold.context.select import splitter

        engine, mesh, config, model_config = self._build()
        split = splitter(config, model_config=model_config, group=mesh.axis_groups["cp"], device=CPU)
        for _ in range(2):
            with PointToPoint(mesh.axis_groups["pp"]) as seen:
                engine.forward_backward([split(self._rows(seed)) for seed in range(MICRO_BATCHES)], targets=1)
            engine.step(learning_rate=0.0)
        return dict(seen.sent), seen.shapes, seen.greetings

    def _rows(self, seed: int) -> dict[str, torch.Tensor]:
        batch = packed_rows(ROWS, LENGTH, vocab=VOCABULARY, seed=seed)
        return {**batch, "document_ids": (batch["position_ids"] == 0).cumsum(1) - 1}

    def _build(self) -> tuple[Any, Any, TrainConfig, Any]:
        from transformers import AutoConfig

        from fourfold.context.attention import IMPLEMENTATION
        from fourfold.mesh import build_mesh
        from fourfold.model.build import build_on_meta
        from fourfold.model.weights import Weights
        from fourfold.parallelize import parallelize

        config, mesh = self.way.config(), build_mesh(self.way.layout, device_type="cpu")
        model_config = AutoConfig.from_pretrained(self.folder)
        model = build_on_meta(model_config, dtype=torch.float32, attn_implementation=IMPLEMENTATION)
        engine = parallelize(model, Weights(self.folder), config=config, mesh=mesh, device=CPU)
        return engine, mesh, config, model_config


# ---------------------------------------------------------------- tables


def sent() -> Any:
    made = table(
        f"Bytes from a pipeline rank to others in an update of {MICRO_BATCHES} micro-batches, {ROWS} x {LENGTH} tokens of {HIDDEN}",
        ("schedule, layout", "shape", "kB each", "kB by rank", "shapes", "formula"),
        note="Each: rows x S/cp (x 1/tp with sequence parallelism) x hidden x 4, of a micro-batch over a border, one way. By "
        "rank: what each pipeline rank sends in all. A new schedule, or rows of another shape, costs 4 bytes a connection more once.",
    )
    for way in SENT:
        with tempfile.TemporaryDirectory() as scratch:
            folder = llama_folder(Path(scratch) / "llama", layers=LAYERS, hidden=HIDDEN, vocab=VOCABULARY)
            with Team(way.layout.world_size, Rank, folder=str(folder), way=way) as team:
                found = team.call("sent")
        shape = way.shape()
        each = shape[0] * shape[1] * shape[2] * FP32
        expected = [_expected(way, rank, each) for rank in range(way.layout.world_size)]
        tensor_and_context = way.layout.tp_size * way.layout.cp_size
        made.add_row(
            way.describe(),
            " x ".join(map(str, shape)),
            f"{each / 1e3:.1f}",
            ", ".join(f"{sum(one.values()) / 1e3:.0f}" for one, _, _ in found[::tensor_and_context]),
            _equal(all(shapes == {shape} and not greetings for _, shapes, greetings in found)),
            _equal([one for one, _, _ in found] == expected),
        )
    return made


def _expected(way: Way, rank: int, each: int) -> dict[int, int]:
    return bytes_to_send(
        PipelineConfig(schedule=way.schedule),
        rank=way.layout.coordinate(rank)["pp"],
        ranks=way.layout.pp_size,
        micro_batches=MICRO_BATCHES,
        hidden_bytes=each,
    )


def in_flight(found: dict[str, list[int]], *, world: int, micro_batches: int) -> Any:
    """`found`: by schedule and rank."""
    made = table(
        f"{world} ranks, {micro_batches} micro-batches: passes through a stage whose activations are held, at most, by rank",
        ("schedule", "counted", "simulated", ""),
    )
    for name, counted in found.items():
        settings = PipelineConfig(schedule=name)
        what = simulator.table(settings, ranks=world, micro_batches=micro_batches)
        simulated = simulator.simulate(what, costs=[1.0] * world * stages_per_rank(settings)).peaks
        made.add_row(name, ", ".join(map(str, counted)), ", ".join(map(str, simulated)), _equal(counted == simulated))
    return made


def read() -> Any:
    made = table(
        "Bytes of the checkpoint that each of 4 pipeline ranks reads while it is built and filled, MB",
        ("schedule, zero.stage", "read", "own", "of", "", "tensors twice"),
        note="Tied models: first and last rank both have the matrix of the embedding. ZeRO-3 over one rank keeps all of a stage.",
    )
    for tied in (False, True):
        with tempfile.TemporaryDirectory() as scratch:
            folder = llama_folder(Path(scratch) / "llama", layers=LAYERS, hidden=HIDDEN, vocab=VOCABULARY, tied=tied)
            size = (folder / "model.safetensors").stat().st_size
            for way in READ:
                with Team(way.layout.world_size, Rank, folder=str(folder), way=way) as team:
                    found = team.call("read")
                everything = Counter(name for names, _ in found for name in names)
                made.add_row(
                    f"{way.schedule}, {way.stage}{', tied' if tied else ''}",
                    ", ".join(f"{sum(names.values()) / 1e6:.2f}" for names, _ in found),
                    ", ".join(f"{own / 1e6:.2f}" for _, own in found),
                    f"{size / 1e6:.2f}",
                    _equal(all(sum(names.values()) == own for names, own in found)),
                    str(sum(count > 1 for count in everything.values())),
                )
    return made


def _equal(agrees: bool) -> str:
    return "[green]equal[/]" if agrees else "[red]differs[/]"
