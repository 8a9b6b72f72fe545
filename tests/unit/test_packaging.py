"""One list of exact versions, no registry in the repository, a quick command line, and a search path that is only ours."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from fourfold.paths import CONF, RECIPES

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("refresh_constraints", ROOT / "tools" / "refresh_constraints.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def edit(path: Path, pattern: str, new: str) -> None:
    text, count = re.subn(pattern, new, path.read_text(), flags=re.MULTILINE)
    assert count, pattern
    path.write_text(text)


# ----------------------------------------------------------------------------------------------------- exact versions


def test_both_lists_agree(tool: ModuleType) -> None:
    assert tool.problems(ROOT) == []
    assert len(tool.pinned(ROOT / "constraints.txt")) > 100


@pytest.mark.parametrize(
    ("name", "pattern", "new", "message"),
    [
        ("constraints.txt", r"^torch==.*\n", "", "only pyproject.toml has torch=="),
        ("pyproject.toml", r'^    "tqdm==.*\n', "", "only constraints.txt has tqdm=="),
        ("constraints.txt", r"^numpy==.*", "numpy==1.0.0", "numpy==1.0.0 is outside >="),
        ("constraints.txt", r"^numpy==.*", "numpy>=1.0", "'numpy>=1.0' is not a plain name==version"),
        ("constraints.txt", r"^numpy==.*", "numpy @ https://host/numpy.whl", "is not a plain"),
        ("pyproject.toml", r"^dependencies = \[", 'dependencies = [\n    "bottle",', "bottle has no exact version"),
    ],
)
def test_disagreement_is_found(tool: ModuleType, copy: Path, name: str, pattern: str, new: str, message: str) -> None:
    edit(copy / name, pattern, new)
    assert any(message in problem for problem in tool.problems(copy)), tool.problems(copy)


def test_writing_is_what_checking_expects(tool: ModuleType, copy: Path) -> None:
    pins = ["accelerate==9.9", "torch==9.9.9"]
    before = (copy / "pyproject.toml").read_text()
    tool.write(copy, pins=pins)
    assert tool.pinned(copy / "constraints.txt") == tool.listed((copy / "pyproject.toml").read_text()) == pins
    tool.write(copy, pins=tool.listed(before))
    assert (copy / "pyproject.toml").read_text() == before, "nothing else in pyproject.toml changes"
    assert (copy / "constraints.txt").read_text() == (ROOT / "constraints.txt").read_text()
    assert "constraint-dependencies" in tool.with_list("[tool.uv]\ncompile-bytecode = true\n", pins=pins)


def test_everything_installed_below_us_is_pinned(tool: ModuleType) -> None:
    """The closure of fourfold and its development tools, as this environment has it."""
    pins = {pin.split("==")[0] for pin in tool.pinned(ROOT / "constraints.txt")}
    waiting = [requirement.name for requirement in tool.direct_requirements((ROOT / "pyproject.toml").read_text())]
    seen: set[str] = set()
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in seen:
            continue
        try:
            version(name)
        except PackageNotFoundError:
            continue  # an extra that is not installed
        seen.add(name)
        needed = map(Requirement, requires(name) or [])
        waiting += [r.name for r in needed if r.marker is None or r.marker.evaluate({"extra": ""})]
    assert {"torch", "deepspeed", "transformers", "accelerate", "pytest", "mypy"} <= seen
    assert not seen - pins


def test_no_address_of_a_registry_is_kept() -> None:
    assert "://" not in (ROOT / "constraints.txt").read_text()
    assert "://" not in (ROOT / "pyproject.toml").read_text()
    ignored = (ROOT / ".gitignore").read_text().split()
    assert {"uv.lock", "pylock*.toml"} <= set(ignored)


def test_ci_runs_what_the_readme_says_and_ends_with_pytest() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", script], check=True)
    text = script.read_text()
    assert "set -euo pipefail" in text
    steps = ["uv sync", "uv run ruff check", "uv run ruff format --check", "uv run mypy", "uv run pytest"]
    assert [line for line in text.splitlines() if line in steps] == steps
    assert text.splitlines()[-1] == "uv run pytest"


# -------------------------------------------------------------------------------------------------------- command line


def fourfold(*words: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """The console script, its loaded modules reported on the last line of stderr."""
    code = (
        "import atexit, json, sys\n"
        "atexit.register(lambda: print('\\n' + json.dumps(sorted(sys.modules)), file=sys.stderr))\n"
        f"sys.argv = ['fourfold', *{list(words)!r}]\n"
        "from fourfold.cli import main\nmain()"
    )
    return subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True
    )


ADVISE = ("advise", "--model", "405B", "--gpus", "16384", "--seq-len", "131072")
PLAN = ("plan", "task=llama3_405b", "tier=llama3_405b_128k", "seq_len=131072", "global_batch_size=128")


@pytest.mark.parametrize(
    "words", [("--help",), ("train", "--cfg", "job", "task=quickstart", "tier=zero3"), ADVISE, PLAN]
)
def test_looking_is_quick(words: tuple[str, ...], tmp_path: Path) -> None:
    """No more than 2 s of a processor, nothing heavy imported, nothing written."""
    before = os.times()
    result = fourfold(*words, folder=tmp_path)
    after = os.times()
    assert result.returncode == 0, result.stderr
    assert after.children_user + after.children_system - before.children_user - before.children_system < 2.0
    loaded = set(json.loads(result.stderr.splitlines()[-1]))
    assert not {"torch", "deepspeed", "transformers", "accelerate", "datasets"} & loaded
    assert not list(tmp_path.iterdir())


def test_help_lists_groups_and_recipes(tmp_path: Path) -> None:
    text = fourfold("--help", folder=tmp_path).stdout
    published = "llama3_405b_128k, llama3_405b_8k_16384gpus, llama3_405b_8k_8192gpus, llama3_70b"
    assert f"tier: deepseek_style, dp, hsdp, {published}, long_context, megatron_1t, nd, none, olmo_7b_fsdp" in text
    assert "pipeline, tensor, zero1, zero2, zero3, zero3_checkpointed, zero3_offload" in text
    assert "task: llama3_405b, llama3_70b, llama3_8b, llama3_8b_128k, none, quickstart, smollm2, smollm2_32k" in text
    assert "zero: stage0, stage1, stage2, stage3" in text
    assert "command line > debug > task > tier > train.yaml > group file > schema" in text


@pytest.mark.parametrize("start", ["fourfold ", "fourfold train ", "fourfold train task=smollm2 "])
def test_shell_completion(start: str, tmp_path: Path) -> None:
    line = f"{start}tier=zero"
    words = fourfold("-sc", "query=bash", folder=tmp_path, COMP_LINE=line, COMP_POINT=str(len(line))).stdout.split()
    assert words == ["tier=zero1", "tier=zero2", "tier=zero3", "tier=zero3_checkpointed", "tier=zero3_offload"]


def test_own_config_folder_from_anywhere(tmp_path: Path) -> None:
    (tmp_path / "mine" / "tier").mkdir(parents=True)
    recipe = "# @package _global_\ndefaults: [zero3, override /activation: selective]\nsave_every: 7\n"
    (tmp_path / "mine" / "tier" / "big.yaml").write_text(recipe)
    words = ("train", "--cfg", "job", "--config-dir", "mine", "task=smollm2", "tier=big")
    text = fourfold(*words, folder=tmp_path).stdout
    for line in ("save_every: 7", "  stage: 3", "  checkpointing: selective", "name: smollm2"):
        assert f"\n{line}\n" in f"\n{text}"


def test_other_hydra_programs_do_not_see_our_recipes(tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "main.yaml").write_text("a: 1\n")
    (tmp_path / "app.py").write_text(
        "import hydra\n@hydra.main(version_base='1.3', config_path='conf', config_name='main')\n"
        "def main(c): pass\nmain()\n"
    )
    command = [sys.executable, "app.py", "--info", "searchpath"]
    theirs = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert str(tmp_path / "conf") in theirs.stdout, theirs.stderr
    assert "fourfold" not in theirs.stdout
    ours = fourfold("--info", "searchpath", folder=tmp_path).stdout
    assert str(CONF) in ours
    assert str(RECIPES) in ours
