"""Runs fourfold again and again without importing the libraries again: one JSON request a line in, one exit code out.

Several ranks of a request are run as torchrun runs them: it keeps the store, and who fails has the others ended.

A server of its own: multiprocessing has one forkserver for all, and that is the rank pool's.
"""

import json
import os
import runpy
import signal
import sys
import time
import warnings
from collections.abc import Iterable, Iterator
from math import inf
from pathlib import Path
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch.distributed as dist

    import fourfold.train  # noqa: F401
    from fourfold.cli import main


def run(request: dict[str, Any], launch: dict[str, str]) -> int:
    """In the child: become the process that was asked for."""
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"] | launch)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for path, number in ((request["out"], 1), (request["err"], 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    sys.argv = [request["script"] or "__main__.py", *request["words"]]
    try:
        if request["script"]:
            runpy.run_path(request["script"], run_name="__main__")
        else:
            main()
    except SystemExit as leaving:
        return int(leaving.code or 0)
    return 0


def start(request: dict[str, Any], launch: dict[str, str]) -> int:
    child = os.fork()
    if child == 0:
        code = run(request, launch)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return child


def exit_code(children: set[int]) -> int:
    """That of the first that fails."""
    failed, deadline = 0, inf
    while children:
        child, status = os.waitpid(-1, os.WNOHANG if failed else 0)
        if child == 0:
            time.sleep(0.02)
            end(children if time.monotonic() > deadline else filter(is_stopped, children), signal.SIGKILL)
            continue
        children.discard(child)
        code = os.waitstatus_to_exitcode(status)
        if code and not failed:
            failed, deadline = code, time.monotonic() + 30.0
            end(children, signal.SIGTERM)
    return failed


def end(children: Iterable[int], how: int) -> None:
    for child in children:
        os.kill(child, how)


def is_stopped(child: int) -> bool:
    """By SIGSTOP: it will not hear of SIGTERM."""
    return Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def launches(world: int) -> Iterator[dict[str, str]]:
    """The variables of each rank that torchrun would set."""
    if world == 1:
        yield {}
        return
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for rank in range(world):
        yield {
            **{name: str(rank) for name in ("RANK", "LOCAL_RANK")},
            **{name: str(world) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")},
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }
    STORES.append(store)


STORES: list[Any] = []  # of the request at hand
for line in sys.stdin:
    asked = json.loads(line)
    for name in ("out", "err"):
        open(asked[name], "w").close()
    code = exit_code({start(asked, launch) for launch in launches(asked["world"])})
    STORES.clear()
    print(code, flush=True)
