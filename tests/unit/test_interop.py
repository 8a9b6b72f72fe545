"""Settings of a recipe for other launchers. Their names are checked against the launchers' own lists: those of accelerate and
DeepSpeed, which are installed; those of Megatron-LM (d98e8a6) and torchtitan (b5bcd76, both August 2026) as files beside."""

import json
import os
import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from fourfold.cli import _is_recipe, _to_a_reader
from fourfold.interop.megatron import layer_layout
from fourfold.interop.show import LAUNCHERS, show_settings
from tests.compose import composed

NAMES = Path(__file__).parents[1] / "golden" / "interop"
LAYOUTS = {
    "dp": (2, ["tier=dp"]),
    "zero2": (4, ["tier=zero2"]),
    "zero3": (4, ["tier=zero3_checkpointed"]),
    "offload": (2, ["tier=zero3_offload"]),
    "hsdp": (4, ["tier=hsdp", "dp_shard_size=2", "dp_replicate_size=2"]),
    "hybrid": (4, ["cp_size=4", "attention=hybrid", "attention.ulysses_size=2"]),
    "ring": (4, ["tp_size=2", "cp_size=2", "attention=ring", "zero=stage3"]),
    "pipeline": (4, ["pp_size=2", "pipeline.split=[1,3]", "activation=every_n", "activation.every_n=2"]),
    "zbv": (2, ["pp_size=2", "pipeline.schedule=zbv", "optim=sgd"]),
    "nd": (8, ["tier=nd", "debug=cpu", "optim.lr_scheduler_type=wsd", "optim.decay_steps=1"]),
}


@pytest.fixture(params=LAYOUTS)
def recipe(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[int, list[str]]:
    gpus, overrides = LAYOUTS[request.param]
    more = [f"model.path={tmp_path / 'tiny'}", "micro_batch_size=1", "global_batch_size=8"]
    return gpus, ["task=quickstart", *overrides, *more]


def test_options_of_hydra_may_come_before_a_recipe(tmp_path: Path) -> None:
    (tmp_path / "lr=1").mkdir()
    assert _is_recipe(["--config-dir", str(tmp_path), "task=quickstart"])
    assert _is_recipe(["task=quickstart", "--config-dir", str(tmp_path)])
    assert not _is_recipe([str(tmp_path / "lr=1"), str(tmp_path / "lr=2")])


def test_a_reader_may_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    there, here = os.pipe()
    os.close(there)
    with os.fdopen(here, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        assert _to_a_reader(lambda: print("more") or 0) == 1  # type: ignore[func-returns-value]


def said(to: str, recipe: tuple[int, list[str]], capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    show_settings(composed(*recipe[1])[0], to=to, gpus=recipe[0])
    captured = capsys.readouterr()
    return captured.out, captured.err


def megatron_arguments(text: str) -> dict[str, list[str]]:
    words = shlex.split(text.replace("\\\n", " "))
    found: dict[str, list[str]] = {}
    for word in words[words.index("pretrain_gpt.py") + 1 :]:
        if word.startswith("--"):
            found[word[2:]] = []
        else:
            found[list(found)[-1]].append(word)
    return found


def test_megatron_knows_every_argument(recipe: tuple[int, list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    known = (NAMES / "megatron_arguments.txt").read_text().split()
    assert set(megatron_arguments(said("megatron", recipe, capsys)[0])) <= set(known)


def test_torchtitan_knows_every_field(recipe: tuple[int, list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    text, _ = said("torchtitan", recipe, capsys)
    known = (NAMES / "torchtitan_fields.txt").read_text().split()
    fields = re.findall(r"^config\.([\w.]+) = ", text, flags=re.MULTILINE)
    assert fields
    assert set(fields) <= set(known)
    compile(text, "config", "exec")


def test_accelerate_takes_the_file(
    recipe: tuple[int, list[str]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    file = tmp_path / "accelerate.yaml"
    file.write_text(said("accelerate", recipe, capsys)[0])
    arguments, *_ = _validate_launch_command(
        launch_command_parser().parse_args(["--config_file", str(file), "train.py"])
    )
    assert arguments.num_processes == recipe[0]
    assert arguments.use_deepspeed != bool(arguments.use_fsdp)


def test_the_parallelism_config_makes_as_many_processes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from accelerate.parallelism_config import ParallelismConfig

    overrides = ["task=quickstart", "tp_size=2", "cp_size=2", "dp_shard_size=2", "dp_replicate_size=2", "zero=stage3"]
    more = [f"model.path={tmp_path / 'tiny'}", "micro_batch_size=1"]
    text, _ = said("accelerate", (16, [*overrides, *more]), capsys)
    section: dict[str, Any] = yaml.safe_load(text)["parallelism_config"]
    sizes = {key.removeprefix("parallelism_config_"): value for key, value in section.items() if key.endswith("_size")}
    assert ParallelismConfig(**sizes).total_size == 16


def test_deepspeed_gets_the_json_of_a_run(recipe: tuple[int, list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    capsys.readouterr()  # what its import says
    settings = json.loads(said("deepspeed", recipe, capsys)[0])
    config = DeepSpeedConfig(settings, mpu=SimpleNamespace(get_data_parallel_world_size=lambda: 1))
    assert config.zero_enabled


def test_values_and_what_cannot_be_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    more = [f"model.path={tmp_path / 'tiny'}", "micro_batch_size=1", "global_batch_size=8"]
    nd = (8, ["task=quickstart", "tier=nd", "debug=cpu", *more, "pipeline.split=[1,1,1,1]"])
    text, unsaid = said("megatron", nd, capsys)
    found = megatron_arguments(text)
    sizes = [f"{name}-size" for name in ("tensor-model-parallel", "context-parallel", "pipeline-model-parallel")]
    assert [found[name] for name in sizes] == [["2"], ["2"], ["2"]]
    assert found["pipeline-model-parallel-layout"] == ["Et*1|t*1|t*1|t*1L"]
    assert found["recompute-modules"] == ["layernorm", "mlp"]
    assert "attention.name=needed_only" in unsaid
    assert "activation.checkpointing=selective" in unsaid
    text, unsaid = said("torchtitan", nd, capsys)
    assert "config.parallelism.pipeline_parallel_schedule = 'Interleaved1F1B'" in text
    assert "config.parallelism.num_pp_microbatches = 8" in text
    assert "zero.stage=1" in unsaid
    assert "pipeline.split=[1, 1, 1, 1]" in unsaid
    _, unsaid = said("accelerate", nd, capsys)
    assert "pp_size=2" in unsaid
    assert "8 micro-batches" in unsaid


def test_layers_of_stages() -> None:
    assert layer_layout([3, 2, 1]) == "Et*3|t*2|t*1L"


@pytest.mark.parametrize("to", LAUNCHERS)
def test_what_a_run_refuses_is_refused(to: str) -> None:
    with pytest.raises(ValueError, match="tp_size=3"):
        show_settings(composed("task=quickstart", "tp_size=3")[0], to=to, gpus=2)


def test_a_model_that_is_not_on_the_disk(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """By its name its sizes may be known; else the parallel settings are said without it."""
    overrides = ["task=llama3_8b", "tier=zero3", "data.path=docs.jsonl", "global_batch_size=8", "micro_batch_size=1"]
    text, unsaid = said("megatron", (8, overrides), capsys)
    assert megatron_arguments(text)["num-layers"] == ["32"]
    assert "rope and the norms' epsilon" in unsaid

    def out_of_reach(model: Any) -> None:
        raise ValueError("no network")

    monkeypatch.setattr("fourfold.interop.show.config_to_plan", out_of_reach)
    text, unsaid = said("megatron", (8, [*overrides, "model.path=of/another"]), capsys)
    assert "--num-layers" not in text
    assert "the model's own sizes" in unsaid
