"""Whole runs (fourfold.train.train) on ranks of the pool."""

import json
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

from fourfold.train import train
from tests.compose import composed


def whole_run(rank: int, *, overrides: list[str]) -> int:
    config, plain = composed(*overrides)
    return train(config, plain=plain)


def metrics(output_dir: Path, key: str) -> dict[int, Any]:
    """{step: value} of metrics.jsonl; a step that was run twice counts last."""
    lines = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line[key] for line in lines if key in line}


def run_and_listen(rank: int, *, overrides: list[str]) -> str:
    """What a run printed."""
    with redirect_stdout(StringIO()) as said:
        assert whole_run(rank, overrides=overrides) == 0
    return said.getvalue()


def refused_run(rank: int, *, overrides: list[str]) -> str:
    """The message with which a run is refused."""
    try:
        whole_run(rank, overrides=overrides)
    except ValueError as error:
        return str(error)
    raise AssertionError("the run was not refused")


def run_on_own_data(rank: int, *, overrides: list[str], paths: list[str]) -> str:
    """As refused_run, each rank with a data.path of its own."""
    return refused_run(rank, overrides=[*overrides, f"data.path={paths[rank]}"])


def run_with_nan(rank: int, *, overrides: list[str], what: str, bad_rank: int, bad_call: int) -> str:
    """As refused_run, with a `loss` or only a `gradient` of nan on one rank in its `bad_call`-th micro-batch."""
    from fourfold.model import build

    healthy, calls = build.CausalLMLoss.forward, 0

    def forward(self: Any, **batch: Any) -> Any:
        nonlocal calls
        calls += 1
        loss = healthy(self, **batch)
        if (rank, calls) != (bad_rank, bad_call):
            return loss
        return loss * float("nan") if what == "loss" else loss + (loss * 0).sqrt()  # slope of sqrt at 0, times 0

    build.CausalLMLoss.forward = forward  # type: ignore[method-assign]
    try:
        return refused_run(rank, overrides=overrides)
    finally:
        build.CausalLMLoss.forward = healthy  # type: ignore[method-assign]


def run_from_now(rank: int, *, overrides: list[str]) -> int:
    """A run whose launch took no time."""
    import time

    from fourfold import train as module

    module.launched_at = time.time
    return whole_run(rank, overrides=overrides)


def run_stopped_by_signal(rank: int, *, overrides: list[str], signal_rank: int, micro_batch: int) -> int:
    """A run in which one rank is asked to stop, as by Ctrl-C, amid its `micro_batch`-th forward pass."""
    import os
    import signal

    from fourfold.model.build import CausalLMLoss
    from fourfold.pipeline.cut import Stage

    calls = 0

    def interrupting(healthy: Any) -> Any:
        def forward(self: Any, *arguments: Any, **batch: Any) -> Any:
            nonlocal calls
            calls += 1
            if (rank, calls) == (signal_rank, micro_batch):
                os.kill(os.getpid(), signal.SIGINT)
            return healthy(self, *arguments, **batch)

        return forward

    with (
        mock.patch.object(CausalLMLoss, "forward", interrupting(CausalLMLoss.forward)),
        mock.patch.object(Stage, "forward", interrupting(Stage.forward)),
    ):
        return whole_run(rank, overrides=overrides)
