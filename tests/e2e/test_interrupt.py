"""Ctrl-C under a launcher: a checkpoint, a word on where it is, and the same curve when the run goes on."""

import math
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.launching import (
    LOSS,
    NORM,
    OUR_TRACE,
    PATIENCE,
    Result,
    command_to_go_on,
    on_own_port,
    run,
    updates,
    warm,
)

STEPS = 10
SIGNALS = [signal.SIGINT, signal.SIGTERM]
WORDS = ["task=quickstart", "debug=cpu", f"max_steps={STEPS}", "overwrite=false", "export=false", "log_every=1"]


def interrupt_after(step: int, *, output: Path, number: signal.Signals) -> Callable[[int], None]:
    """Wait for the update, then send what a terminal's Ctrl-C sends, SIGINT to every process of the group; or what a
    scheduler sends, SIGTERM to the launcher."""

    def wait_and_send(group: int) -> None:
        end = time.monotonic() + PATIENCE
        while step not in updates(output):
            assert time.monotonic() < end
            time.sleep(0.02)
        send = os.killpg if number is signal.SIGINT else os.kill
        send(group, number)

    return wait_and_send


@pytest.fixture(scope="module")
def through(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    """Output folder of one process, never stopped."""
    folder = tmp_path_factory.mktemp("through")
    result = warm(*WORDS, f"cache_dir={cache}", "tier=zero3", "save_every=2", "output_dir=out", folder=folder)
    assert result.code == 0, result.err
    return folder / "out"


@pytest.fixture(scope="module")
def stopped(
    tmp_path_factory: pytest.TempPathFactory, cache: Path, through: Path
) -> dict[signal.Signals, tuple[Path, Result]]:
    """(folder, result) by signal, of launches at the same time."""

    def launch(number: signal.Signals) -> tuple[Path, Result]:
        folder = tmp_path_factory.mktemp("stopped")
        words = [*WORDS, f"cache_dir={cache}", "tier=zero3", "save_every=2", "output_dir=out"]
        then = interrupt_after(3, output=folder / "out", number=number)
        return folder, run([*on_own_port(), "-m", "fourfold", *words], folder=folder, then=then)

    with ThreadPoolExecutor(len(SIGNALS)) as pool:
        return dict(zip(SIGNALS, pool.map(launch, SIGNALS), strict=True))


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_saves_and_the_run_goes_on(
    through: Path, stopped: dict[signal.Signals, tuple[Path, Result]], number: signal.Signals
) -> None:
    """K14: ZeRO-3 saves at an interval, on the signal and at the end, and nobody waits for ever. The run goes on with what
    the command that it shows says, once by two ranks, once by one (test_launch starts such a command as it stands)."""
    folder, result = stopped[number]
    output = folder / "out"
    assert result.code != 0
    done = max(updates(output))
    assert 3 <= done < STEPS
    newest = output / "checkpoints" / f"step-{done:08d}"
    assert "stopped on request" in result.out
    assert str(newest) in "".join(result.out.split()), "where it is, in a table that folds"
    assert sorted(path.name for path in newest.iterdir()) == (
        ["checkpoint.json", "config.json", "pieces.json", "rank-00000.safetensors", "rank-00001.safetensors"]
    )
    assert not list((output / "checkpoints").glob(".*"))
    assert not OUR_TRACE.search(result.err), result.err

    again = command_to_go_on(result.out)
    assert again[-1] == "resume=auto"
    assert f"max_steps={STEPS}" in again, "a run that was stopped goes on to its own end, on its own schedule"
    world = 2 if number is signal.SIGINT else 1
    went_on = warm(*again[again.index("fourfold") + 1 :], folder=folder, world=world)
    assert went_on.code == 0, went_on.err
    assert f"from update {done} on" in went_on.out
    for key in (LOSS, NORM, "train/learning_rate", "eval/loss"):
        ours, theirs = updates(output, key=key), updates(through, key=key)
        assert set(ours) == set(theirs), key
        for step, value in theirs.items():
            assert math.isclose(ours[step], value, rel_tol=1e-5), (key, step)
