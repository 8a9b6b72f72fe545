"""What a pipeline schedule costs, without running it: idle share, micro-batches in flight, and when each rank does what.

The tables of zero bubbles and V schedules are torch's own, whose import takes seconds; those of gpipe and 1f1b are made here
(torch 2.15 gives the last rank of 1F1B forward passes 1 to m instead of 0 to m-1), and those of loops, which are torch's too:
tests/unit/test_planner_schedule.py compares them. Of p ranks and m micro-batches of equal stages gpipe and 1f1b leave
(p-1)/(m+p-1) of the time idle, with v stages a rank in a loop (p-1)/(v m+p-1) (arXiv:2104.04473 section 2.2).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import SimpleNamespace
from typing import Any

from fourfold.pipeline.schedules import SCHEDULES, Placement, rank_of, refusals, stages_of, stages_per_rank
from fourfold.schema import PipelineConfig


class Kind(StrEnum):
    forward = "F"
    backward = "B"
    backward_input = "I"
    backward_weight = "W"


KINDS = {  # torch's names
    "FORWARD": Kind.forward,
    "FULL_BACKWARD": Kind.backward,
    "BACKWARD_INPUT": Kind.backward_input,
    "BACKWARD_WEIGHT": Kind.backward_weight,
}


LOOPS = ("interleaved_1f1b", "looped_bfs")


@dataclass(frozen=True)
class Action:
    kind: Kind
    stage: int
    micro_batch: int
    held: bool = field(default=False, compare=False)  # others get its output after the next action only: torch's pairs


@dataclass(frozen=True)
class Span:
    """An action of a rank, from `start` to `end`."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """Times are in units of one forward pass of a stage of cost 1."""

    spans: list[Span]
    peaks: list[int]  # of each rank: passes through a stage whose activations are held at one time

    @property
    def makespan(self) -> float:
        return max(span.end for span in self.spans)

    @property
    def idle(self) -> float:
        """Share of the ranks' time that they wait."""
        busy = sum(span.end - span.start for span in self.spans)
        return 1 - busy / (len(self.peaks) * self.makespan)


Table = list[list[Action]]  # what each rank does, in order


def table(settings: PipelineConfig, *, ranks: int, micro_batches: int) -> Table:
    """ValueError of torch for numbers that the schedule refuses (pipeline/schedules.py says them in advance)."""
    if SCHEDULES[settings.schedule].placement is Placement.single:
        return [_single(settings.schedule, rank, ranks=ranks, micro_batches=micro_batches) for rank in range(ranks)]
    if settings.schedule in LOOPS and not list(refusals(settings, ranks=ranks, micro_batches=micro_batches)):
        return [_looped(settings, rank, ranks=ranks, micro_batches=micro_batches) for rank in range(ranks)]
    return _torch_table(settings, ranks=ranks, micro_batches=micro_batches)


def simulate(
    what: Table, *, costs: Sequence[float], forward: float = 1.0, backward: float = 2.0, transfer: float = 0.0
) -> Simulation:
    """Every rank does its actions in order, each as soon as what it needs is there. `costs` are of the stages; `backward`
    is halved where input and weight are apart; `transfer` is added between ranks. ValueError for a table that never ends.
    """
    owner = {action.stage: rank for rank, actions in enumerate(what) for action in actions}
    lasts = {
        Kind.forward: forward,
        Kind.backward: backward,
        Kind.backward_input: backward / 2,
        Kind.backward_weight: backward / 2,
    }
    done: dict[Action, float] = {}
    sent: dict[Action, float] = {}  # when other ranks may have it
    spans: list[Span] = []
    free, position = [0.0] * len(what), [0] * len(what)
    while any(position[rank] < len(actions) for rank, actions in enumerate(what)):
        before = len(spans)
        for rank, actions in enumerate(what):
            while position[rank] < len(actions):
                action = actions[position[rank]]
                needs = list(_needs(action, stages=len(costs)))
                if not all(_event(need) in (done if owner[need.stage] == rank else sent) for need in needs):
                    break
                ready = [
                    done[_event(need)] if owner[need.stage] == rank else sent[_event(need)] + transfer for need in needs
                ]
                start = max([free[rank], *ready])
                free[rank] = start + lasts[action.kind] * costs[action.stage]
                done[_event(action)] = free[rank]
                spans.append(Span(rank, action, start, free[rank]))
                position[rank] += 1
                if position[rank] > 1 and actions[position[rank] - 2].held:
                    sent[_event(actions[position[rank] - 2])] = free[rank]
                if not action.held:
                    sent[_event(action)] = free[rank]
        if len(spans) == before:
            stuck = {
                rank: actions[position[rank]] for rank, actions in enumerate(what) if position[rank] < len(actions)
            }
            raise ValueError(f"the ranks of this schedule wait for each other: {stuck}")
    return Simulation(spans, [_peak(actions) for actions in what])


def _single(schedule: str, rank: int, *, ranks: int, micro_batches: int) -> list[Action]:
    forward = [Action(Kind.forward, rank, number) for number in range(micro_batches)]
    backward = [Action(Kind.backward, rank, number) for number in range(micro_batches)]
    if schedule == "gpipe":
        return forward + backward
    return _one_by_one(forward, backward, ahead=ranks - 1 - rank)


def _looped(settings: PipelineConfig, rank: int, *, ranks: int, micro_batches: int) -> list[Action]:
    """interleaved_1f1b: rounds of about p micro-batches through stage after stage; looped_bfs: one round of all, backward in
    reverse."""
    stages = stages_of(rank, ranks=ranks, settings=settings)
    breadth = settings.schedule == "looped_bfs"
    each = micro_batches if breadth else micro_batches // max(1, micro_batches // ranks)
    rounds = [range(first, first + each) for first in range(0, micro_batches, each)]
    forward = [Action(Kind.forward, stage, one) for numbers in rounds for stage in stages for one in numbers]
    backward = [
        Action(Kind.backward, stage, one)
        for numbers in rounds
        for stage in reversed(stages)
        for one in (reversed(numbers) if breadth else numbers)
    ]
    if breadth:
        return forward + backward
    return _one_by_one(forward, backward, ahead=(len(stages) - 1) * each + 2 * (ranks - 1 - rank))


def _one_by_one(forward: list[Action], backward: list[Action], *, ahead: int) -> list[Action]:
    """In turns, after `ahead` forward passes."""
    ahead = min(ahead, len(forward))
    turns = [action for pair in zip(forward[ahead:], backward, strict=False) for action in pair]
    return forward[:ahead] + turns + backward[len(forward) - ahead :]


def _torch_table(settings: PipelineConfig, *, ranks: int, micro_batches: int) -> Table:
    from torch.distributed import pipelining

    total = ranks * stages_per_rank(settings)
    stages: Any = [
        SimpleNamespace(
            num_stages=total,
            group_size=ranks,
            group_rank=0,
            stage_index=stage,
            submod=None,
            is_first=stage == 0,
            is_last=stage == total - 1,
        )
        for stage in stages_of(0, ranks=ranks, settings=settings)
    ]
    made = getattr(pipelining, SCHEDULES[settings.schedule].class_name)(stages, micro_batches)
    found = [list(_plain(made.pipeline_order[rank])) for rank in range(ranks)]
    assert all(
        rank_of(action.stage, ranks=ranks, settings=settings) == rank for rank in range(ranks) for action in found[rank]
    )
    return found


def _plain(actions: Sequence[Any]) -> Iterator[Action]:
    """torch's actions without its gaps; those of a pair one after the other, as torch 2.15 runs them: what the first makes is
    sent after the second."""
    for action in actions:
        if action is None:
            continue
        if action.sub_actions:
            first, second = _plain(action.sub_actions)
            yield replace(first, held=True)
            yield second
        else:
            kind = KINDS[action.computation_type.name]
            yield Action(kind, action.stage_index, action.microbatch_index)


def _needs(action: Action, *, stages: int) -> Iterator[Action]:
    stage, number = action.stage, action.micro_batch
    if action.kind is Kind.forward:
        if stage:
            yield Action(Kind.forward, stage - 1, number)
        return
    if action.kind is Kind.backward_weight:
        yield Action(Kind.backward_input, stage, number)
        return
    yield Action(Kind.forward, stage, number)
    if stage < stages - 1:
        yield Action(Kind.backward, stage + 1, number)


def _event(action: Action) -> Action:
    """A gradient of the input is there after either kind of backward pass."""
    return Action(Kind.backward, action.stage, action.micro_batch) if action.kind is Kind.backward_input else action


def _peak(actions: Sequence[Action]) -> int:
    held = most = 0
    for action in actions:
        held += (action.kind is Kind.forward) - (action.kind in (Kind.backward, Kind.backward_weight))
        most = max(most, held)
    return most
