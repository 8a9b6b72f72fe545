"""Two processes by accelerate launch, to the end: equal to one process, complete on disk, and gone on with."""

import json
import logging
import math
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from tests.e2e.launching import (
    ACCELERATE,
    LOSS,
    NORM,
    ROOT,
    Result,
    command_to_go_on,
    run,
    updates,
    warm,
)

STEPS = 12
WORDS = ["task=quickstart", "debug=cpu", f"max_steps={STEPS}", "log_every=1"]


@dataclass(frozen=True)
class Run:
    result: Result
    output: Path
    folder: Path


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Run:
    folder = tmp_path_factory.mktemp("run")
    command = [*ACCELERATE, "-m", "fourfold", *WORDS, f"cache_dir={cache}", "output_dir=out"]
    result = run(command, folder=folder)
    assert result.code == 0, result.err
    return Run(result, folder / "out", folder)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Run:
    folder = tmp_path_factory.mktemp("run")
    result = warm(*WORDS, f"cache_dir={cache}", "output_dir=out", folder=folder)
    assert result.code == 0, result.err
    return Run(result, folder / "out", folder)


def assert_same_curve(ours: Path, theirs: Path) -> None:
    for key in (LOSS, NORM, "train/learning_rate", "train/targets", "eval/loss"):
        left, right = updates(ours, key=key), updates(theirs, key=key)
        assert set(left) == set(right), key
        for step, value in left.items():
            assert math.isclose(value, right[step], rel_tol=1e-5), (key, step, value, right[step])


def test_two_processes_train_as_one(one: Run, two: Run) -> None:
    assert set(updates(two.output)) == set(range(1, STEPS + 1))
    assert_same_curve(two.output, one.output)
    assert updates(two.output)[STEPS] < updates(two.output)[1] - 0.3, "it learns"
    assert "2 processes on cpu: dp_shard 2" in two.result.out
    assert "on cpu: one process" in one.result.out


def test_two_processes_export_as_one(one: Run, two: Run) -> None:
    from safetensors.torch import load_file

    ours, theirs = (load_file(at.output / "export" / "model.safetensors") for at in (two, one))
    assert set(ours) == set(theirs)
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-4, atol=1e-5)


def test_the_output_folder(two: Run) -> None:
    names = {path.name for path in two.output.iterdir()} - {".lock"}
    assert names == {"metrics.jsonl", "config.yaml", "run.json", "deepspeed.json", "checkpoints", "export"}
    assert [path.name for path in two.folder.iterdir()] == ["out"], "one folder, and nothing of Hydra's"
    config = OmegaConf.load(two.output / "config.yaml")
    assert (config.name, config.max_steps, config.zero.stage) == ("quickstart", STEPS, 2)
    assert json.loads((two.output / "run.json").read_text())["versions"]["deepspeed"]
    deepspeed = json.loads((two.output / "deepspeed.json").read_text())
    assert deepspeed["zero_optimization"]["stage"] == 2
    assert [path.name for path in (two.output / "checkpoints").iterdir()] == [f"step-{STEPS:08d}"]


def test_every_line_is_printed_once(two: Run) -> None:
    """L03: by the main process only; and nothing on stderr, by us or a library."""
    assert two.result.out.count("fourfold: quickstart") == 1
    assert two.result.out.count("\ndone") == 1
    for step in range(1, STEPS + 1):
        assert two.result.out.count(f"step {step}/{STEPS} ") == 1
    assert two.result.out.count("evaluation after update") == 1
    for line in ("model ", "layout ", "ZeRO ", "batch ", "precision ", "attention ", "checkpointing ", "data "):
        assert sum(text.startswith(line) for text in two.result.out.splitlines()) == 1, line
    assert two.result.err == ""


def test_transformers_loads_the_export_without_a_warning(two: Run) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    said: list[logging.LogRecord] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = said.append  # type: ignore[method-assign]
    logging.getLogger("transformers").addHandler(handler)
    try:
        model, info = AutoModelForCausalLM.from_pretrained(two.output / "export", output_loading_info=True)
        tokenizer = AutoTokenizer.from_pretrained(two.output / "export")
    finally:
        logging.getLogger("transformers").removeHandler(handler)
    assert not said
    assert not any(info.values()), info
    ids = tokenizer("import os\nimport sys\n", return_tensors="pt").input_ids
    with torch.no_grad():
        loss = model(input_ids=ids, labels=ids).loss
    assert loss.isfinite()


def test_the_export_keeps_the_users_files(two: Run, cache: Path) -> None:
    """K05: config, generation config, tokenizer and chat template as they came; the weights in the same dtype."""
    source, export = cache / "tiny-llama", two.output / "export"
    for path in source.iterdir():
        if path.suffix in (".json", ".jinja"):
            assert (export / path.name).read_bytes() == path.read_bytes(), path.name
    size = (source / "model.safetensors").stat().st_size
    assert (export / "model.safetensors").stat().st_size == pytest.approx(size, rel=0.01)
    assert "base_model" not in (export / "README.md").read_text(), "a local folder is nothing for the hub"


def test_the_command_to_go_on_goes_on(two: Run) -> None:
    """As it stands on the screen, from the same folder."""
    command = command_to_go_on(two.result.out)
    assert shlex.join(command[:2]) == "accelerate launch"
    assert command[-2:] == [f"max_steps={2 * STEPS}", "resume=auto"]
    result = run([*command, "export=false"], folder=two.folder)
    assert result.code == 0, result.err
    assert f"from update {STEPS} on" in result.out
    losses = updates(two.output)
    assert set(losses) == set(range(1, 2 * STEPS + 1))
    halves = [[losses[step] for step in range(first, first + STEPS)] for first in (1, STEPS + 1)]
    assert sum(halves[1]) < sum(halves[0]), "it goes on learning"


def test_one_rank_fails(tmp_path: Path, cache: Path) -> None:
    """L03: the trace of rank 1 with its number, a code that is not 0, and the other rank does not wait for it."""
    words = ["task=quickstart", "debug=cpu", f"cache_dir={cache}", "output_dir=out"]
    result = warm(*words, folder=tmp_path, world=2, script=str(ROOT / "tests" / "e2e" / "broken_rank.py"))
    assert result.code != 0
    assert result.seconds < 120
    assert result.err.count("[rank 1 of 2] Traceback") == 1
    assert result.err.count("OSError: cable pulled") == 1
    assert not (tmp_path / "out" / "checkpoints").exists()
