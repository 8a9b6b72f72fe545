"""Advice follows the scaling guide, and every layout that is advised is legal for its model."""

import subprocess
import sys
from copy import copy
from typing import Any

import pytest

from fourfold.config import to_train_config
from fourfold.context.attention import IMPLEMENTATION
from fourfold.layout import Layout
from fourfold.legality import check
from fourfold.planner.advise import SERVER, Advice, Question, advise, memory_of
from fourfold.planner.advise_show import command, in_short, overrides, read_model, reasons, show_advice
from fourfold.planner.fit import in_flight
from fourfold.planner.held import held_parameters, stages_of_rank
from fourfold.planner.parameters import parameter_count
from fourfold.planner.schedule import simulate, table
from fourfold.planner.shapes import of_size
from fourfold.schema import Checkpointing, PipelineConfig, TrainConfig
from tests.golden.composing import composed

SIZES = ("135M", "1.2B", "8B", "30B", "70B", "405B", "1T")
GPUS = (1, 2, 7, 8, 12, 64, 128, 256, 512, 1000, 1024, 2048, 16384)
LENGTHS = (100, 4096, 8192, 32768, 131072)


def asked(size: str, gpus: int, seq_len: int, **more: Any) -> Advice:
    return advise(Question(model=read_model(size)[0], gpus=gpus, seq_len=seq_len, **more))


@pytest.mark.parametrize("size", SIZES)
def test_every_advice_is_legal(size: str) -> None:
    """By the rules of the layout and of the model, and it says truly whether it fits."""
    for gpus in GPUS:
        for seq_len in LENGTHS:
            found = asked(size, gpus, seq_len)
            config, layout = found.config, found.layout
            assert check(config, world_size=gpus, environment={}) == layout
            model = copy(found.question.model)
            model.max_position_embeddings = max(seq_len, model.max_position_embeddings)  # as the command stretches it
            check(config, world_size=gpus, model_config=model, attn_implementation=IMPLEMENTATION)
            assert found.memory == memory_of(config, layout=layout, model_config=model)
            assert found.fits == (found.memory.total <= 0.9 * 80e9)
            assert found.in_budget == (config.global_batch_size <= found.question.rows)
            assert SERVER % layout.tp_size == 0
            assert found.question.node % layout.tp_size == 0


@pytest.mark.parametrize(
    ("size", "gpus", "seq_len", "layout", "stage"),
    [
        ("135M", 64, 2048, Layout(dp_replicate_size=64), 0),
        ("135M", 256, 2048, Layout(dp_shard_size=256), 3),
        ("8B", 64, 4096, Layout(dp_shard_size=64), 3),
        ("8B", 256, 8192, Layout(dp_shard_size=256), 3),
        ("8B", 512, 8192, Layout(dp_shard_size=8, dp_replicate_size=64), 3),
        ("8B", 64, 131072, Layout(cp_size=16, dp_shard_size=4), 3),
        ("70B", 512, 8192, Layout(tp_size=8, pp_size=2, dp_shard_size=32), 1),
        ("405B", 16384, 131072, Layout(tp_size=8, cp_size=16, pp_size=8, dp_shard_size=16), 1),
    ],
)
def test_the_steps_of_the_guide(size: str, gpus: int, seq_len: int, layout: Layout, stage: int) -> None:
    found = asked(size, gpus, seq_len)
    assert (found.layout, found.config.zero.stage) == (layout, stage)
    assert found.fits
    assert found.in_budget


def test_checkpointing_only_where_activations_do_not_fit() -> None:
    roomy, tight = (asked("8B", 64, 8192, gpu_gb=gb) for gb in (80, 40))
    assert roomy.config.activation.checkpointing is Checkpointing.none
    assert tight.config.activation.checkpointing is Checkpointing.full
    assert tight.layout == roomy.layout
    assert "activation=none would hold" in " ".join(reasons(tight))


def test_the_batch_is_a_budget() -> None:
    """256 GPUs and 64 rows: tensor parallelism spends none; of one row for 64 GPUs nothing in a server can make do."""
    found = asked("8B", 256, 8192, batch_tokens=64 * 8192)
    assert found.in_budget
    assert found.layout.data_size * found.layout.pp_size <= 64 == found.config.global_batch_size
    beyond = asked("8B", 1000, 100, batch_tokens=100)
    assert not beyond.in_budget
    assert beyond.config.global_batch_size == beyond.layout.data_size * beyond.layout.pp_size
    assert "more than the budget of 1" in " ".join(reasons(beyond))


def test_what_fits_nowhere_is_said() -> None:
    found = asked("405B", 8, 8192)
    assert not found.fits
    assert "nothing fits" in list(reasons(found))[-1]
    assert "does not fit" in in_short(found)


def test_memory_is_filled() -> None:
    """One more doubling of the micro-batch would not fit, or would not divide the batch."""
    found = asked("1.2B", 64, 4096)
    assert found.config.micro_batch_size > 1
    larger = copy(found.config)
    larger.micro_batch_size *= 2
    assert not memory_of(larger, layout=found.layout, model_config=found.question.model).fits(80e9)


@pytest.mark.parametrize(
    ("size", "gpus", "seq_len", "tier"),
    [
        ("135M", 8, 2048, "dp"),
        ("135M", 8, 32768, "long_context"),
        ("8B", 512, 8192, "hsdp"),
        ("12B", 12, 8192, "zero3_checkpointed"),
        ("8B", 2048, 8192, "tensor"),
        ("70B", 512, 8192, "pipeline"),
        ("405B", 16384, 131072, "nd"),
    ],
)
def test_the_command_is_the_advice(size: str, gpus: int, seq_len: int, tier: str) -> None:
    found = asked(size, gpus, seq_len)
    words = overrides(found, model=size, name=read_model(size)[1])
    assert f"tier={tier}" in words
    config = to_train_config(composed(*words))
    assert check(config, world_size=gpus, environment={}) == found.layout
    for part in ("zero", "activation", "pipeline", "global_batch_size", "micro_batch_size", "seq_len"):
        assert getattr(config, part) == getattr(found.config, part), part
    assert (config.model.max_position_embeddings == seq_len) == (size == "135M" and seq_len > 8192)
    text = command(found, model=size, name=read_model(size)[1])
    servers = {8: "--num_processes 8", 12: "--nodes=2 --gpus-per-node=6"}
    assert servers.get(gpus, f"--nodes={gpus // 8} ") in text


def test_sizes_are_models() -> None:
    exact = {"8B": 8_030_261_248, "70B": 70_553_706_496, "405B": 405_853_388_800}
    for size, parameters in exact.items():
        assert parameter_count(read_model(size)[0]) == parameters
    between, name = read_model("30B")
    assert parameter_count(between) == pytest.approx(30e9, rel=0.02)
    assert "layers as wide as" in name
    assert of_size("gpt2") is None


@pytest.mark.parametrize(("schedule", "ranks"), [("1f1b", 4), ("interleaved_1f1b", 4), ("interleaved_1f1b", 2)])
@pytest.mark.parametrize("micro_batches", [4, 16])
def test_passes_in_flight_are_those_of_the_schedule(schedule: str, ranks: int, micro_batches: int) -> None:
    settings = PipelineConfig(schedule=schedule)
    each = 1 if schedule == "1f1b" else 2
    what = table(settings, ranks=ranks, micro_batches=micro_batches)
    peaks = simulate(what, costs=[1.0] * ranks * each, backward=2.0).peaks
    found = [each * in_flight(settings, rank=rank, ranks=ranks, micro_batches=micro_batches) for rank in range(ranks)]
    assert found == peaks


def test_pipeline_ranks_hold_the_model_together() -> None:
    model = read_model("405B")[0]
    stages = [
        stage
        for rank in range(16)
        for stage in stages_of_rank(PipelineConfig(), layout=Layout(pp_size=16), model_config=model, rank=rank)
    ]
    held = held_parameters(model, stages=stages, tp_size=1)
    assert sum(one.counted for one in held) == parameter_count(model) == 405_853_388_800
    assert sum(stage.layers for stage in stages) == 126


def test_terms_of_zero() -> None:
    """The guide: of 7.5B parameters over 64 GPUs ZeRO-1 leaves 31.4 GB a GPU (2 + 2 + 12/64 bytes), without fp32 sums."""
    model = read_model("8B")[0]
    config = TrainConfig(name="n", global_batch_size=64)
    config.zero.stage = 1
    found = memory_of(config, layout=Layout(dp_shard_size=64), model_config=model)
    per = [term / parameter_count(model) for term in (found.weights, found.gradients, found.optimizer)]
    assert per == pytest.approx([2, 2 + 4, 12 / 64])


def test_wrong_questions() -> None:
    with pytest.raises(ValueError, match=r"no folder .*no size such as 8B"):
        show_advice("nowhere", gpus=8, seq_len=128, batch_tokens=None, gpu_gb=80)
    with pytest.raises(ValueError, match="--gpus 0: use more than 0"):
        asked("8B", 0, 128)


def test_imports_no_torch() -> None:
    code = "import sys, fourfold.planner.advise, fourfold.planner.advise_show; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
