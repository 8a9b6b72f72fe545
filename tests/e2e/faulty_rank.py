"""fourfold, except that one rank meets the fault named by FAULT=<what>:<rank>:<the how manieth time>."""

import os
import resource
import signal
import time
from pathlib import Path
from typing import Any

from fourfold.checkpoint import board, save
from fourfold.cli import main
from fourfold.model.build import CausalLMLoss
from fourfold.pipeline.cut import Stage

board.SILENCE = 5.0  # of 12: those who live wait for nothing else
board.QUIET = 3.0  # of 30: before the timeout
what, rank, number = os.environ["FAULT"].split(":")
passes, write, put_in_place = CausalLMLoss.forward, save.write_safetensors, save.put_in_place
passes_stage = Stage.forward
calls = {"forward": 0, "stage": 0, "write": 0, "rename": 0}


def is_time_of(call: str) -> bool:
    calls[call] += 1
    return os.environ["RANK"] == rank and calls[call] == int(number)


def die() -> None:
    Path("died").write_text(str(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)


def halt() -> None:
    """The kind of fault that keeps the others waiting."""
    if what.startswith("kill"):
        die()
    Path("died").write_text(str(time.time()))
    if what.startswith("stop"):
        os.kill(os.getpid(), signal.SIGSTOP)
    if what.startswith("hang"):
        time.sleep(600.0)


def slow_down() -> None:
    if what == "slow" and os.environ["RANK"] == rank:
        time.sleep(0.3)


def forward(self: Any, **batch: Any) -> Any:
    slow_down()
    if is_time_of("forward") and what.endswith("-amid-update"):
        halt()
    return passes(self, **batch)


def forward_stage(self: Any, *arguments: Any, **batch: Any) -> Any:
    slow_down()
    if is_time_of("stage") and what.endswith("-amid-schedule"):
        halt()
    return passes_stage(self, *arguments, **batch)


def write_half(path: Path, entries: list[Any], **options: Any) -> Any:
    is_it = is_time_of("write")
    if is_it and what == "disk-full":  # where no small disk can be made: the kernel takes no more than 1 MB a file
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, resource.RLIM_INFINITY))
    if is_it and what == "kill-amid-file":
        write(path, entries[: len(entries) // 2])
        die()
    return write(path, entries, **options)


def rename(aside: Path, target: Path) -> None:
    is_it = is_time_of("rename")
    if is_it and what == "kill-before-rename":
        die()
    put_in_place(aside, target)
    if is_it and what == "kill-after-rename":
        die()


CausalLMLoss.forward = forward  # type: ignore[method-assign]
Stage.forward = forward_stage  # type: ignore[method-assign]
save.write_safetensors = write_half
save.put_in_place = rename
main()
