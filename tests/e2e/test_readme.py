"""Every command in a README is run, or where it asks for GPUs, composed and checked as far as the launch."""

import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fourfold.paths import RECIPES
from tests.compose import composed
from tests.e2e.launching import warm

ROOT = RECIPES.parent
BIN = Path(sys.executable).parent


def commands(path: Path) -> list[str]:
    """Lines of ```bash blocks and `inline code` that call our command, with continued lines joined."""
    text = path.read_text().replace("\\\n", " ")
    blocks = re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    lines += re.findall(r"`((?:accelerate launch|fourfold|python tools)[^`\n]*)`", text)
    lines += re.findall(r"^    ((?:accelerate launch|fourfold) [^#\n]*)", text, flags=re.MULTILINE)
    return sorted({line.strip() for line in lines if line.strip()})


def overrides(command: str) -> list[str] | None:
    """Hydra's part of a training command."""
    words = shlex.split(command)
    if "-m" not in words or "--config-dir" in words or "..." in words:
        return None
    return words[words.index("fourfold", words.index("-m")) + 1 :]


COMMANDS = sorted({command for name in ("README.md", "recipes/README.md") for command in commands(ROOT / name)})


def test_the_readme_has_the_two_commands_and_more() -> None:
    first = (
        "pip install -q uv && uv run accelerate launch --config_file tools/launch/cpu.yaml -m fourfold task=quickstart"
    )
    assert {first, "uv run pytest"} <= set(COMMANDS)
    assert len(COMMANDS) > 10


@pytest.mark.parametrize("command", [command for command in COMMANDS if overrides(command) is not None])
def test_training_command_composes_and_its_files_exist(command: str) -> None:
    config, _ = composed(*(overrides(command) or []))
    assert config.name
    words = shlex.split(command)
    assert (ROOT / words[words.index("--config_file") + 1]).is_file()


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder in which README's first command has run (less the installation, and with its output there)."""
    place = tmp_path_factory.mktemp("quickstart")
    done = run(f"accelerate launch --config_file {ROOT}/tools/launch/cpu.yaml -m fourfold task=quickstart", place)
    for part in ("loss", "tokens/s", "checkpoint", "Hugging Face", "go on"):
        assert part in done.stdout, part
    return place


def run(command: str, place: Path) -> subprocess.CompletedProcess[str]:
    program, *arguments = shlex.split(command)
    done = subprocess.run(
        [str(BIN / program), *arguments], cwd=place, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def run_together(commands: list[str], place: Path) -> list[str]:
    """What they print. A command imports for seconds, on one core."""
    with ThreadPoolExecutor(len(commands)) as pool:
        return [done.stdout for done in pool.map(lambda command: run(command, place), commands)]


def test_quickstart_learns_and_its_export_loads(quickstart: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    done = (quickstart / "runs" / "quickstart" / "metrics.jsonl").read_text()
    losses = [float(value) for value in re.findall(r'"train/loss": ([\d.]+)', done)]
    assert len(losses) == 60
    assert losses[-1] < losses[0] - 1.0
    assert list((quickstart / "runs" / "quickstart" / "trackers").rglob("events.out.tfevents.*"))
    export = quickstart / "runs" / "quickstart" / "export"
    AutoModelForCausalLM.from_pretrained(export)
    AutoTokenizer.from_pretrained(export)


def test_export_command(quickstart: Path) -> None:
    assert "fourfold export runs/quickstart exported" in COMMANDS
    assert "fourfold export runs/quickstart exported-deepspeed --to deepspeed" in COMMANDS
    run_together(
        [
            "fourfold export runs/quickstart exported",
            "fourfold export runs/quickstart exported-deepspeed --to deepspeed",
        ],
        quickstart,
    )
    assert (quickstart / "exported" / "model.safetensors").is_file()
    assert (quickstart / "exported-deepspeed" / "latest_universal").read_text() == "global_step60"


def test_settings_data_plan_and_advise_commands(tmp_path: Path) -> None:
    settings, data = "fourfold train --cfg job task=quickstart tier=hsdp", "fourfold data --rows 3 task=quickstart"
    (plan,) = [command for command in COMMANDS if command.startswith("fourfold plan --timeline")]
    (large,) = [command for command in COMMANDS if command.startswith("fourfold plan task=llama3_405b")]
    (dry,) = [command for command in COMMANDS if command.startswith("fourfold dry-run --")]
    (advise,) = [command for command in COMMANDS if command.startswith("fourfold advise --")]
    (export,) = [command for command in COMMANDS if command.startswith("fourfold export --to")]
    assert {settings, data} <= set(COMMANDS)
    shown, rows, timeline, advice, exported, sizes, counted = run_together(
        [settings, data, plan, advise, export, large, dry], tmp_path
    )
    assert "dp_replicate_size: -1" in shown
    for part in ("documents", "best_fit", "tokens of a document", "row 3", "⟦"):
        assert part in rows, part
    for part in ("4 of 1, 1, 1, 1 layers", "of the ranks' time", "rank 3"):
        assert part in timeline, part
    for part in ("activations GB", "because", "256:", "1024:", "task=llama3_70b tier=pipeline"):
        assert part in advice, part
    assert "--tensor-model-parallel-size 2" in exported
    for part in ("405,853,388,800", "*full", "activations GB", "dp_shard x cp group", "of the ranks' time"):
        assert part in sizes, part
    for part in ("405,853,388,800", "tp 1, cp 7, pp 0", "lie inside of servers"):
        assert part in counted, part
    assert (tmp_path / "pipeline.svg").read_text().startswith("<svg")
    assert len(list(tmp_path.iterdir())) == 1


def test_verify_command(tmp_path: Path) -> None:
    command = "fourfold verify task=quickstart tier=zero2 tp_size=2"
    assert command in COMMANDS
    done = run(command, tmp_path)
    for part in ("tp 2 x dp_shard 2: equal", "gradient norm", "bytes, tp", "EQUAL to one process: 1 layout"):
        assert part in done.stdout, done.stdout
    assert "pass 1 of 1" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow  # eight ranks, four times
def test_verify_command_of_every_axis(tmp_path: Path) -> None:
    assert "fourfold verify tier=nd" in COMMANDS
    assert "EQUAL to one process: 4 layouts" in run("fourfold verify tier=nd", tmp_path).stdout


def test_laptop_command(tmp_path: Path) -> None:
    command = "-m fourfold task=smollm2 tier=zero3_checkpointed debug=cpu"
    assert any(command in known for known in COMMANDS)
    done = warm(*shlex.split(command)[2:], folder=tmp_path, world=2)
    assert done.code == 0, done.err
