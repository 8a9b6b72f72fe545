"""How this run was started: when, and by which command, so that the way on can be shown as a command."""

import re
import shlex
import sys
from pathlib import Path

import psutil

from fourfold.config import is_secret
from fourfold.schema import TrainConfig

LAUNCHERS = ("accelerate", "torchrun", "uv", "srun")


def launched_at() -> float:
    """Seconds since the epoch at which the launcher (or this process, if there is none) began."""
    chain = _launchers()
    return (chain[-1] if chain else psutil.Process()).create_time()


def command_to_go_on(step: int, *, config: TrainConfig, stopped: bool = False) -> str:
    """The command of this run with resume=auto: to its end if it was stopped, else with twice the updates."""
    if stopped:
        return _command_without("resume|overwrite", more=["resume=auto"])
    more = ["num_epochs=null"] if config.num_epochs is not None else []
    return _command_without(
        "max_steps|resume|overwrite|num_epochs", more=[*more, f"max_steps={2 * max(step, 1)}", "resume=auto"]
    )


def _command_without(keys: str, *, more: list[str]) -> str:
    words = [word for word in launch_command() if not re.match(rf"\+{{0,2}}({keys})=", word)]
    return shlex.join([*map(_redacted, words), *more])


def _redacted(word: str) -> str:
    key, is_setting, _ = word.partition("=")
    return f"{key}=***" if is_setting and is_secret(key) else word


def launch_command() -> list[str]:
    """What was typed, as far as processes show it: launcher, its options, module, overrides."""
    chain = _launchers()
    if not chain:
        module = [Path(sys.executable).name, "-m", "fourfold"]
        return [*(module if sys.argv[0].endswith(".py") else [Path(sys.argv[0]).name, "train"]), *sys.argv[1:]]
    return _without_interpreter(chain[-1].cmdline())


def _launchers() -> list[psutil.Process]:
    """Processes above this one, nearest first, that started it as a launcher."""
    found: list[psutil.Process] = []
    try:
        for parent in psutil.Process().parents():
            words = _without_interpreter(parent.cmdline())
            if not words or Path(words[0]).name not in LAUNCHERS:
                break
            found.append(parent)
    except psutil.Error:
        pass
    return found


def _without_interpreter(words: list[str]) -> list[str]:
    if len(words) > 1 and Path(words[0]).name.startswith("python") and not words[1].startswith("-"):
        words = words[1:]
    return [Path(words[0]).name, *words[1:]] if words else []
