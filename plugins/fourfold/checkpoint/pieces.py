"""Checkpoints that know no layout: slices of flattened tensors under their Hugging Face names.

A folder `step-00000040` holds
    rank-00003.safetensors  one of each writing rank, with keys `<kind>:<name>:<start>`: 1-D data that begins at element
                            `start` of the flattened tensor, or of the slice of it that tensor parallelism leaves the
                            rank. Kinds: `master` (fp32), the optimizer's own names of its state tensors (exp_avg, fp32),
                            and `weight` (the training dtype, if that is not fp32)
    pieces.json             where each tensor's pieces lie (table.py)
    config.json             the settings of the run, without secrets
    checkpoint.json         everything else, to be read by people too, with the size and digest of every other file
The folder is complete when it has checkpoint.json: it is written aside, synced and renamed.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fourfold.checkpoint.files import CHUNK, NAMES, digest_of
from fourfold.checkpoint.table import Held, Piece, held
from fourfold.model.weights import read_header
from fourfold.overlaps import Block, in_hand, overlaps
from fourfold.slices import Slice

MASTER = "master"
WEIGHT = "weight"
INDEX = "checkpoint.json"
PIECES = "pieces.json"
CONFIG = "config.json"
FORMAT = 3
READABLE = (2, 3)
KEPT = "kept_for_ever"
DTYPES = {name: dtype for dtype, name in NAMES.items()}


class NewerFormat(ValueError):
    """A checkpoint that a later version wrote: sound, but not for this one."""


def rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def key_of(kind: str, name: str, start: int) -> str:
    """In the file of one rank, which holds one slice of each tensor."""
    return f"{kind}:{name}:{start}"


class Pieces:
    """All slices of a checkpoint. Opening reads no tensor file; reading one opens those that have a part of it."""

    def __init__(self, folder: Path) -> None:
        """Raises ValueError if the folder is no complete checkpoint."""
        self.folder = folder
        self.index = read_index(folder)
        self._held = {name: held(entry) for name, entry in read_table(folder).items()}
        self._shapes = {name: slices[0].part.shape for name, slices in self._held.items()}
        self._headers: dict[str, tuple[dict[str, Any], int]] = {}

    def kinds(self) -> set[str]:
        return set(self.index["kinds"])

    def shapes(self) -> dict[str, torch.Size]:
        """Global shape of every tensor by name."""
        return self._shapes

    def dtype(self, kind: str) -> torch.dtype:
        return DTYPES[self.index["kinds"][kind]]

    def read(self, name: str, *, kind: str = MASTER, start: int = 0, count: int | None = None) -> Tensor:
        """Elements [start, start + count) of a flattened whole tensor on the CPU, in the dtype of its kind."""
        count = self._shapes[name].numel() - start if count is None else count
        result = torch.empty(count, dtype=self.dtype(kind))
        self.read_into(result, name, kind=kind, start=start)
        return result

    def read_into(
        self, target: Tensor, name: str, *, kind: str = MASTER, start: int = 0, part: Slice | None = None
    ) -> None:
        """Fill the contiguous 1-D `target`, of any dtype and on any device, from element `start` of the flattened `part`
        (default: the whole tensor) on, whatever the cuts that were stored. In hand is at most one chunk.

        Raises ValueError if an element is in no file, or beyond the part: padding is not stored.
        """
        wanted, filled = part or Slice.whole(self._shapes[name]), 0
        for source in self._held.get(name, []):
            for block in overlaps(wanted, source.part, start=start, count=len(target)):
                for row, small in in_hand(block, width=source.part.width, most=CHUNK):
                    at = block.at - start + row * wanted.width
                    filled += self._copy(small, source, target=target, at=at, width=wanted.width, key=(kind, name))
        if filled != len(target):
            raise ValueError(f"Checkpoint {self.folder} has {filled} of {len(target)} elements of {kind} {name}.")

    def _copy(self, block: Block, source: Held, *, target: Tensor, at: int, width: int, key: tuple[str, str]) -> int:
        """`block` to element `at` of `target`, whose rows are `width` apart; how many of its elements there were."""
        if block.rows == 1:
            return self._copy_run(target[at : at + block.columns], source, of=block.of, key=key)
        shape, distance = (block.rows, block.columns), source.part.width
        values = torch.empty((block.rows - 1) * distance + block.columns, dtype=self.dtype(key[0]))
        found = self._fill(values, source, of=block.of, key=key)
        target.as_strided(shape, (width, 1), target.storage_offset() + at).copy_(
            values.as_strided(shape, (distance, 1))
        )
        return sum(_in_columns(low, high, first=block.of, columns=block.columns, width=distance) for low, high in found)

    def _copy_run(self, target: Tensor, source: Held, *, of: int, key: tuple[str, str]) -> int:
        """Contiguous elements: straight to their place if that is memory of the host, of the same dtype."""
        if target.device.type == "cpu" and target.dtype is self.dtype(key[0]):
            return sum(high - low for low, high in self._fill(target, source, of=of, key=key))
        if len(target) > CHUNK:
            parts = enumerate(target.split(CHUNK))
            return sum(self._copy_run(part, source, of=of + number * CHUNK, key=key) for number, part in parts)
        values = torch.empty(len(target), dtype=self.dtype(key[0]))
        count = self._copy_run(values, source, of=of, key=key)
        target.copy_(values)
        return count

    def _fill(self, target: Tensor, source: Held, *, of: int, key: tuple[str, str]) -> list[tuple[int, int]]:
        """Elements of the flattened slice from `of` on, as far as there are pieces of them; which there were."""
        found = []
        for piece in source.pieces:
            low, high = max(of, piece.start), min(of + len(target), piece.end)
            if low < high:
                self._read_piece(target[low - of : high - of], piece, key=key, at=low - piece.start)
                found.append((low, high))
        return found

    def _read_piece(self, target: Tensor, piece: Piece, *, key: tuple[str, str], at: int) -> None:
        """Straight from the file: a mapping would count its pages to this process."""
        header, data = self._header(piece.file)
        entry = header[key_of(*key, piece.start)]
        with (self.folder / piece.file).open("rb", buffering=0) as file:
            file.seek(data + entry["data_offsets"][0] + at * target.itemsize)
            view = target.view(torch.uint8).numpy().data
            while len(view):
                got = file.readinto(view)
                if not got:
                    raise ValueError(f"{self.folder / piece.file} is cut short.")
                view = view[got:]

    def _header(self, file: str) -> tuple[dict[str, Any], int]:
        """(entries by key, position of the data in the file)."""
        if file not in self._headers:
            path = self.folder / file
            header = read_header(path)
            size = max((entry["data_offsets"][1] for entry in header.values()), default=0)
            self._headers[file] = (header, path.stat().st_size - size)
        return self._headers[file]


def _in_columns(low: int, high: int, *, first: int, columns: int, width: int) -> int:
    """How many of the elements [low, high) of rows of `width` lie in the `columns` that begin with that of `first`."""
    left = first % width

    def before(element: int) -> int:
        row, column = divmod(element, width)
        return row * columns + min(max(column - left, 0), columns)

    return before(high) - before(low)


def read_index(folder: Path) -> dict[str, Any]:
    """Raises ValueError if it is missing, damaged or of another format."""
    index = _read_json(folder / INDEX)
    missing = sorted({"format", "progress", "files", "kinds", "run"} - set(index))
    if missing and index.get("format", FORMAT) in READABLE:
        raise ValueError(f"{folder.absolute() / INDEX} is damaged: it lacks {', '.join(missing)}.")
    if index["format"] not in READABLE:
        raise (NewerFormat if index["format"] > FORMAT else ValueError)(
            f"{folder.absolute() / INDEX} has format {index['format']}; this version reads {READABLE[0]} to {FORMAT}."
        )
    return index


def read_table(folder: Path) -> dict[str, Any]:
    """As table.py describes it. Raises ValueError if it is not what was written."""
    written = read_index(folder)["files"].get(PIECES)
    table = _read_json(folder / PIECES)
    if written and digest_of(folder / PIECES).xxh3 != written["xxh3"]:
        raise ValueError(f"{folder.absolute() / PIECES} is damaged: it is not what was written (its digest differs).")
    return table


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except OSError:
        raise ValueError(f"{path.parent.absolute()} is not a complete checkpoint: it has no {path.name}.") from None
    except ValueError as error:
        raise ValueError(f"{path.absolute()} is damaged: {error}.") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path.absolute()} is damaged: no JSON object.")
    return found


def fault(folder: Path, *, share: int = 0, shares: int = 1) -> str | None:
    """What is wrong with the files of a checkpoint, or None; reads every `shares`-th file whole, from the `share`-th."""
    files = read_index(folder)["files"]
    for name in sorted(files)[share::shares]:
        path, wanted = folder / name, files[name]
        try:
            size = path.stat().st_size
            if size != wanted["bytes"]:
                return f"{name} has {size} of {wanted['bytes']} bytes"
            if digest_of(path).xxh3 != wanted["xxh3"]:
                return f"{name} is not what was written (its digest differs)"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
    return None
