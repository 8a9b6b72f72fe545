"""Pipelines: idle time of sleeping stages against the simulator, host time against the bare torch schedule, and counts of
bytes sent, passes in flight and bytes read against what they must be (pipeline_counts.py).

    uv run python tools/bench/pipeline.py                       everything
    uv run python tools/bench/pipeline.py --figures idle --ranks 2
    uv run python tools/bench/pipeline.py --figures host --rounds 9

Idle: the stages of a rank sleep 100 ms of each micro-batch forward and 200 ms backward (a stage of two 50 and 100, or with
--each every stage as long as that), through our driver; what an update takes beyond its sleeps is idle, whatever the
reason; of a few updates the shortest counts, as a busy machine wakes sleepers late. The simulator has the same costs. Host: CPU seconds of all ranks and threads while stages do next to nothing, by our
driver and by the same torch schedule over plain PipelineStages of the same modules, which gives losses to the last rank
alone; sides in turns, a ratio is of one round, the figure its median.
"""

import argparse
import os
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from common import Team, console, median_ratio, table, verdict
from pipeline_counts import in_flight, read, sent
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from fourfold.pipeline.driver import Hidden, Pipeline
from fourfold.pipeline.measure import InFlight, sleeping
from fourfold.pipeline.schedules import SCHEDULES, stages_of, stages_per_rank
from fourfold.planner import schedule as simulator
from fourfold.schema import PipelineConfig

FIGURES = ("idle", "host", "sent", "flight", "read")
IDLE, HOST = 5.0, 1.1  # points; ratio
FORWARD, BACKWARD = 0.1, 0.2  # seconds
HIDDEN = Hidden(width=4, dtype=torch.float32, parts=1)
ROWS, TOKENS = 1, 2
CPU = torch.device("cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figures", choices=FIGURES, nargs="+", default=list(FIGURES))
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--schedules", choices=list(SCHEDULES), nargs="+", default=list(SCHEDULES))
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--each", action="store_true", help="idle: 100 and 200 ms of every stage, not of all of a rank")
    parser.add_argument("--rounds", type=int, default=9, help="of host")
    parser.add_argument("--updates", type=int, default=3, help="of idle: the one that was disturbed least counts")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    for world in options.ranks:
        if {"idle", "host", "flight"} & set(options.figures):
            _of_sleeping_stages(world, options)
    if "sent" in options.figures:
        console().print(sent())
    if "read" in options.figures:
        console().print(read())


def _of_sleeping_stages(world: int, options: argparse.Namespace) -> None:
    with Team(world, Rank) as team:
        if "idle" in options.figures:
            console().print(idle(team, world, options))
        if "host" in options.figures:
            console().print(host(team, world, options))
        if "flight" in options.figures:
            found = {name: team.call("peak", name, options.micro_batches) for name in options.schedules}
            console().print(in_flight(found, world=world, micro_batches=options.micro_batches))


class Rank:
    """One rank. Pipelines are made and run once on first use: schedules, connections."""

    def __init__(self, *, rank: int, world: int) -> None:
        from fourfold.zero.deepspeed_internals import quiet_start

        quiet_start(CPU)
        self.rank, self.world = rank, world
        self._ours: dict[tuple[str, int], tuple[Pipeline, list[Any]]] = {}
        self._bare: dict[tuple[str, int], Any] = {}

    def update_seconds(self, name: str, micro_batches: int, forward: float, backward: float) -> float:
        """Wall-clock, of sleeping stages."""
        pipeline, stages = self._pipeline(name, micro_batches)
        for stage in stages:
            stage.seconds = (forward, backward)
        dist.barrier()
        begin = time.perf_counter()
        _run(pipeline, micro_batches)
        spent = time.perf_counter() - begin
        for stage in stages:
            stage.seconds = (0.0, 0.0)
        return spent

    def host_seconds(self, name: str, micro_batches: int, bare: bool, updates: int) -> float:
        """CPU, of so many updates."""
        if bare:
            schedule = self._schedule(name, micro_batches)
        else:
            pipeline, _ = self._pipeline(name, micro_batches)
        dist.barrier()
        begin = time.process_time()
        for _ in range(updates):
            if bare:
                self._step(schedule, micro_batches)
            else:
                _run(pipeline, micro_batches)
        return time.process_time() - begin

    def peak(self, name: str, micro_batches: int) -> int:
        pipeline, _ = self._pipeline(name, micro_batches)
        with InFlight() as flight:
            _run(pipeline, micro_batches)
        assert flight.now == 0
        return flight.peak

    def _indices(self, name: str) -> tuple[list[int], int]:
        settings = PipelineConfig(schedule=name)
        return stages_of(self.rank, ranks=self.world, settings=settings), self.world * stages_per_rank(settings)

    def _pipeline(self, name: str, micro_batches: int) -> tuple[Pipeline, list[Any]]:
        if (name, micro_batches) not in self._ours:
            assert dist.group.WORLD is not None
            indices, total = self._indices(name)
            stages: list[Any] = sleeping(HIDDEN, indices=indices, total=total)
            made = Pipeline(
                stages,
                indices,
                total=total,
                group=dist.group.WORLD,
                settings=PipelineConfig(schedule=name),
                hidden=HIDDEN,
                device=CPU,
            )
            _run(made, micro_batches)
            self._ours[name, micro_batches] = made, stages
        return self._ours[name, micro_batches]

    def _schedule(self, name: str, micro_batches: int) -> Any:
        """As torch's own examples have it."""
        if (name, micro_batches) not in self._bare:
            indices, total = self._indices(name)
            modules = sleeping(HIDDEN, indices=indices, total=total)
            stages = [PipelineStage(module, index, total, CPU) for index, module in zip(indices, modules, strict=True)]
            kind = getattr(pipelining, SCHEDULES[name].class_name)
            given = stages[0] if issubclass(kind, PipelineScheduleSingle) else stages
            made = kind(given, micro_batches, loss_fn=lambda output, target: output * 1.0, scale_grads=False)
            self._step(made, micro_batches)
            self._bare[name, micro_batches] = made
        return self._bare[name, micro_batches]

    def _step(self, schedule: Any, micro_batches: int) -> None:
        ids = torch.zeros(micro_batches * ROWS, TOKENS, dtype=torch.long)
        stages = [stage.stage_index for stage in getattr(schedule, "_stages", None) or [schedule._stage]]
        total = schedule._num_stages
        schedule.step(
            *([ids] if 0 in stages else []),
            labels=ids,
            target=ids if total - 1 in stages else None,
            losses=[],
            return_outputs=False,
        )


def _run(pipeline: Pipeline, micro_batches: int) -> None:
    ids = torch.zeros(ROWS, TOKENS, dtype=torch.long)
    pipeline.run([{"input_ids": ids, "labels": ids}] * micro_batches, scale=1.0, fold=lambda parameter: None)


# ---------------------------------------------------------------- tables


def idle(team: Team, world: int, options: argparse.Namespace) -> Any:
    made = table(
        f"{world} ranks, {options.micro_batches} micro-batches: share of the ranks' time that they wait, %",
        ("schedule", "a stage, ms", "update, s", "measured", "simulated", "points", "target", ""),
    )
    for name in options.schedules:
        settings = PipelineConfig(schedule=name)
        each = stages_per_rank(settings)
        part = 1 if options.each else each
        costs = [1.0] * world * each
        what = simulator.table(settings, ranks=world, micro_batches=options.micro_batches)
        simulated = simulator.simulate(what, costs=costs, forward=FORWARD / part, backward=BACKWARD / part)
        sleeps = (options.micro_batches, FORWARD / part, BACKWARD / part)
        spent = min(max(team.call("update_seconds", name, *sleeps)) for _ in range(options.updates))
        measured = 1 - options.micro_batches * each * (FORWARD + BACKWARD) / part / spent
        points = 100 * (measured - simulated.idle)
        made.add_row(
            name,
            f"{1e3 * FORWARD / part:.0f} + {1e3 * BACKWARD / part:.0f}",
            f"{spent:.2f}",
            f"{100 * measured:.1f}",
            f"{100 * simulated.idle:.1f}",
            f"{points:.1f}",
            f"{IDLE:.0f}",
            verdict(points, IDLE),
        )
    return made


def host(team: Team, world: int, options: argparse.Namespace) -> Any:
    made = table(
        f"{world} ranks, {options.micro_batches} micro-batches: CPU time of a micro-batch and stage",
        ("schedule", "ours, us", "torch's, us", "ratio", "quartiles", "target", ""),
    )
    for name in options.schedules:
        passes = options.micro_batches * world * stages_per_rank(PipelineConfig(schedule=name))
        updates = max(1, 1000 // passes)
        found: dict[bool, list[float]] = {False: [], True: []}
        for turn in range(options.rounds + 1):
            for bare in (False, True):
                spent = sum(team.call("host_seconds", name, options.micro_batches, bare, updates))
                if turn:  # the first makes schedules, connections
                    found[bare].append(1e6 * spent / updates / passes)
        ratio, low, high = median_ratio(found[False], found[True])
        made.add_row(
            name,
            f"{statistics.median(found[False]):.0f}",
            f"{statistics.median(found[True]):.0f}",
            f"{ratio:.3f}",
            f"{low:.3f} to {high:.3f}",
            f"{HOST:.2f}",
            verdict(ratio, HOST),
        )
    return made


if __name__ == "__main__":
    main()
