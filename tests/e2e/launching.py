"""Start fourfold as a user does, and read what it says and leaves."""

import contextlib
import json
import os
import re
import select
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
ACCELERATE = [str(BIN / "accelerate"), "launch", "--config_file", str(ROOT / "tools" / "launch" / "cpu.yaml")]


def on_own_port() -> list[str]:
    """ACCELERATE for one of two launches at the same time, which else would both take port 29500 if they find it free."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return [*ACCELERATE, "--main_process_port", str(free.getsockname()[1])]


PATIENCE = 300.0  # seconds, on a crowded machine
LAUNCH_STATE = re.compile(r"(ACCELERATE|TORCHELASTIC|SLURM)_|(LOCAL_)?(RANK|WORLD_SIZE)$|MASTER_|HYDRA_|FORK_LAUNCHED")
OUR_TRACE = re.compile(r'File ".*/(fourfold|hydra)/.*\.py"')  # a launcher shows one of its own
LOSS, NORM = "train/loss", "train/grad_norm"


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str
    seconds: float

    @property
    def paragraph(self) -> str:
        """The one thing a refused run says, on one line. Asserts that it is the only one, and no trace of ours."""
        assert self.code != 0
        assert not OUR_TRACE.search(self.err), self.err
        said = re.findall(r"^fourfold: (.*?)\n\n", self.err, flags=re.MULTILINE | re.DOTALL)
        assert len(said) == 1, self.err
        return str(said[0])


def environment(**changes: str) -> dict[str, str]:
    """This one without what a launcher left in it, the hub out of reach, one thread a process, `fourfold` importable."""
    kept = {name: value for name, value in os.environ.items() if not LAUNCH_STATE.match(name)}
    path = os.pathsep.join([str(BIN), kept.get("PATH", "")])
    return {**kept, "PATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **changes}


def run(command: list[str], *, folder: Path, then: Callable[[int], None] | None = None, **changes: str) -> Result:
    """Run to the end in a process group of its own, of which nothing stays. `then` is called with the group's id."""
    begin = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment(**changes),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        if then is not None:
            then(process.pid)
        out, err = process.communicate(timeout=PATIENCE)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return Result(process.returncode, out, err, time.monotonic() - begin)


def updates(output_dir: Path, *, key: str = LOSS) -> dict[int, Any]:
    """{update: value} of metrics.jsonl; asserts that no update is there twice."""
    path = output_dir / "metrics.jsonl"
    entries = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    found = [(entry["step"], entry[key]) for entry in entries if key in entry]
    assert len(dict(found)) == len(found), f"an update twice in {path}"
    return dict(found)


def command_to_go_on(out: str) -> list[str]:
    """The command that the table at the end shows, folded or not."""
    return shlex.split(" ".join(line.strip() for line in out.rpartition("go on")[2].removeprefix(" with").splitlines()))


# ----------------------------------------------------------- many short runs: forked with everything imported


class WarmServer:
    """Started when first used."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def run(self, request: dict[str, Any]) -> int:
        if self._process is None:
            command = [sys.executable, "-m", "tests.e2e.warm_server"]
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        ready, _, _ = select.select([self._process.stdout], [], [], PATIENCE)
        assert ready, f"no end after {PATIENCE} s: {request['words']}"
        return int(self._process.stdout.readline())

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


SERVER = WarmServer()


def warm(*words: str, folder: Path, world: int = 1, script: str = "", **changes: str) -> Result:
    """`python -m fourfold <words>`, or a script, in fresh processes that have the libraries imported already."""
    out, err = folder / ".out", folder / ".err"
    request = {"words": words, "world": world, "script": script}
    request |= {"folder": str(folder), "out": str(out), "err": str(err)}
    begin = time.monotonic()
    code = SERVER.run({**request, "environment": environment(**changes)})
    return Result(code, out.read_text(), err.read_text(), time.monotonic() - begin)
