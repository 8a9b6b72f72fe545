"""Ranks for tests: processes forked once from a server that has torch and DeepSpeed imported, reused by every test."""

import gc
import multiprocessing
import os
import tempfile
import traceback
import uuid
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

PATIENCE = 180.0  # seconds that one task may take


class RankPool:
    """`run(world, function, **kwargs)` calls `function(rank, **kwargs)` on each of `world` gloo ranks of a fresh
    process group and returns their results in rank order. A rank that fails or hangs fails the call, with the traces
    of all ranks; the pool is then made anew."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.pool_preload"])
        self._workers: list[tuple[Any, Connection]] = []

    def run(self, world: int, function: Callable[..., Any], **kwargs: Any) -> list[Any]:
        while len(self._workers) < world:
            self._workers.append(self._start())
        store = Path(tempfile.gettempdir()) / f"fourfold-store-{uuid.uuid4().hex}"
        workers = self._workers[:world]
        for rank, (_, connection) in enumerate(workers):
            connection.send((function, kwargs, rank, world, str(store)))
        try:
            return self._collect(workers)
        finally:
            store.unlink(missing_ok=True)

    def _collect(self, workers: list[tuple[Any, Connection]]) -> list[Any]:
        answers: dict[int, Any] = {}
        failures: dict[int, str] = {}
        waiting = {connection: rank for rank, (_, connection) in enumerate(workers)}
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
            self.close()
            silent = {rank: "no answer" for rank in waiting.values()}
            traces = "\n".join(f"--- rank {rank}: {text}" for rank, text in sorted({**silent, **failures}.items()))
            raise AssertionError(f"ranks failed:\n{traces}")
        return [answers[rank] for rank in range(len(workers))]

    def _start(self) -> tuple[Any, Connection]:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        return process, ours

    def close(self) -> None:
        for process, connection in self._workers:
            connection.close()
            process.kill()
            process.join()
        self._workers = []


def _serve(connection: Connection) -> None:
    while True:
        try:
            function, kwargs, rank, world, store = connection.recv()
        except EOFError:
            return
        try:
            answer = (True, _run_one(function, kwargs, rank, world, store))
        except BaseException:
            answer = (False, traceback.format_exc())
        connection.send(answer)


def _run_one(function: Callable[..., Any], kwargs: dict[str, Any], rank: int, world: int, store: str) -> Any:
    import torch.distributed as dist

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    try:
        return function(rank, **kwargs)
    finally:
        _forget_groups()
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()  # engines are full of cycles; the next task wants their memory


def _forget_groups() -> None:
    """DeepSpeed keeps groups, and the count of partitioned parameters, in globals that would outlive this task."""
    import deepspeed.comm.comm
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
    from deepspeed.runtime.zero.partition_parameters import Init
    from deepspeed.utils import groups

    Init.param_id = 0
    DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__[0][0] = 0
    deepspeed.comm.comm.cdb = None
    for name, value in vars(groups).items():
        if name.startswith("_") and name.isupper():
            setattr(groups, name, {} if isinstance(value, dict) else None)
    groups.mpu = None
