"""Notices between ranks through the store of the process group, without any collective.

A save or a check of a checkpoint takes as long as the disk does; a barrier would end the run when that is longer than the
timeout of a collective, and could not be called from a thread beside the training. Who waits, looks whether the other
process still lives: each says so every second.
"""

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from fourfold.whereabouts import whereabouts

BEAT = 1.0  # seconds between two signs of life
SILENCE = 12.0  # seconds without one after which a process counts as gone
LATE = 4.0  # the same where communication has broken already, and somebody is known to be gone
QUIET = 30.0  # seconds without one after which the first rank says so, while the others still wait


class RankLost(RuntimeError):
    """The process that a notice was awaited from gives no sign of life."""


class Board:
    """Of one rank, to be closed before the process group ends. `post` once under a key, `read` on any rank.

    `quiet` is called on the first rank, from a thread, with each rank that has been silent, and for how
    many seconds.
    """

    def __init__(self, *, rank: int, world_size: int, quiet: Callable[[int, float], None] | None = None) -> None:
        store = dist.distributed_c10d._get_default_store()
        self._store = dist.PrefixStore("fourfold", store)
        self._rank, self._world_size = rank, world_size
        self._watch = Watch(quiet) if quiet and rank == 0 and world_size > 1 else None
        self._store.set(f"alive/{rank}", "0")
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="sign of life", daemon=True)
        self._thread.start()

    def __enter__(self) -> "Board":
        return self

    def __exit__(self, *error: object) -> None:
        self._closed.set()
        self._thread.join()

    def _beat(self) -> None:
        count = 0
        while not self._closed.wait(BEAT):
            count += 1
            try:
                self._store.set(f"alive/{self._rank}", str(count))
                if self._store.check(["broken"]):
                    self._store.set(f"where/{self._rank}", whereabouts() or "")
                if self._watch and count % 5 == 0:
                    self._watch.look(self._beats())
            except Exception:  # the store went with the process that kept it: nobody is left to tell
                return

    def post(self, key: str, value: Any) -> None:
        self._store.set(key, json.dumps(value))

    def read(self, key: str, *, of: int) -> Any:
        """The value under `key` once rank `of` has posted it. Raises RankLost if that process is gone."""
        pause, beat, heard = 0.001, b"", time.monotonic()
        while not self._store.check([key]):
            time.sleep(pause)
            pause = min(pause * 2, 0.1)
            if pause == 0.1 and (latest := self._beat_of(of)) != beat:
                beat, heard = latest, time.monotonic()
            if time.monotonic() - heard > SILENCE:
                raise RankLost(f"rank {of} has given no sign of life for {SILENCE:.0f} s")
        return json.loads(self._store.get(key))

    def _beat_of(self, rank: int) -> bytes:
        return self._store.get(f"alive/{rank}") if self._store.check([f"alive/{rank}"]) else b""

    def _beats(self) -> list[bytes]:
        return list(self._store.multi_get([f"alive/{rank}" for rank in range(self._world_size)]))

    def missing(self) -> dict[int, str]:
        """Ranks that keep the others waiting, as far as LATE seconds show: {rank: the line of code that it is at}, "" for
        one that shows no sign of life. Not those that have come here themselves, or wait in communication: this one is
        leaving because of them."""
        self.post(f"leaves/{self._rank}", True)
        self.post("broken", True)
        before = self._beats()
        time.sleep(LATE)
        found = {}
        for rank, (then, now) in enumerate(zip(before, self._beats(), strict=True)):
            if self._store.check([f"leaves/{rank}"]):
                continue
            where = self._store.get(f"where/{rank}").decode() if self._store.check([f"where/{rank}"]) else ""
            if then == now or where:
                found[rank] = where if then != now else ""
        return found

    def gather(self, key: str, value: Any) -> list[Any]:
        """`value` of every rank, in rank order, on every rank. The first rank collects them, so that each reads one."""
        self.post(f"{key}/{self._rank}", value)
        if self._rank == 0:
            self.post(key, [self.read(f"{key}/{rank}", of=rank) for rank in range(self._world_size)])
        return list(self.read(key, of=0))


class Watch:
    """Tells once of each rank that goes silent, and again after it was heard."""

    def __init__(self, quiet: Callable[[int, float], None]) -> None:
        self._quiet = quiet
        self._last: dict[int, tuple[bytes, float]] = {}
        self._told: set[int] = set()

    def look(self, beats: list[bytes]) -> None:
        now = time.monotonic()
        for rank, beat in enumerate(beats):
            if rank not in self._last or self._last[rank][0] != beat:
                self._last[rank] = beat, now
                self._told.discard(rank)
            elif now - self._last[rank][1] > QUIET and rank not in self._told:
                self._told.add(rank)
                self._quiet(rank, QUIET)
