"""Ranks for tests: processes forked for each task from one server that has torch and DeepSpeed imported, so that a rank
starts in a tenth of a second and inherits neither groups, nor threads, nor memory of an earlier task."""

import multiprocessing
import os
import tempfile
import traceback
import uuid
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

PATIENCE = 600.0  # seconds that one task may take


class RankPool:
    """`run(world, function, **kwargs)` calls `function(rank, **kwargs)` on each of `world` gloo ranks of a fresh
    process group and returns their results in rank order. A rank that fails, dies or hangs fails the call, with the
    traces of all ranks."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.pool_preload"])

    def run(self, world: int, function: Callable[..., Any], **kwargs: Any) -> list[Any]:
        store = Path(tempfile.gettempdir()) / f"fourfold-store-{uuid.uuid4().hex}"
        ranks = [self._start(function, kwargs, rank, world, store) for rank in range(world)]
        try:
            return self._collect([connection for _, connection in ranks])
        finally:
            for process, connection in ranks:
                connection.close()
                process.kill()
                process.join()
            store.unlink(missing_ok=True)

    def _start(self, *task: Any) -> tuple[Any, Connection]:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs, *task), daemon=True)
        process.start()
        theirs.close()
        return process, ours

    @staticmethod
    def _collect(connections: list[Connection]) -> list[Any]:
        answers: dict[int, Any] = {}
        failures: dict[int, str] = {}
        waiting = {connection: rank for rank, connection in enumerate(connections)}
        while waiting:
            ready = wait(list(waiting), timeout=5.0 if failures else PATIENCE)
            if not ready:
                break
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    good, value = connection.recv()
                except EOFError:
                    good, value = False, "the process died"
                (answers if good else failures)[rank] = value
        if failures or waiting:
            silent = {rank: "no answer" for rank in waiting.values()}
            traces = "\n".join(f"--- rank {rank}: {text}" for rank, text in sorted({**silent, **failures}.items()))
            raise AssertionError(f"ranks failed:\n{traces}")
        return [answers[rank] for rank in range(len(connections))]


def _serve(
    connection: Connection, function: Callable[..., Any], kwargs: dict[str, Any], rank: int, world: int, store: Path
) -> None:
    import torch.distributed as dist

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    try:
        dist.init_process_group("gloo", store=dist.FileStore(str(store), world), rank=rank, world_size=world)
        answer = (True, function(rank, **kwargs))
    except BaseException:
        answer = (False, traceback.format_exc())
    connection.send(answer)
    connection.poll(PATIENCE)  # until the caller closes it: other ranks may still talk to this one
