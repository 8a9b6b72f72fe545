"""Relative paths are those of the folder one stands in (G09), and a wheel works from anywhere."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.e2e.launching import BIN, ROOT, environment, updates, warm


def test_relative_paths(tmp_path: Path, cache: Path) -> None:
    from fourfold.model.tiny import create_tiny_llama

    create_tiny_llama(cache / "tiny-llama")
    here = tmp_path / "here"
    shutil.copytree(cache / "tiny-llama", here / "models" / "tiny")
    (here / "data").mkdir()
    (here / "data" / "docs.jsonl").write_text('{"text": "a few words to learn, again and again"}\n' * 40)
    words = ["task=quickstart", "debug=cpu", "overwrite=false", "model=hf", "model.path=models/tiny", "data=jsonl"]
    words += ["data.path=data/docs.jsonl", "data.eval_documents=0", "cache_dir=cache", "export=false", "seq_len=16"]
    first = warm(*words, "output_dir=runs/a", "max_steps=2", folder=here)
    assert first.code == 0, first.err
    assert str(here / "runs" / "a") in "".join(first.out.split())
    assert {path.name for path in here.iterdir()} == {"models", "data", "cache", "runs", ".out", ".err"}
    resume = "resume=runs/a/checkpoints/step-00000002"
    second = warm(*words, "output_dir=runs/b", "max_steps=3", resume, "hydra.job.chdir=true", folder=here)
    assert second.code == 0, second.err
    assert list(updates(here / "runs" / "b")) == [3]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """bin/ of a fresh environment with the built wheel; everything else comes from the environment of the tests."""
    folder = tmp_path_factory.mktemp("wheel")
    uv = shutil.which("uv", path=os.pathsep.join([str(BIN), os.environ["PATH"]]))
    builder = [uv, "build", "--quiet"] if uv else [sys.executable, "-m", "build"]
    source = folder / "source"  # a build leaves traces in its tree
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "runs", "tests", "tools", "dist", "__pycache__"))
    shutil.copy(ROOT / ".gitignore", source)
    subprocess.run([*builder, "--wheel", "--out-dir", str(folder), str(source)], check=True)
    (wheel,) = folder.glob("*.whl")
    shutil.rmtree(source)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder / "venv")}))
    shutil.unpack_archive(wheel, packages, format="zip")
    (packages / "rest.pth").write_text(sysconfig.get_path("purelib") + "\n")  # its own .pth files are not followed
    script = folder / "venv" / "bin" / "fourfold"
    script.write_text(f"#!{folder}/venv/bin/python\nfrom fourfold.cli import main\nmain()\n")
    script.chmod(0o755)
    return folder / "venv" / "bin"


def outside(installed: Path, *command: str, folder: Path) -> str:
    """Output of a command of that environment, run from a folder that is none of ours."""
    variables = environment()
    variables.pop("PYTHONPATH", None)
    words = [str(installed / command[0]), *command[1:]]
    return subprocess.run(words, cwd=folder, env=variables, check=True, capture_output=True, text=True).stdout


def test_the_wheel_composes_elsewhere(installed: Path, tmp_path: Path) -> None:
    text = outside(installed, "fourfold", "train", "--cfg", "job", "task=quickstart", "tier=hsdp", folder=tmp_path)
    for line in ("name: quickstart", "dp_shard_size: ${cluster.gpus_per_node}", "  checkpointing: full"):
        assert f"\n{line}\n" in f"\n{text}"
    found = outside(installed, "fourfold", "--info", "searchpath", folder=tmp_path)
    for tree in ("conf", "recipes"):
        (path,) = [word for word in found.split() if word.endswith(f"/fourfold/{tree}")]
        assert path.removeprefix("file://").startswith(str(installed.parent)), "from the wheel, not the checkout"
    assert str(ROOT) not in found.replace(str(installed.parent), "")


def test_the_wheel_has_all_its_data(installed: Path, tmp_path: Path) -> None:
    code = (
        "import fourfold\nfrom fourfold.paths import RECIPES\nfrom fourfold.planner.hardware import peak_flops\n"
        "print(fourfold.__file__, (RECIPES / 'README.md').is_file(), peak_flops('NVIDIA H200', 'bf16'))"
    )
    where, readme, peak = outside(installed, "python", "-c", code, folder=tmp_path).split()
    assert Path(where).is_relative_to(installed.parent)
    assert readme == "True"
    assert float(peak) > 1e14
