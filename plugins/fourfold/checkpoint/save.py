"""Saving beside or within the training: each rank writes what it owns, the main one puts the folder in place.

Every rank writes its file in a thread and posts what it wrote on the board; the main rank waits for all, writes the index
with the digests and renames the folder. The training waits for that (`in_background=False`) or only for the copy of its
state to host memory; one save is in flight at most. A save that fails leaves nothing, is told, and the training goes on.
"""

import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from errno import EIO
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fourfold.checkpoint.board import Board
from fourfold.checkpoint.files import NAMES, digest_of, sync, write_json, write_safetensors
from fourfold.checkpoint.kept import NAME, STEP, newest, put_in_place, rotate, step_of, tidy
from fourfold.checkpoint.pieces import CONFIG, FORMAT, INDEX, KEPT, PIECES, rank_file
from fourfold.checkpoint.snapshot import HostCopies, Snapshot, look
from fourfold.checkpoint.table import listed, table_of
from fourfold.mesh import Mesh
from fourfold.zero.engine import ZeroEngine

SLOW_DISK = 100e6  # bytes a second, assumed until a save was measured
VERSIONED = ("fourfold", "torch", "deepspeed", "transformers")


@dataclass(frozen=True)
class Progress:
    """Where a run is: updates done, rows of the data consumed (over all epochs and ranks), tokens seen."""

    step: int = 0
    rows: int = 0
    tokens: int = 0
    skipped: int = 0  # updates without any target
    shortcut: dict[str, Any] | None = None  # to `rows` in a stream (data/loader.py)


@dataclass
class _Save:
    progress: Progress
    number: int  # of the save in this run, the same on every rank
    snapshot: Snapshot
    aside: Path
    target: Path


class Saver:
    """Checkpoints of one run in `folder`. `save` and `finish` are called on all ranks alike, but are no collectives."""

    def __init__(
        self,
        folder: Path,
        *,
        engine: ZeroEngine,
        mesh: Mesh,
        board: Board,
        about: dict[str, Any],
        config: dict[str, Any],
        keep_last: int | None,
        keep_every: int | None,
        in_background: bool,
        say: Callable[[str], None],
        resumed: Path | None = None,
    ) -> None:
        """`about` is what the index remembers of the run, `config` its settings. `say` tells the user of each
        save. `resumed` is the checkpoint that the run goes on from: one of `folder` need not be written again."""
        self._folder, self._engine, self._mesh, self._board = folder, engine, mesh, board
        self._about, self._config, self._say = about, config, say
        self._keep_last, self._keep_every = keep_last, keep_every
        self._host = HostCopies() if in_background else None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._count, self._seconds = 0, 0.0
        is_ours = resumed is not None and NAME.fullmatch(resumed.name) and resumed.parent.resolve() == folder.resolve()
        self._saved_step = step_of(resumed) if resumed and is_ours else -1
        if mesh.is_main:
            tidy(folder)
            board.post("folder is clean", True)
        board.read("folder is clean", of=0)

    def save(self, progress: Progress) -> None:
        """Begin a save when the one before has ended; returns when the engine may change again."""
        self.settle()
        name = STEP.format(progress.step)
        snapshot = look(self._engine)
        save = _Save(
            progress,
            number=self._count,
            snapshot=self._host.copy(snapshot) if self._host else snapshot,
            aside=self._folder / f".{name}.partial",
            target=self._folder / name,
        )
        self._thread = threading.Thread(target=self._run, args=(save,), name="save")
        self._thread.start()
        if not self._host:
            self.settle()

    def finish(self, progress: Progress) -> Path:
        """The checkpoint of `progress`, saved now if it was not. Raises ValueError if that cannot be written."""
        self.settle()
        if self._saved_step != progress.step:
            self.save(progress)
            self.settle()
        if self._saved_step != progress.step:
            kept = newest(self._folder)
            raise ValueError(
                f"The last checkpoint, of update {progress.step}, could not be written to {self._folder}: "
                f"{self._board.read(f'save/{self._count - 1}', of=0)}. The newest complete one there is "
                f"{kept.name if kept else 'none'}: make room and start again{' with resume=auto' if kept else ''}."
            )
        return self._folder / STEP.format(progress.step)

    def expected_seconds(self) -> float:
        """How long a save will take: half as long again as the latest, or by a slow disk."""
        if self._seconds:
            return 1.5 * self._seconds
        return look(self._engine).bytes() / SLOW_DISK if self._writes() else 0.0

    def settle(self) -> None:
        """Until the save in flight has ended on all ranks. Raises what it met that is no matter of the disk."""
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        if self._error is not None:
            raise self._error

    def _run(self, save: _Save) -> None:
        """In the thread."""
        begin = time.monotonic()
        try:
            self._board.post(f"save/{save.number}/{self._mesh.rank}", self._write(save))
            if self._mesh.is_main:
                self._board.post(f"save/{save.number}", self._complete(save))
            failure = self._board.read(f"save/{save.number}", of=0)
        except BaseException as error:
            with suppress(Exception):  # so that the main rank need not wait for this one's next save
                self._board.post(
                    f"save/{save.number}/{self._mesh.rank}", {"error": f"rank {self._mesh.rank}: {error!r}"}
                )
            self._error = error
            return
        self._seconds = time.monotonic() - begin
        self._count += 1
        if failure:
            self._say(f"checkpoint of update {save.progress.step} not written: {failure}")
        else:
            self._saved_step = save.progress.step
            self._say(f"checkpoint {save.target.name} written in {self._seconds:.1f} s")

    def _writes(self, rank: int | None = None) -> bool:
        """Whether a rank (default: this one) writes: one replica of each shard does. Of tensors
        that ranks of a tensor-parallel group hold copies of, one of them (Fragment.stored)."""
        rank = self._mesh.rank if rank is None else rank
        return self._mesh.layout.coordinate(rank)["dp_replicate"] == 0

    def _write(self, save: _Save) -> dict[str, Any]:
        """This rank's file; returns what the index has to say of it, or of its failure."""
        if not self._writes():
            return {}
        path = save.aside / rank_file(self._mesh.rank)
        try:
            save.aside.mkdir(parents=True, exist_ok=True)
            written = write_safetensors(path, save.snapshot.entries())
        except OSError as error:
            with suppress(OSError):
                path.unlink()  # the room may be needed
            return {"error": f"rank {self._mesh.rank}: {error.strerror or error} ({path})"}
        return {
            "file": path.name,
            "written": asdict(written),
            "pieces": listed(save.snapshot.fragments),
            "shapes": {name: list(shape) for name, shape in self._engine.shapes().items()},
        }

    def _complete(self, save: _Save) -> str:
        """On the main rank: wait for all files and put the folder in place; returns why not, or nothing."""
        ranks = filter(self._writes, range(self._mesh.layout.world_size))
        reports = [self._board.read(f"save/{save.number}/{rank}", of=rank) for rank in ranks]
        failures = [report["error"] for report in reports if "error" in report]
        try:
            if not failures:
                self._write_index(save, reports)
                put_in_place(save.aside, save.target)
        except OSError as error:
            failures.append(str(error))
        if failures:
            shutil.rmtree(save.aside, ignore_errors=True)
            return "; ".join(failures)
        try:
            rotate(self._folder, keep_last=self._keep_last, latest=save.target)
        except OSError as error:
            self._say(f"an old checkpoint could not be removed: {error}")
        return ""

    def _write_index(self, save: _Save, reports: list[dict[str, Any]]) -> None:
        write_json(save.aside / PIECES, table_of(reports), indent=None)
        write_json(save.aside / CONFIG, self._config)
        files = {report["file"]: report["written"] for report in reports}
        for name, written in files.items():
            size = (save.aside / name).stat().st_size
            if size != written["bytes"]:
                raise OSError(EIO, f"{size} of {written['bytes']} bytes arrived", name)
        files |= {name: asdict(digest_of(save.aside / name)) for name in (PIECES, CONFIG)}
        index = {
            "format": FORMAT,
            "progress": asdict(save.progress),
            KEPT: bool(self._keep_every and save.progress.step % self._keep_every == 0),
            "optimizer_steps": save.snapshot.optimizer_steps,
            "kinds": {kind: NAMES[dtype] for kind, dtype in save.snapshot.kinds().items()},
            "layout": asdict(self._mesh.layout),
            "versions": {name: version(name) for name in VERSIONED},
            **self._about,
            "files": files,
        }
        write_json(save.aside / INDEX, index)
        sync(save.aside)
