"""Ctrl-C under a launcher: a checkpoint, a word on where it is, and the same curve when the run goes on."""

import math
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.launching import ACCELERATE, LOSS, NORM, OUR_TRACE, PATIENCE, command_to_go_on, run, updates, warm

STEPS = 10
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_the_run_goes_on(tmp_path: Path, cache: Path, number: signal.Signals) -> None:
    """K14: ZeRO-3 saves at an interval, on the signal and at the end, and nobody waits for ever."""
    output = tmp_path / "out"
    words = [*WORDS, f"cache_dir={cache}", "tier=zero3", "save_every=2"]
    command = [*ACCELERATE, "-m", "fourfold", *words, "output_dir=out"]
    stopped = run(command, folder=tmp_path, then=interrupt_after(3, output=output, number=number))
    assert stopped.code != 0
    done = max(updates(output))
    assert 3 <= done < STEPS
    newest = output / "checkpoints" / f"step-{done:08d}"
    assert "stopped on request" in stopped.out
    assert str(newest) in "".join(stopped.out.split()), "where it is, in a table that folds"
    assert sorted(path.name for path in newest.iterdir()) == (
        ["checkpoint.json", "config.json", "pieces.json", "rank-00000.safetensors", "rank-00001.safetensors"]
    )
    assert not list((output / "checkpoints").glob(".*"))
    assert not OUR_TRACE.search(stopped.err), stopped.err

    again = command_to_go_on(stopped.out)
    assert again[-1] == "resume=auto"
    assert f"max_steps={STEPS}" in again, "a run that was stopped goes on to its own end, on its own schedule"
    went_on = run(again, folder=tmp_path)
    assert went_on.code == 0, went_on.err
    assert f"from update {done} on" in went_on.out

    through = warm(*words, "output_dir=through", folder=tmp_path)  # one process, never stopped
    assert through.code == 0, through.err
    for key in (LOSS, NORM, "train/learning_rate", "eval/loss"):
        ours, theirs = updates(output, key=key), updates(tmp_path / "through", key=key)
        assert set(ours) == set(theirs), key
        for step, value in theirs.items():
            assert math.isclose(ours[step], value, rel_tol=1e-5), (key, step)
