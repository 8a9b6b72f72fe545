"""What may happen to a run: a rank killed, a full disk, a damaged file. The message, nobody left waiting, the last good
checkpoint intact, and the curve of the run to which nothing happened."""

import math
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.launching import LOSS, NORM, ROOT, Result, on_own_port, run, updates, warm

STEPS = 6
WORDS = ["task=quickstart", "debug=cpu", f"max_steps={STEPS}", "overwrite=false", "export=false", "save_every=2"]
FAULTY = str(ROOT / "tests" / "e2e" / "faulty_rank.py")
CHECKPOINT_BYTES = 24_000_000  # of the tiny model, 12 bytes a parameter


@pytest.fixture(scope="module")
def through(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    """Output folder of one process that nothing happened to, with all checkpoints."""
    folder = tmp_path_factory.mktemp("through")
    result = warm(*WORDS, f"cache_dir={cache}", "output_dir=out", "keep_last=null", folder=folder)
    assert result.code == 0, result.err
    return folder / "out"


def go_on(folder: Path, cache: Path, *more: str) -> Result:
    """One process goes on in out/ and comes to the end."""
    result = warm(*WORDS, f"cache_dir={cache}", "output_dir=out", "resume=auto", *more, folder=folder)
    assert result.code == 0, result.err
    return result


def assert_same_curve(output: Path, through: Path) -> None:
    for key in (LOSS, NORM, "train/learning_rate", "eval/loss"):
        ours, theirs = updates(output, key=key), updates(through, key=key)
        assert set(ours) == set(theirs), key
        for step, value in theirs.items():
            assert math.isclose(ours[step], value, rel_tol=1e-5), (key, step)


def steps(output: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (output / "checkpoints").glob("step-*"))


LAUNCHED = {  # by accelerate, both at the same time: they wait more than they compute
    "kill-amid-update:1:9": [],  # the fifth update, of two micro-batches each
    "kill-amid-file:1:2": ["save_async=true", "tier=zero3"],
}


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory, cache: Path, through: Path) -> dict[str, tuple[Path, Result]]:
    """(folder, result) by fault. All ranks are gone soon: they hold the pipe that is read."""

    def launch(fault: str, more: list[str]) -> tuple[Path, Result]:
        folder = tmp_path_factory.mktemp("launched")
        words = [*WORDS, f"cache_dir={cache}", "output_dir=out", *more]
        result = run([*on_own_port(), FAULTY, *words], folder=folder, FAULT=fault)
        assert time.time() - float((folder / "died").read_text()) < 30
        return folder, result

    with ThreadPoolExecutor(len(LAUNCHED)) as pool:
        return dict(zip(LAUNCHED, pool.map(launch, LAUNCHED, LAUNCHED.values()), strict=True))


def check_killed(folder: Path, *, cache: Path, through: Path, there: list[int], from_step: int) -> None:
    """What is on disk, and that one process goes on from it."""
    assert steps(folder / "out") == there
    went_on = go_on(folder, cache)
    assert f"from update {from_step} on" in went_on.out
    assert not list((folder / "out" / "checkpoints").glob(".*")), "nothing is left of the save that was cut short"
    assert_same_curve(folder / "out", through)


@pytest.mark.parametrize(
    ("fault", "there", "from_step"), [("kill-amid-update:1:9", [2, 4], 4), ("kill-amid-file:1:2", [2], 2)]
)
def test_a_rank_is_killed(
    cache: Path,
    through: Path,
    launched: dict[str, tuple[Path, Result]],
    fault: str,
    there: list[int],
    from_step: int,
) -> None:
    folder, result = launched[fault]
    assert result.code != 0
    rank = fault.split(":")[1]
    assert "SIGKILL" in result.err or "Signal 9" in result.err, "the launcher says who was killed"
    assert f"rank      : {rank} " in result.err
    check_killed(folder, cache=cache, through=through, there=there, from_step=from_step)


@pytest.mark.parametrize(
    ("fault", "there", "from_step", "more"),
    [
        pytest.param(
            "kill-before-rename:0:2", [2], 4, [], marks=pytest.mark.slow
        ),  # whole: the next run puts it in place
        ("kill-after-rename:0:2", [2, 4], 4, ["save_async=true"]),
    ],
)
def test_a_rank_is_killed_as_a_checkpoint_is_put_in_place(
    tmp_path: Path, cache: Path, through: Path, fault: str, there: list[int], from_step: int, more: list[str]
) -> None:
    words = [*WORDS, f"cache_dir={cache}", "output_dir=out", *more]
    result = warm(*words, folder=tmp_path, world=2, script=FAULTY, FAULT=fault)
    assert result.code == -signal.SIGKILL
    assert time.time() - float((tmp_path / "died").read_text()) < 30, "the other rank is gone"
    check_killed(tmp_path, cache=cache, through=through, there=there, from_step=from_step)


@pytest.mark.parametrize(
    ("schedule", "killed", "place"),
    [
        pytest.param("1f1b", 0, "rank 0 (pp 0: stage 0)", marks=pytest.mark.slow),
        ("zbv", 1, "rank 1 (pp 1: stages 1 and 2)"),
    ],
)
def test_a_rank_is_killed_amid_a_schedule(tmp_path: Path, cache: Path, schedule: str, killed: int, place: str) -> None:
    """In the second of its passes of the second update. The other rank leaves, and says which stage is gone."""
    words = [*WORDS, f"cache_dir={cache}", "output_dir=out", "pp_size=2", f"pipeline.schedule={schedule}"]
    number = 6 if schedule == "1f1b" else 10  # of 4 micro-batches through 1 or 2 stages
    result = warm(*words, folder=tmp_path, world=2, script=FAULTY, FAULT=f"kill-amid-schedule:{killed}:{number}")
    assert result.code == -signal.SIGKILL
    assert time.time() - float((tmp_path / "died").read_text()) < 30, "the other rank is gone"
    group = f"of the pp group of this rank {1 - killed} (0, 1)"
    assert f"fourfold: {place}, {group}, has given no sign of life" in " ".join(result.err.split())
    assert set(updates(tmp_path / "out")) == {1}


@contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """A file system for one checkpoint and a half at `folder`; False where this user may mount none."""
    folder.mkdir()
    size = int(1.5 * CHECKPOINT_BYTES)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True)
    try:
        yield mounted.returncode == 0
    finally:
        if mounted.returncode == 0:
            subprocess.run(["umount", "-l", folder], check=True)


def test_the_disk_is_full(tmp_path: Path, cache: Path, through: Path) -> None:
    """While training goes on, and at the end."""
    with small_disk(tmp_path / "out") as mounted:
        reason = "No space left on device" if mounted else "File too large"
        fault = "none:0:0" if mounted else "disk-full:1:2"
        words = [*WORDS, f"cache_dir={cache}", "output_dir=out", "keep_last=null"]
        result = warm(*words, folder=tmp_path, world=2, script=FAULTY, FAULT=fault)
        assert "checkpoint of update 4 not written: rank " in result.out
        assert f"{reason} (" in result.out
        assert set(updates(tmp_path / "out")) == set(range(1, STEPS + 1))
        assert "The last checkpoint, of update 6, could not be written" in result.paragraph
        assert "The newest complete one there is step-00000002" in result.paragraph
        assert steps(tmp_path / "out") == [2]
        assert not list((tmp_path / "out" / "checkpoints").glob(".*"))
        if mounted:
            size = 5 * CHECKPOINT_BYTES
            subprocess.run(["mount", "-o", f"remount,size={size}", tmp_path / "out"], check=True)
        assert "from update 2 on" in go_on(tmp_path, cache).out
        assert_same_curve(tmp_path / "out", through)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-10])


@pytest.mark.parametrize(
    ("damage", "name", "says"),
    [
        (flip, "rank-00000.safetensors", "is not what was written (its digest differs)"),
        pytest.param(cut, "rank-00000.safetensors", "of 23", marks=pytest.mark.slow),
        pytest.param(flip, "pieces.json", "pieces.json", marks=pytest.mark.slow),
        pytest.param(Path.unlink, "rank-00000.safetensors", "cannot be read (No such file", marks=pytest.mark.slow),
        (Path.unlink, "checkpoint.json", "it has no checkpoint.json"),
        pytest.param(cut, "checkpoint.json", "is damaged", marks=pytest.mark.slow),
    ],
)
def test_the_newest_checkpoint_is_damaged(  # type: ignore[no-untyped-def]
    tmp_path: Path, cache: Path, through: Path, damage, name: str, says: str
) -> None:
    import shutil

    shutil.copytree(through, tmp_path / "out")
    shutil.rmtree(tmp_path / "out" / "checkpoints" / "step-00000006")
    newest = tmp_path / "out" / "checkpoints" / "step-00000004"
    damage(newest / name)
    given = warm(*WORDS, f"cache_dir={cache}", "output_dir=new", f"resume={newest}", folder=tmp_path)
    assert given.code == 2
    assert "step-00000004" in given.paragraph
    result = go_on(tmp_path, cache, "keep_last=1")
    told = " ".join(result.out.split())
    assert "from update 2 on" in told
    assert "step-00000004 was passed over (" in told
    assert says in told.replace(" ", "") or says in told
    assert (tmp_path / "out" / "checkpoints" / "broken-step-00000004").is_dir()
    assert steps(tmp_path / "out") == [6]
    assert_same_curve(tmp_path / "out", through)


def test_no_checkpoint_is_sound(tmp_path: Path, cache: Path, through: Path) -> None:
    import shutil

    shutil.copytree(through, tmp_path / "out")
    for path in (tmp_path / "out" / "checkpoints").iterdir():
        flip(path / "rank-00000.safetensors")
    result = warm(*WORDS, f"cache_dir={cache}", "output_dir=out", "max_steps=8", "resume=auto", folder=tmp_path)
    assert result.code == 2
    for part in ("No checkpoint in", "step-00000002: rank-00000", "step-00000006: rank-00000", "overwrite=true"):
        assert part in result.paragraph
    assert steps(tmp_path / "out") == [2, 4, 6], "nothing is moved or removed"
