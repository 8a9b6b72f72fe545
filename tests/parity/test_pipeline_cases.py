"""Pipelines at the edges: public bug reports, evaluation, short updates, bf16, checkpoints of other layouts."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fourfold.layout import Layout
from fourfold.pipeline.schedules import SCHEDULES
from fourfold.schema import OptimConfig, PipelineConfig, Precision, TrainConfig
from tests.families import family_model, save_family
from tests.parity.context_model_ranks import packed
from tests.parity.pipeline_ranks import (
    bf16_truth,
    evaluated,
    norms_by_accumulation,
    plain_gradients,
    short_updates,
    whole_gradients,
)
from tests.parity.run_ranks import refused_run
from tests.parity.strategies import settings
from tests.parity.zero_ranks import train
from tests.pool import RankPool
from tests.reference import Reference, worst

PP2 = Layout(pp_size=2)
FIXED = OptimConfig(name="sgd", learning_rate=0.0, weight_decay=0.0, max_grad_norm=0.0)


def config(
    schedule: str, *, stage: int = 1, optim: OptimConfig = FIXED, precision: Precision = Precision.fp32
) -> TrainConfig:
    made = settings(stage=stage, optim=optim, precision=precision)
    return replace(made, pipeline=PipelineConfig(schedule=schedule))


LAYERS = {2: 5, 4: 9}
EXACT = [PipelineConfig(schedule=schedule) for schedule in SCHEDULES]
EXACT += [
    PipelineConfig(schedule=schedule, virtual_stages=1)
    for schedule in ("looped_bfs", "interleaved_1f1b", "zero_bubble")
]


@pytest.mark.parametrize("world", [2, 4])
def test_every_schedule_is_exact(ranks: RankPool, world: int) -> None:
    """In float64, of 8 micro-batches: losses and every gradient, the tied matrix's by its use at either end."""
    batch = packed(0, rows=8)
    (truths,) = ranks.run(1, whole_gradients, layers=[LAYERS[world]], batch=batch)
    (truth,) = truths
    results = ranks.run(world, plain_gradients, ways=[(way, LAYERS[world]) for way in EXACT], batch=batch)
    for number, way in enumerate(EXACT):
        found: dict[str, torch.Tensor] = {}
        for result in results:
            assert torch.allclose(result[number]["losses"], truth["losses"], rtol=1e-6), way
            for name, gradient in result[number]["gradients"].items():
                assert name not in found, name
                found[name] = gradient
        if way.schedule in ("zbv", "dualpipe_v"):  # both ends on one rank, where the matrix is one parameter
            found["lm_head.weight"] = (
                found["model.embed_tokens.weight"] - truth["gradients"]["model.embed_tokens.weight"]
            )
            found["model.embed_tokens.weight"] = truth["gradients"]["model.embed_tokens.weight"]
        assert found.keys() == truth["gradients"].keys()
        for name, gradient in found.items():
            error = (gradient - truth["gradients"][name]).norm() / truth["gradients"][name].norm()
            assert error < 1e-12, (way, name)


def test_p01_the_norm_does_not_depend_on_accumulation(ranks: RankPool, tmp_path: Path) -> None:
    """torchtitan#1733: gradients divided again at the end of every schedule."""
    truth = Reference(family_model("llama")).step(packed(0, rows=8))[1]
    folder = save_family("llama", tmp_path)
    for found in ranks.run(
        2,
        norms_by_accumulation,
        folder=folder,
        config=config("1f1b"),
        layout=PP2,
        batch=packed(0, rows=8),
        accumulations=[2, 4, 8],
    ):
        assert found == [pytest.approx(truth, rel=1e-6)] * 3


@pytest.mark.parametrize("stages", [2, 4])
def test_p03_tied_copies_stay_one_matrix(ranks: RankPool, tmp_path: Path, stages: int) -> None:
    """piper#13: gradients of the two copies summed every step, the matrix counted once in the norm and stored once. Five
    clipped steps; `train` compares the copies bit by bit after each."""
    folder = save_family("llama_tied", tmp_path, num_hidden_layers=5)
    optim = OptimConfig(name="sgd", learning_rate=0.5, weight_decay=0.0, max_grad_norm=0.3)
    steps = [packed(step, rows=8) for step in range(5)]
    model = family_model("llama_tied", num_hidden_layers=5)
    reference = Reference(model, torch.optim.SGD(model.parameters(), lr=0.5), 0.3)
    truth = [reference.step(step) for step in steps]
    for result in ranks.run(
        stages,
        train,
        folder=folder,
        config=config("1f1b", stage=2, optim=optim),
        layout=Layout(pp_size=stages),
        steps=steps,
        accumulation=4,
    ):
        assert result["loss"] == [pytest.approx(loss, rel=1e-6) for loss, _, _ in truth]
        assert result["norm"] == [pytest.approx(norm, rel=1e-5) for _, norm, _ in truth]
        assert "lm_head.weight" not in result["weights"]
        assert worst(result["weights"], reference.weights())[0] < 1e-5


@pytest.mark.parametrize(("layers", "ranks_of_pipeline"), [(3, 2), (5, 4)])
def test_p05_no_layer_is_lost(ranks: RankPool, tmp_path: Path, layers: int, ranks_of_pipeline: int) -> None:
    """Megatron-LM#1304: depths that the stages do not divide; every layer is once somewhere, and the loss is right."""
    folder = save_family("llama", tmp_path, num_hidden_layers=layers)
    model = family_model("llama", num_hidden_layers=layers)
    loss, _, gradients = Reference(model).step(packed(0, rows=8))
    for result in ranks.run(
        ranks_of_pipeline,
        train,
        folder=folder,
        config=config("1f1b"),
        layout=Layout(pp_size=ranks_of_pipeline),
        steps=[packed(0, rows=8)],
        accumulation=4,
    ):
        assert result["weights"].keys() == dict(model.named_parameters()).keys()
        assert result["loss"] == [pytest.approx(loss, rel=1e-6)]
        assert worst(result["gradients"][0], gradients)[0] < 1e-5


def test_p05_fewer_layers_than_stages_are_refused(ranks: RankPool, tmp_path: Path) -> None:
    words = [
        "task=quickstart",
        "debug=cpu",
        "pp_size=2",
        "pipeline.schedule=interleaved_1f1b",
        "pipeline.virtual_stages=3",
    ]
    words += [f"cache_dir={tmp_path / 'cache'}", f"output_dir={tmp_path}"]
    message, *_ = ranks.run(2, refused_run, overrides=words)
    assert all(part in message for part in ("6 layers", "has 4", "pipeline.virtual_stages=2"))


def test_z03_an_update_of_fewer_micro_batches_than_the_schedule_wants(ranks: RankPool, tmp_path: Path) -> None:
    """transformers#39659 with a pipeline: of 1, 3 and 2 micro-batches, and of another length; each equal to one process."""
    folder = save_family("llama_tied", tmp_path)
    batches = [packed(0, rows=1), packed(1, rows=3), packed(2, rows=2)]
    batches.append({key: values[:, :9] for key, values in packed(3, rows=3).items()})
    truths = [Reference(family_model("llama_tied")).step(batch) for batch in batches]
    for schedule in ("1f1b", "dualpipe_v"):
        for found in ranks.run(2, short_updates, folder=folder, config=config(schedule), layout=PP2, batches=batches):
            for result, (loss, norm, gradients) in zip(found, truths, strict=True):
                assert result["loss"] == pytest.approx(loss, rel=1e-6)
                assert result["norm"] == pytest.approx(norm, rel=1e-5)
                assert worst(result["gradients"], gradients)[0] < 1e-5


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zbv"])
def test_evaluation_is_that_of_one_process(ranks: RankPool, tmp_path: Path, schedule: str) -> None:
    """Between two updates, of batches of other shapes; every rank has the loss."""
    folder = save_family(
        "gemma3_text", tmp_path, num_hidden_layers=5, layer_types=["sliding_attention"] * 4 + ["full_attention"]
    )
    batches = [packed(0, rows=2), packed(1, rows=3)]
    changes = {"num_hidden_layers": 5, "layer_types": ["sliding_attention"] * 4 + ["full_attention"]}
    truths = [Reference(family_model("gemma3_text", **changes)).step(batch)[0] for batch in batches]
    for found in ranks.run(
        2,
        evaluated,
        folder=folder,
        config=config(schedule, stage=3 - 2 * (schedule == "zbv")),
        layout=PP2,
        batches=batches,
    ):
        assert found == [pytest.approx(truth, rel=1e-6) for truth in truths]


@pytest.mark.parametrize(("schedule", "stage"), [("1f1b", 1), ("interleaved_1f1b", 2), ("zbv", 1), ("1f1b", 3)])
def test_bf16_gradients_are_summed_in_fp32(ranks: RankPool, tmp_path: Path, schedule: str, stage: int) -> None:
    """Of 16 micro-batches, against plain torch that adds each one's in fp32: sums in bf16 are off by 7e-3. (Untied: one
    process adds the two gradients of a tied matrix in bf16, stages in fp32.)"""
    folder = save_family("llama", tmp_path, num_hidden_layers=4)
    batch = packed(0, rows=16)
    (truth,) = ranks.run(1, bf16_truth, folder=folder, batch=batch)
    for result in ranks.run(
        2,
        train,
        folder=folder,
        config=config(schedule, stage=stage, precision=Precision.bf16),
        layout=PP2,
        steps=[batch],
        accumulation=16,
    ):
        distance, name = worst(result["gradients"][0], truth)
        assert distance < 1e-6, name


def test_rotary_embeddings_that_depend_on_the_length_do_not_remember_others(ranks: RankPool, tmp_path: Path) -> None:
    """Micro-batches of 9 to 13 positions of a model made for 8 are on their way at the same time, on stages of one rank."""
    folder = save_family("llama_dynamic_rope", tmp_path, num_hidden_layers=5)
    batch = packed(1, rows=4)
    for row, length in enumerate((9, 10, 11, 13)):
        batch["position_ids"][row] = torch.cat([torch.arange(length), torch.zeros(13 - length, dtype=torch.long)])
        batch["labels"][row] = -100
        batch["labels"][row, : length - 1] = batch["input_ids"][row, 1:length]
        batch["document_ids"][row] = torch.where(torch.arange(13) < length, 0, -1)
    loss, norm, gradients = Reference(family_model("llama_dynamic_rope", num_hidden_layers=5)).step(batch)
    for result in ranks.run(
        2,
        train,
        folder=folder,
        config=config("interleaved_1f1b"),
        layout=PP2,
        steps=[batch],
        accumulation=4,
    ):
        assert result["loss"] == [pytest.approx(loss, rel=1e-6)]
        assert result["norm"] == [pytest.approx(norm, rel=1e-5)]
        assert worst(result["gradients"][0], gradients)[0] < 1e-5
