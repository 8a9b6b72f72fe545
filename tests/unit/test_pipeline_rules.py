"""Which layers go where, and what is refused."""

from types import SimpleNamespace

import pytest

from fourfold.pipeline.cut import Cut
from fourfold.pipeline.schedules import SCHEDULES, rank_of, refusals, stages_of, stages_per_rank
from fourfold.pipeline.split import balanced, head_weight, layers_of_stages
from fourfold.pipeline.split import refusals as split_refusals
from fourfold.schema import PipelineConfig

LLAMA = SimpleNamespace(
    num_hidden_layers=126,
    num_attention_heads=128,
    num_key_value_heads=8,
    hidden_size=16384,
    intermediate_size=53248,
    vocab_size=128256,
)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_stage_lies_on_one_rank(schedule: str, ranks: int) -> None:
    settings = PipelineConfig(schedule=schedule)
    held = {stage: rank for rank in range(ranks) for stage in stages_of(rank, ranks=ranks, settings=settings)}
    assert sorted(held) == list(range(ranks * stages_per_rank(settings)))
    assert all(rank_of(stage, ranks=ranks, settings=settings) == rank for stage, rank in held.items())


def test_llama_3_takes_a_layer_off_both_ends() -> None:
    """126 layers on 16 stages (arXiv:2407.21783): embedding and head weigh about a layer each."""
    assert head_weight(LLAMA) == pytest.approx(0.66, abs=0.02)
    counts = [last - first for first, last in layers_of_stages(PipelineConfig(), model_config=LLAMA, stages=16)]
    assert counts == [7, *[8] * 14, 7]


@pytest.mark.parametrize(("layers", "stages", "head"), [(5, 2, 0.5), (7, 4, 3.0), (4, 4, 9.0), (30, 8, 0.1)])
def test_the_largest_load_is_as_small_as_can_be(layers: int, stages: int, head: float) -> None:
    counts = balanced(layers, stages=stages, head=head, embedding=0.2)
    assert sum(counts) == layers
    assert min(counts) >= 1
    loads = [float(count) for count in counts]
    loads[0] += 0.2
    loads[-1] += head
    movable = [load - 1 for load, count in zip(loads, counts, strict=True) if count > 1]
    assert not movable or max(movable) <= min(loads)


def test_a_rank_has_the_layers_of_its_stages() -> None:
    model = SimpleNamespace(**{**vars(LLAMA), "num_hidden_layers": 6})
    settings = PipelineConfig(schedule="zbv", split=[1, 2, 2, 1])
    first, second = (Cut.of(settings, model_config=model, rank=rank, ranks=2) for rank in range(2))
    assert (first.stages, first.layers, first.first, first.last) == ([0, 3], [(0, 1), (5, 6)], True, True)
    assert (second.stages, second.layers, second.first, second.last) == ([1, 2], [(1, 3), (3, 5)], False, False)


REFUSED = [
    (PipelineConfig(schedule="1f1b"), 4, 3, 1, "needs 4 micro-batches, and an update has 3: use global_batch_size=8"),
    (PipelineConfig(schedule="dualpipe_v"), 2, 3, 1, "needs 4 micro-batches"),
    (PipelineConfig(schedule="interleaved_1f1b"), 4, 9, 1, "use global_batch_size=16 or 20."),
    (PipelineConfig(schedule="zbv"), 2, 4, 3, "zero.stage=3"),
    (PipelineConfig(schedule="gpipe", virtual_stages=2), 2, 4, 1, "virtual_stages=2"),
    (PipelineConfig(schedule="zbv", virtual_stages=3), 2, 4, 1, "two stages a rank"),
    (PipelineConfig(schedule="interleaved_1f1b", virtual_stages=0), 2, 4, 1, "virtual_stages=0"),
]


@pytest.mark.parametrize(("settings", "ranks", "micro_batches", "stage", "words"), REFUSED)
def test_what_a_schedule_cannot_do_is_refused(
    settings: PipelineConfig, ranks: int, micro_batches: int, stage: int, words: str
) -> None:
    (problem,) = refusals(settings, ranks=ranks, micro_batches=micro_batches, zero_stage=stage, rows=2)
    assert words in problem


SPLITS = [
    (PipelineConfig(schedule="zbv"), 3, 4, 2, "2 pipeline ranks of 2 stages need 4 layers, and the model has 3"),
    (PipelineConfig(schedule="looped_bfs"), 5, 6, 3, "use pipeline.virtual_stages=2"),
    (PipelineConfig(split=[1, 2]), 3, 4, 1, "has 2 numbers for 4 stages"),
    (PipelineConfig(split=[1, 2]), 4, 2, 1, "has 3 layers"),
    (PipelineConfig(split=[0, 4]), 4, 2, 1, "has a stage of 0 layers"),
]


@pytest.mark.parametrize(("settings", "layers", "stages", "per_rank", "words"), SPLITS)
def test_layers_that_do_not_fit_the_stages_are_refused(
    settings: PipelineConfig, layers: int, stages: int, per_rank: int, words: str
) -> None:
    problems = list(split_refusals(settings, layers=layers, stages=stages, per_rank=per_rank))
    assert any(words in problem for problem in problems), problems


def test_what_is_accepted_runs_in_torch() -> None:
    """The rules and torch's own agree, for every schedule and number of micro-batches up to 17."""
    from fourfold.planner.schedule import table

    for schedule in SCHEDULES:
        for ranks in (2, 3, 4):
            for micro_batches in range(1, 18):
                settings = PipelineConfig(schedule=schedule)
                if list(refusals(settings, ranks=ranks, micro_batches=micro_batches, zero_stage=1)):
                    continue
                table(settings, ranks=ranks, micro_batches=micro_batches)
