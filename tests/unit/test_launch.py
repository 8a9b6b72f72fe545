"""The command to go on with, rebuilt from the processes above, and the files of tools/launch."""

import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from fourfold import launch
from fourfold.schema import TrainConfig
from tests.golden.composing import NAMED, typed

LAUNCH = Path(__file__).resolve().parents[2] / "tools" / "launch"
PYTHON = "/home/me/.venv/bin/python3"
ACCELERATE = [PYTHON, "/home/me/.venv/bin/accelerate", "launch", "--config_file", "cpu.yaml", "-m", "fourfold"]


class Process:
    def __init__(self, words: list[str]) -> None:
        self._words = words

    def cmdline(self) -> list[str]:
        return self._words


def go_on(
    words: list[str], monkeypatch: pytest.MonkeyPatch, *, config: TrainConfig | None = None, step: int = 3
) -> str:
    monkeypatch.setattr(launch, "_launchers", lambda: [Process(words)])
    return launch.command_to_go_on(step, config=config or typed(*NAMED))


def test_what_was_typed_with_more_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    typed_words = [*ACCELERATE, "task=quickstart", "max_steps=3", "overwrite=true", "resume=none", "zero=stage3"]
    command = go_on(typed_words, monkeypatch)
    assert command == (
        "accelerate launch --config_file cpu.yaml -m fourfold task=quickstart zero=stage3 max_steps=6 resume=auto"
    )


@pytest.mark.parametrize(
    ("words", "start"),
    [
        (["uv", "run", "accelerate", "launch", "-m", "fourfold", "a=1"], "uv run accelerate launch -m fourfold a=1 "),
        (["/usr/bin/uv", "run", "fourfold", "train", "a=1"], "uv run fourfold train a=1 "),
        ([PYTHON, "/opt/bin/torchrun", "-m", "fourfold", "a=1"], "torchrun -m fourfold a=1 "),
        ([*ACCELERATE, "output_dir=a b"], "accelerate launch --config_file cpu.yaml -m fourfold 'output_dir=a b' "),
        ([*ACCELERATE, "++max_steps=4", "+max_steps=4"], "accelerate launch --config_file cpu.yaml -m fourfold max"),
    ],
)
def test_launchers(words: list[str], start: str, monkeypatch: pytest.MonkeyPatch) -> None:
    command = go_on(words, monkeypatch)
    assert command.startswith(start)
    assert shlex.split(command)[-2:] == ["max_steps=6", "resume=auto"]


def test_epochs_give_way_to_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    command = go_on([*ACCELERATE, "num_epochs=2"], monkeypatch, config=typed(*NAMED, "num_epochs=2"))
    assert command.endswith("-m fourfold num_epochs=null max_steps=6 resume=auto")


@pytest.mark.parametrize("word", ["+tracker.init_kwargs.wandb.api_key=hunter2", "++a.HF_TOKEN=hunter2"])
def test_secrets_are_not_printed(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    command = go_on([*ACCELERATE, word, "tracker.project=p"], monkeypatch)
    assert "hunter2" not in command
    assert f"{word.partition('=')[0]}=***" in command
    assert "tracker.project=p" in command


def test_without_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_launchers", list)
    monkeypatch.setattr("sys.argv", ["/home/me/plugins/fourfold/__main__.py", "task=quickstart"])
    assert shlex.split(launch.command_to_go_on(2, config=typed(*NAMED)))[1:] == (
        ["-m", "fourfold", "task=quickstart", "max_steps=4", "resume=auto"]
    )
    monkeypatch.setattr("sys.argv", ["/home/me/.venv/bin/fourfold", "task=quickstart"])
    assert launch.command_to_go_on(2, config=typed(*NAMED)).startswith("fourfold train task=quickstart ")


def test_a_run_began_when_its_process_did() -> None:
    import time

    assert 0 <= time.time() - launch.launched_at() < 24 * 3600


# --------------------------------------------------------------------------------------------------- tools/launch

FILES = {path.name: yaml.safe_load(path.read_text()) for path in sorted(LAUNCH.glob("*.yaml"))}


def test_the_files_are_there() -> None:
    assert set(FILES) == {"cpu.yaml", "node8.yaml", "multinode.yaml"}
    assert [FILES[name]["num_processes"] for name in ("cpu.yaml", "node8.yaml", "multinode.yaml")] == [2, 8, 16]
    assert FILES["multinode.yaml"]["num_machines"] == 2


@pytest.mark.parametrize("name", FILES)
def test_accelerate_reads_them_and_they_hold_no_strategy(name: str) -> None:
    from accelerate.commands.config.config_args import ClusterConfig

    settings: dict[str, Any] = FILES[name]
    assert set(settings) <= set(ClusterConfig.__dataclass_fields__)
    assert settings["distributed_type"] == "MULTI_GPU", "accelerate starts one process otherwise"
    assert settings["mixed_precision"] == "no"
    assert not [key for key in settings if "deepspeed" in key or "fsdp" in key or "parallelism" in key]
    ClusterConfig.from_yaml_file(str(LAUNCH / name))


def test_slurm_script_starts_a_launcher_on_each_server(tmp_path: Path) -> None:
    """With stand-ins for srun (as on two servers) and torchrun (prints what it is given)."""
    stand_ins = {
        "scontrol": 'test "$*" = "show hostnames nodes[7-8]" && printf "node7\\nnode8\\n"',
        "srun": 'shift; for id in 0 1; do SLURM_NODEID=$id "$@" || exit 1; done',
        "torchrun": 'printf "%s|" "$@"; echo',
    }
    for name, body in stand_ins.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "41234",
        "SLURM_JOB_NODELIST": "nodes[7-8]",
        "SLURM_NNODES": "2",
        "SLURM_GPUS_ON_NODE": "8",
    }
    command = ["bash", str(LAUNCH / "slurm.sh"), "task=smollm2", "output_dir=with space", "hydra.searchpath=[a,b]"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
    lines = [line.split("|")[:-1] for line in result.stdout.splitlines()]
    for node, words in enumerate(lines):
        assert words == [
            *("--nnodes", "2", "--node_rank", str(node), "--nproc_per_node", "8"),
            *("--master_addr", "node7", "--master_port", "21234", "-m", "fourfold", *command[2:]),
        ]
    assert len(lines) == 2


def test_slurm_script_outside_a_job() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    result = subprocess.run(["bash", str(LAUNCH / "slurm.sh")], env=environment, capture_output=True, text=True)
    assert result.returncode != 0
    assert "sbatch" in result.stderr
