"""Runs whose rows are spread over ranks: every strategy on CPU, long curves, checkpoints that change the layout."""

from pathlib import Path
from typing import Any

import pytest
import torch

from fourfold.layout import Layout
from fourfold.schema import OptimConfig, TrainConfig
from tests.parity.context_model_ranks import SPREAD, attention
from tests.parity.resume_ranks import resume_from_all, save_after_two
from tests.parity.run_ranks import metrics, whole_run
from tests.parity.strategies import settings
from tests.pool import RankPool
from tests.reference import tiny_model, worst

QUICK = ["task=quickstart", "debug=cpu", "seq_len=24", "export=false"]
SHORT = ["data.long_documents=truncate"]  # one row a document: evaluation is soon done
SAME = ("train/tokens", "train/targets", "train/padding", "train/learning_rate")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"cache_dir={tmp_path_factory.mktemp('cache')}"


def check_same(got: Path, want: Path, *, updates: int) -> None:
    """What does not depend on rounding."""
    for key in SAME:
        assert len(metrics(want, key)) == updates, key
        assert metrics(got, key) == metrics(want, key), key


@pytest.fixture(scope="module")
def alone(ranks: RankPool, cache: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Output folder of three updates on one process."""
    output = tmp_path_factory.mktemp("alone")
    ranks.run(1, whole_run, overrides=[*QUICK, *SHORT, cache, f"output_dir={output}"])
    return output


@pytest.mark.parametrize("way", [*SPREAD, "auto"])
def test_c12_every_strategy_trains_on_cpu(ranks: RankPool, cache: str, alone: Path, tmp_path: Path, way: str) -> None:
    """pytorch#147793: no strategy needs a GPU, and the run is that of one process."""
    more = [f"output_dir={tmp_path}", "cp_size=2", f"attention={way}", "tier=zero3"]
    assert ranks.run(2, whole_run, overrides=[*QUICK, *SHORT, cache, *more]) == [0, 0]
    check_same(tmp_path, alone, updates=3)
    assert metrics(tmp_path, "eval/targets") == metrics(alone, "eval/targets") == {3: 46}
    for key in ("train/loss", "train/grad_norm", "eval/loss"):
        assert metrics(tmp_path, key) == pytest.approx(metrics(alone, key), rel=1e-5), key


@pytest.mark.slow
def test_a_hundred_updates_are_those_of_one_process(ranks: RankPool, cache: str, tmp_path: Path) -> None:
    """At a third of the task's learning rate: at all of it, other micro-batches on one process alone end up elsewhere."""
    more = [*QUICK, cache, "max_steps=100", "data.eval_documents=0", "optim.learning_rate=1e-3", "micro_batch_size=2"]
    whole, split = tmp_path / "whole", tmp_path / "split"
    ranks.run(1, whole_run, overrides=[*more, f"output_dir={whole}"])
    ranks.run(2, whole_run, overrides=[*more, f"output_dir={split}", "cp_size=2"])
    check_same(split, whole, updates=100)
    losses = metrics(whole, "train/loss")
    assert metrics(split, "train/loss") == pytest.approx(losses, rel=1e-5)
    assert metrics(split, "train/grad_norm") == pytest.approx(metrics(whole, "train/grad_norm"), rel=1e-4)
    assert losses[100] < losses[1] - 1, "it learns"


CONTEXT = {  # name: (stage, layout, attention)
    "cp 2": (3, Layout(cp_size=2), "ring"),
    "dp 2": (2, Layout(dp_shard_size=2), None),
    "cp 2 x dp 2": (1, Layout(cp_size=2, dp_replicate_size=2), "ulysses"),
}


def resume_settings(name: str) -> TrainConfig:
    stage, _, way = CONTEXT[name]
    config = settings(stage=stage, optim=OptimConfig(max_grad_norm=0.3))
    if way is not None:
        config.attention = attention(way)
    return config


def test_checkpoints_go_on_with_other_context_ranks(ranks: RankPool, tmp_path: Path) -> None:
    """Every layout's state is loaded bit by bit by every other, and its next update is that of the uninterrupted run."""
    folder = tmp_path / "model"
    tiny_model(tied=True).save_pretrained(folder)
    checkpoints: dict[str, Path] = {}
    thirds: dict[str, dict[str, Any]] = {}
    for name, (_, layout, _) in CONTEXT.items():
        output = tmp_path / name
        task = {"folder": folder, "config": resume_settings(name), "layout": layout, "output": output}
        thirds[name] = ranks.run(layout.world_size, save_after_two, **task, in_background=False)[0]
        checkpoints[name] = output / "step-00000002"
    for name, (_, layout, _) in CONTEXT.items():
        task = {"folder": folder, "config": resume_settings(name), "layout": layout}
        for result in ranks.run(layout.world_size, resume_from_all, **task, checkpoints=checkpoints):
            assert len(result) == len(CONTEXT)
            for source, found in result.items():
                want = thirds[source]
                assert not found["wrong"], (name, source, found["wrong"])
                assert found["loss"] == pytest.approx(want["loss"], rel=1e-6), (name, source)
                assert found["norm"] == pytest.approx(want["norm"], rel=1e-5), (name, source)
                distance, tensor = worst(found["state"], want["state"])
                assert distance < 1e-4, (name, source, tensor)
                if source == name:
                    assert (found["loss"], found["norm"]) == (want["loss"], want["norm"])
                    assert all(torch.equal(found["state"][key], want["state"][key]) for key in want["state"])
