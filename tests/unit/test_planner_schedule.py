"""The schedule simulator against theory, and the pictures."""

import xml.etree.ElementTree as ElementTree

import pytest

from fourfold.pipeline.schedules import SCHEDULES, refusals, stages_per_rank
from fourfold.planner.schedule import LOOPS, Action, Kind, Simulation, _torch_table, simulate, table
from fourfold.planner.timeline import as_svg, in_terminal
from fourfold.schema import PipelineConfig


def simulated(schedule: str, *, ranks: int, micro_batches: int, virtual: int | None = None) -> Simulation:
    settings = PipelineConfig(schedule=schedule, virtual_stages=virtual)
    each = stages_per_rank(settings)
    what = table(settings, ranks=ranks, micro_batches=micro_batches)
    return simulate(what, costs=[1 / each] * ranks * each)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (4, 4), (4, 8), (8, 3)])
def test_idle_is_what_the_formula_says(schedule: str, ranks: int, micro_batches: int) -> None:
    found = simulated(schedule, ranks=ranks, micro_batches=micro_batches)
    assert found.idle == pytest.approx((ranks - 1) / (micro_batches + ranks - 1))


def test_four_stages_of_the_guide() -> None:
    """One micro-batch keeps them 25 % busy, four 16/28 = 57.1 %."""
    assert 1 - simulated("gpipe", ranks=4, micro_batches=1).idle == pytest.approx(0.25)
    assert 1 - simulated("1f1b", ranks=4, micro_batches=4).idle == pytest.approx(16 / 28)


@pytest.mark.parametrize("schedule", ["looped_bfs", "interleaved_1f1b"])
@pytest.mark.parametrize("virtual", [2, 4])
def test_stages_in_a_loop_divide_the_idle_time(schedule: str, virtual: int) -> None:
    found = simulated(schedule, ranks=4, micro_batches=8, virtual=virtual)
    assert found.idle == pytest.approx(3 / (virtual * 8 + 3))


@pytest.mark.parametrize("schedule", ["zero_bubble", "zbv"])
def test_zero_bubbles_are_smaller(schedule: str) -> None:
    interleaved = simulated("interleaved_1f1b", ranks=4, micro_batches=8).idle
    assert simulated(schedule, ranks=4, micro_batches=8).idle < interleaved / 2


def test_a_pair_sends_at_its_end() -> None:
    """torch's DualPipeV: 1/9 idle (12.1 % measured with sleeping stages), 1/17 if each action sent for itself."""
    assert simulated("dualpipe_v", ranks=4, micro_batches=8).idle == pytest.approx(1 / 9)
    forward, backward = Action(Kind.forward, 0, 1, held=True), Action(Kind.backward, 0, 0)
    first = [Action(Kind.forward, 0, 0), forward, backward, Action(Kind.backward, 0, 1)]
    second = [Action(kind, 1, number) for number in (0, 1) for kind in (Kind.forward, Kind.backward)]
    spans = simulate([first, second], costs=[1, 1]).spans
    starts = {span.action: span.start for span in spans}
    assert starts[Action(Kind.forward, 1, 1)] == starts[backward] + 2 == 6


@pytest.mark.parametrize("schedule", LOOPS)
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_loops_are_those_of_torch(schedule: str, ranks: int) -> None:
    """What is made without torch, for few and many micro-batches, also such as fill no whole rounds of as many as ranks."""
    compared = 0
    for virtual in (1, 2, 3):
        settings = PipelineConfig(schedule=schedule, virtual_stages=virtual)
        for count in (1, 2, 3, 4, 5, 6, 8, 9, 12, 16):
            if not list(refusals(settings, ranks=ranks, micro_batches=count)):
                ours = table(settings, ranks=ranks, micro_batches=count)
                assert ours == _torch_table(settings, ranks=ranks, micro_batches=count), (virtual, count)
                compared += 1
    assert compared > 10


PEAKS = {  # counted while torch ran them, ranks 4, micro-batches 8
    "gpipe": [8, 8, 8, 8],
    "1f1b": [4, 3, 2, 1],
    "looped_bfs": [16, 16, 16, 16],
    "interleaved_1f1b": [11, 9, 7, 5],
    "zero_bubble": [8, 8, 8, 8],
    "zbv": [8, 8, 8, 8],
    "dualpipe_v": [9, 9, 9, 9],
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_passes_in_flight_and_every_pass_once(schedule: str) -> None:
    found = simulated(schedule, ranks=4, micro_batches=8)
    assert found.peaks == PEAKS[schedule]
    stages = 4 * stages_per_rank(PipelineConfig(schedule=schedule))
    forward = [span.action for span in found.spans if span.action.kind is Kind.forward]
    assert sorted((one.stage, one.micro_batch) for one in forward) == [(s, m) for s in range(stages) for m in range(8)]
    halves = sum({Kind.forward: 0, Kind.backward: 2}.get(span.action.kind, 1) for span in found.spans)
    assert halves == 2 * stages * 8


def test_ranks_that_wait_for_each_other_are_told() -> None:
    first = [Action(Kind.backward, 0, 0), Action(Kind.forward, 0, 0)]
    with pytest.raises(ValueError, match="wait for each other"):
        simulate([first, [Action(Kind.forward, 1, 0), Action(Kind.backward, 1, 0)]], costs=[1, 1])


def test_a_transfer_takes_its_time() -> None:
    what = table(PipelineConfig(schedule="gpipe"), ranks=2, micro_batches=1)
    assert simulate(what, costs=[1, 1], transfer=0.5).makespan == pytest.approx(1 + 0.5 + 1 + 2 + 0.5 + 2)


def test_the_pictures_show_every_rank_to_scale() -> None:
    found = simulated("1f1b", ranks=4, micro_batches=4)
    lines = in_terminal(found, width=84)
    assert [line.split()[:2] for line in lines] == [["rank", str(rank)] for rank in range(4)]
    assert all(len(line) == len(lines[0]) for line in lines)
    assert "".join(lines).count(".") == pytest.approx(found.idle * 4 * 84, abs=12)
    tree = ElementTree.fromstring(as_svg(found, title="a < b"))
    boxes = [box for box in tree.iter("{http://www.w3.org/2000/svg}rect") if box.find("{*}title") is not None]
    assert len(boxes) == len(found.spans)
    assert max(float(box.get("x", 0)) + float(box.get("width", 0)) for box in boxes) == pytest.approx(1190)
