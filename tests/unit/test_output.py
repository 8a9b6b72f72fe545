"""The output folder: one run at a time, nobody's results overwritten, nothing but ours removed."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from fourfold.output import CHECKPOINTS, EXPORT, LIBRARIES, MARK, OURS, begin, claimed
from tests.golden.composing import NAMED, typed

HOLD = """
import sys
from pathlib import Path
from fourfold.output import begin, claimed
from fourfold.schema import DataConfig, ModelConfig, TrainConfig
config = TrainConfig(name="other", model=ModelConfig(path=""), data=DataConfig(path=""))
with claimed(Path(sys.argv[1]), config=config):
    begin(Path(sys.argv[1]), config=config, plain={})
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def claim(folder: Path, *words: str) -> Iterator[None]:
    """As a run does that starts."""
    config = typed(*NAMED, *words)
    with claimed(folder, config=config):
        begin(folder, config=config, plain={"name": "golden", "zero": {"stage": 2}})
        yield


def finished_run(folder: Path) -> None:
    """A folder as a run leaves it, with two things of the user's beside."""
    with claim(folder):
        (folder / CHECKPOINTS / "step-00000003").mkdir(parents=True)
        (folder / EXPORT).mkdir()
        (folder / EXPORT / "config.json").write_text("{}")
        (folder / "metrics.jsonl").write_text("{}\n")
    (folder / "notes.txt").write_text("mine")
    (folder / "plots").mkdir()


def test_config_and_versions_are_kept(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "run"
    with claim(folder):
        pass
    assert OmegaConf.to_container(OmegaConf.load(folder / "config.yaml")) == {"name": "golden", "zero": {"stage": 2}}
    about = json.loads((folder / MARK).read_text())
    assert about["name"] == "golden"
    assert set(about["versions"]) == set(LIBRARIES)
    assert "not installed" not in about["versions"].values()


@pytest.mark.parametrize("below", ["", "deeper/run"])
def test_a_file_in_the_way(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / below
    with pytest.raises(ValueError, match=rf"output_dir={folder} cannot be written \((File exists|Not a directory)\)"):
        claim(folder).__enter__()


def test_a_folder_where_nobody_may_write() -> None:
    folder = Path("/proc/fourfold-run")  # not even root
    with pytest.raises(ValueError, match=f"output_dir={folder} cannot be written"):
        claim(folder).__enter__()


def test_another_run_is_refused_with_the_three_ways_on(tmp_path: Path) -> None:
    finished_run(tmp_path)
    with pytest.raises(ValueError, match=r"holds another run: .*resume=auto.*output_dir=.*overwrite=true"):
        claim(tmp_path).__enter__()
    assert (tmp_path / EXPORT / "config.json").is_file()


@pytest.mark.parametrize("words", [("resume=auto",), ("resume=auto", "overwrite=true"), ("resume=some/checkpoint",)])
def test_going_on_keeps_everything(tmp_path: Path, words: tuple[str, ...]) -> None:
    finished_run(tmp_path)
    with claim(tmp_path, *words):
        assert (tmp_path / CHECKPOINTS / "step-00000003").is_dir()
        assert (tmp_path / "metrics.jsonl").is_file()


def test_overwrite_removes_only_ours(tmp_path: Path) -> None:
    finished_run(tmp_path)
    with claim(tmp_path, "overwrite=true"):
        left = {path.name for path in tmp_path.iterdir()}
    assert left == {"notes.txt", "plots", ".lock", "config.yaml", MARK}
    assert {CHECKPOINTS, EXPORT, "metrics.jsonl"} <= set(OURS)


@pytest.mark.parametrize("overwrite", ["true", "false"])
@pytest.mark.parametrize("name", ["config.yaml", CHECKPOINTS, EXPORT])
def test_what_no_run_of_ours_wrote_is_left_alone(tmp_path: Path, name: str, overwrite: str) -> None:
    """output_dir=. in a project that has a config.yaml, or checkpoints of another tool."""
    path = tmp_path / name
    if path.suffix:
        path.write_text("theirs: 1\n")
    else:
        path.mkdir()
        (path / "theirs").write_text("")
    with pytest.raises(ValueError, match=rf"output_dir=.* {name} .*another output_dir"):
        claim(tmp_path, f"overwrite={overwrite}").__enter__()
    assert path.read_text() == "theirs: 1\n" if path.suffix else (path / "theirs").is_file()


def test_overwrite_loses_nothing_before_the_new_run_can_start(tmp_path: Path) -> None:
    finished_run(tmp_path)
    with pytest.raises(ValueError, match="no such data"), claimed(tmp_path, config=typed(*NAMED, "overwrite=true")):
        raise ValueError("no such data")
    assert (tmp_path / CHECKPOINTS / "step-00000003").is_dir()
    assert (tmp_path / EXPORT / "config.json").is_file()


@pytest.mark.parametrize("way", ["link", "dots", "source"])
def test_a_run_does_not_replace_what_it_reads_by_another_way(tmp_path: Path, way: str) -> None:
    finished_run(tmp_path / "run")
    (tmp_path / "link").symlink_to(tmp_path / "run")
    words = {
        "link": f"model.path={tmp_path / 'link' / EXPORT}",
        "dots": f"model.path={tmp_path / 'run' / CHECKPOINTS / '..' / EXPORT}",
        "source": f"data.sources=[{{path: {tmp_path / 'run' / EXPORT}}}]",
    }
    with pytest.raises(ValueError, match="another output_dir"):
        claim(tmp_path / "run", "overwrite=true", words[way]).__enter__()
    assert (tmp_path / "run" / EXPORT / "config.json").is_file()


def test_a_run_does_not_read_what_it_writes(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    with pytest.raises(ValueError, match=r"output_dir=.* lies in data\.path=.*read as data"):
        claim(tmp_path / "docs" / "run", f"data.path={tmp_path / 'docs'}").__enter__()


@pytest.mark.parametrize("words", [(), ("overwrite=true",), ("resume=auto",)])
def test_a_run_does_not_replace_what_it_reads(tmp_path: Path, words: tuple[str, ...]) -> None:
    """To train on from an export, the output goes elsewhere."""
    finished_run(tmp_path)
    source = f"model.path={tmp_path / EXPORT}"
    if words:
        with pytest.raises(ValueError, match=r"model\.path=.* lies in output_dir=.*another output_dir"):
            claim(tmp_path, "model=hf", source, *words).__enter__()
    assert (tmp_path / EXPORT / "config.json").is_file()
    with claim(tmp_path / "elsewhere", "model=hf", source, *words):
        pass


def test_a_start_that_failed_does_not_count_as_a_run(tmp_path: Path) -> None:
    """A wrong model.path, mended, must not meet its own folder as another run."""
    with pytest.raises(ValueError, match="no such model"), claim(tmp_path):
        raise ValueError("no such model")
    with claim(tmp_path):
        pass


def test_two_processes_at_once(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        for words in ((), ("overwrite=true",), ("resume=auto",)):
            with pytest.raises(ValueError, match=rf"Another process is writing to output_dir={tmp_path} now"):
                claim(tmp_path, *words).__enter__()
        assert json.loads((tmp_path / MARK).read_text())["name"] == "other", "the second did not touch it"
        holder.kill()
    with claim(tmp_path, "resume=auto"):  # a process that died holds nothing
        pass
