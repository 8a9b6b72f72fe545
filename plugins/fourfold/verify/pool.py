"""Ranks on this machine: processes forked for each task from one server that has torch and DeepSpeed imported, so that a rank
starts in a tenth of a second and inherits neither groups, nor threads, nor memory of an earlier task."""

import faulthandler
import multiprocessing
import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

ASKED = 1.0  # seconds to tell where it is, for a rank that does not answer
LAST_WORDS = 5.0  # seconds that the others get to tell what they saw, once a rank has failed


class RanksFailed(RuntimeError):
    """A rank failed, died or hung: `failures` has what each such rank said."""

    def __init__(self, failures: dict[int, str]) -> None:
        self.failures = failures
        super().__init__(
            "ranks failed:\n" + "\n".join(f"--- rank {rank}: {failures[rank]}" for rank in sorted(failures))
        )


class RankPool:
    """`run(world, function, **kwargs)` calls `function(rank, **kwargs)` on each of `world` gloo ranks of a fresh
    process group and returns their results in rank order. A rank that fails, dies or hangs fails the call, with the
    traces of all ranks; none is left behind."""

    def __init__(self, *, preload: str = "fourfold.verify.preload", patience: float = 300.0) -> None:
        """`preload` is imported once, by the server. `patience`: seconds that one task may take."""
        self._patience = patience
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([preload])

    def warm_up(self) -> None:
        """Begin to import, in the background. Ctrl-C is for the caller, which then ends the server."""
        from multiprocessing import forkserver

        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited
        forkserver.ensure_running()
        signal.signal(signal.SIGINT, before)

    def run(self, world: int, function: Callable[..., Any], **kwargs: Any) -> list[Any]:
        ranks: list[tuple[Any, Connection]] = []
        with tempfile.TemporaryDirectory(prefix="fourfold-ranks-") as folder:
            try:
                for rank in range(world):
                    ranks.append(self._start(function, kwargs, rank, world, Path(folder), self._patience))
                return self._collect(ranks, Path(folder))
            finally:
                for process, connection in ranks:
                    connection.close()
                    process.kill()
                    process.join()

    def _start(self, *task: Any) -> tuple[Any, Connection]:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs, *task), daemon=True)
        try:
            process.start()
        except (EOFError, ConnectionError) as error:
            ours.close()
            raise RanksFailed(
                {task[2]: f"the server that starts ranks died ({error}): killed, or out of memory"}
            ) from None
        finally:
            theirs.close()
        return process, ours

    def _collect(self, ranks: list[tuple[Any, Connection]], folder: Path) -> list[Any]:
        answers: dict[int, Any] = {}
        failures: dict[int, str] = {}
        waiting = {connection: rank for rank, (_, connection) in enumerate(ranks)}
        end = time.monotonic() + self._patience
        while waiting:
            left = max(0.0, end - time.monotonic())
            ready = wait(list(waiting), timeout=min(left, LAST_WORDS) if failures else left)
            if not ready:
                break
            for connection in [one for one in waiting if one in ready]:
                rank = waiting.pop(connection)
                try:
                    good, value = connection.recv()
                except EOFError:
                    good, value = False, "the process died"
                (answers if good else failures)[rank] = value
        if failures or waiting:
            silent = {rank: ranks[rank][0] for rank in waiting.values()}
            late = "" if failures else f" after {self._patience:g} s"
            at = _stacks(silent, folder)
            raise RanksFailed({**{rank: f"no answer{late}{at[rank]}" for rank in silent}, **failures})
        return [answers[rank] for rank in range(len(ranks))]


def _stacks(silent: dict[int, Any], folder: Path) -> dict[int, str]:
    """Where each of them is, innermost call first; nothing where it does not tell."""
    for process in silent.values():
        if process.is_alive():
            os.kill(process.pid, signal.SIGUSR1)
    time.sleep(ASKED)
    files = {rank: folder / f"stack-{rank}" for rank in silent}
    told = {rank: path.read_text().split(f'File "{__file__}"')[0] for rank, path in files.items() if path.is_file()}
    return {rank: f"; it is at\n{told[rank].rstrip()}" if told.get(rank) else "" for rank in silent}


def _serve(
    connection: Connection,
    function: Callable[..., Any],
    kwargs: dict[str, Any],
    rank: int,
    world: int,
    folder: Path,
    patience: float,
) -> None:
    import torch.distributed as dist

    threading.Thread(target=_end_with_the_caller, args=(connection,), daemon=True).start()
    stack = open(folder / f"stack-{rank}", "w")  # noqa: SIM115  # as long as the process
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(folder / "store"), world),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=2 * patience),  # the caller is the first to lose patience
        )
        answer = (True, function(rank, **kwargs))
    except BaseException:
        answer = (False, traceback.format_exc())
    connection.send(answer)
    time.sleep(patience)  # until the caller closes the connection: other ranks may still talk to this one


def _end_with_the_caller(connection: Connection) -> None:
    """Nothing ever comes from it: it is closed when a task is over, also if the caller was killed."""
    connection.poll(None)
    os._exit(0)
