"""What a pipeline sends, holds and reads, to the byte; and that schedules take turns in time as the simulator has them."""

from pathlib import Path

import pytest
from safetensors import safe_open

from fourfold.layout import Layout
from fourfold.pipeline.cost import bytes_to_send
from fourfold.pipeline.schedules import SCHEDULES, stages_per_rank
from fourfold.planner.schedule import simulate, table
from fourfold.schema import PipelineConfig, TensorConfig
from tests.families import family_model, save_family
from tests.parity.context_model_ranks import attention
from tests.parity.pipeline_count_ranks import peaks, read_bytes, sent, walls
from tests.parity.test_pipeline_cases import config
from tests.pool import RankPool
from tests.reference import batches

ROWS, LENGTH, MICRO_BATCHES, FP32 = 8, 16, 4, 4
PP2, PP4 = Layout(pp_size=2), Layout(pp_size=4)


@pytest.mark.parametrize(
    ("schedule", "layout", "sequence_parallel"),
    [
        ("1f1b", PP4, True),
        ("zbv", PP2, True),
        ("interleaved_1f1b", Layout(pp_size=2, cp_size=2), True),
        ("1f1b", Layout(pp_size=2, tp_size=2), True),
        ("gpipe", Layout(pp_size=2, tp_size=2), False),
    ],
)
def test_hidden_states_are_all_that_is_sent(
    ranks: RankPool, tmp_path: Path, schedule: str, layout: Layout, sequence_parallel: bool
) -> None:
    """Rows x S/cp (x 1/tp with sequence parallelism) x D of each micro-batch over each border, each way; the first
    time a number on each connection, none for shapes."""
    made = config(schedule)
    made.tensor = TensorConfig(sequence_parallel=sequence_parallel)
    if layout.cp_size > 1:
        made.attention = attention("ring")
    folder = save_family("llama", tmp_path, num_hidden_layers=4)
    tokens = LENGTH // layout.cp_size // (layout.tp_size if sequence_parallel else 1)
    shape = (ROWS // MICRO_BATCHES, tokens, family_model("llama").config.hidden_size)
    results = ranks.run(
        layout.world_size,
        sent,
        folder=folder,
        config=made,
        layout=layout,
        batch=batches(0, rows=ROWS, length=LENGTH),
        accumulation=MICRO_BATCHES,
    )
    for rank, updates in enumerate(results):
        expected = bytes_to_send(
            made.pipeline,
            rank=layout.coordinate(rank)["pp"],
            ranks=layout.pp_size,
            micro_batches=MICRO_BATCHES,
            hidden_bytes=shape[0] * shape[1] * shape[2] * FP32,
        )
        (*first, greetings), second = updates
        assert first == [expected, {shape}]
        assert greetings <= 4 * len(expected)
        assert second == (expected, {shape}, 0)


def test_bytes_of_borders_by_hand() -> None:
    """Of four ranks the second has two neighbours; in a V the last rank's two stages are neighbours and send nothing."""
    one = {"ranks": 4, "micro_batches": 3, "hidden_bytes": 10}
    assert bytes_to_send(PipelineConfig(schedule="1f1b"), rank=1, **one) == {0: 30, 2: 30}
    assert bytes_to_send(PipelineConfig(schedule="zbv"), rank=3, **one) == {2: 60}
    assert bytes_to_send(PipelineConfig(schedule="looped_bfs"), rank=0, **one) == {1: 60, 3: 30}


@pytest.mark.parametrize("world", [2, 4])
def test_passes_in_flight_are_those_of_the_simulator(ranks: RankPool, world: int) -> None:
    results = ranks.run(world, peaks, schedules=list(SCHEDULES), micro_batches=8)
    for schedule in SCHEDULES:
        settings = PipelineConfig(schedule=schedule)
        what = table(settings, ranks=world, micro_batches=8)
        expected = simulate(what, costs=[1.0] * world * stages_per_rank(settings)).peaks
        assert [result[schedule] for result in results] == [(peak, 0) for peak in expected], schedule


@pytest.mark.parametrize(("family", "stage"), [("llama", 1), ("llama_tied", 3)])
def test_a_rank_reads_its_own_layers_once(ranks: RankPool, tmp_path: Path, family: str, stage: int) -> None:
    """Of four; and of a tied matrix the first and the last."""
    folder = save_family(family, tmp_path, num_hidden_layers=8)
    made = config("1f1b", stage=stage)
    made.pipeline.split = [3, 2, 2, 1]
    ends = {0: ["embed_tokens"], 3: ["model.norm", "embed_tokens" if family == "llama_tied" else "lm_head"]}
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        sizes = {name: file.get_tensor(name).nbytes for name in file.keys()}  # noqa: SIM118
    layers = iter(range(8))
    for rank, found in enumerate(ranks.run(4, read_bytes, folder=folder, config=made, layout=PP4)):
        parts = [f"layers.{next(layers)}." for _ in range(made.pipeline.split[rank])] + ends.get(rank, [])
        assert found == {name: size for name, size in sizes.items() if any(part in name for part in parts)}


def test_schedules_end_in_the_order_that_is_simulated(ranks: RankPool) -> None:
    """Stages that sleep: 4 ranks, 4 micro-batches: 1.75, 1.375 and 1.25 times the work."""
    schedules = ["gpipe", "interleaved_1f1b", "zbv"]
    gpipe, interleaved, zbv = (
        max(result[schedule] for result in results)
        for results in [ranks.run(4, walls, schedules=schedules, micro_batches=4, seconds=0.04, rounds=3)]
        for schedule in schedules
    )
    assert gpipe > 1.1 * interleaved
    assert interleaved > zbv
    assert zbv > 4 * 0.12
