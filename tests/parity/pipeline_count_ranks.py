"""What one rank does in the tests that count what a pipeline sends, holds and reads, and time it."""

import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fourfold.layout import Layout
from fourfold.pipeline.driver import Hidden, Pipeline
from fourfold.pipeline.measure import InFlight, PointToPoint, reads, sleeping
from fourfold.pipeline.schedules import stages_of, stages_per_rank
from fourfold.schema import PipelineConfig, TrainConfig
from tests.parity.zero_ranks import build_engine, micro_batches, split_rows

HIDDEN = Hidden(width=4, dtype=torch.float32, parts=1)


def sent(
    rank: int, *, folder: Path, config: TrainConfig, layout: Layout, batch: dict[str, Tensor], accumulation: int
) -> list[tuple[Counter[int], set[tuple[int, ...]], int]]:
    """(bytes by pipeline rank, shapes, bytes of greetings) that this one sends, in each of two updates."""
    engine, mesh = build_engine(folder=folder, config=config, layout=layout)
    split = split_rows(folder=folder, config=config, mesh=mesh)
    found = []
    for _ in range(2):
        with PointToPoint(mesh.axis_groups["pp"]) as seen:
            engine.forward_backward(
                [split(one) for one in micro_batches(batch, mesh=mesh, count=accumulation)], targets=1
            )
        engine.step(learning_rate=0.0)
        found.append((seen.sent, seen.shapes, seen.greetings))
    return found


def read_bytes(rank: int, *, folder: Path, config: TrainConfig, layout: Layout) -> Counter[str]:
    """By tensor, while the rank's part of the model is built and filled."""
    with reads() as found:
        build_engine(folder=folder, config=config, layout=layout)
    return found


def peaks(rank: int, *, schedules: list[str], micro_batches: int) -> dict[str, tuple[int, int]]:
    """(passes in flight at most, and at the end) by schedule."""
    found = {}
    for schedule in schedules:
        pipeline = _sleeping(PipelineConfig(schedule=schedule), seconds=0.0)
        with InFlight() as flight:
            _run(pipeline, micro_batches)
        found[schedule] = flight.peak, flight.now
    return found


def walls(rank: int, *, schedules: list[str], micro_batches: int, seconds: float, rounds: int) -> dict[str, float]:
    """Least time that an update took, by schedule. A rank's forward passes of a micro-batch take `seconds`, backward twice that."""
    pipelines = {name: _sleeping(PipelineConfig(schedule=name), seconds=seconds) for name in schedules}
    found: dict[str, Any] = {name: [] for name in schedules}
    for _ in range(rounds):
        for name, pipeline in pipelines.items():
            dist.barrier()
            begin = time.perf_counter()
            _run(pipeline, micro_batches)
            found[name].append(time.perf_counter() - begin)
    return {name: min(times) for name, times in found.items()}


def _sleeping(settings: PipelineConfig, *, seconds: float) -> Pipeline:
    assert dist.group.WORLD is not None
    ranks, each = dist.get_world_size(), stages_per_rank(settings)
    indices = stages_of(dist.get_rank(), ranks=ranks, settings=settings)
    stages = sleeping(HIDDEN, indices=indices, total=ranks * each, forward=seconds / each, backward=2 * seconds / each)
    return Pipeline(
        stages,
        indices,
        total=ranks * each,
        group=dist.group.WORLD,
        settings=settings,
        hidden=HIDDEN,
        device=torch.device("cpu"),
    )


def _run(pipeline: Pipeline, micro_batches: int) -> None:
    ids = torch.zeros(1, 2, dtype=torch.long)
    pipeline.run([{"input_ids": ids, "labels": ids}] * micro_batches, scale=1.0, fold=lambda parameter: None)
