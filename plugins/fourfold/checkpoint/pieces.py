"""Checkpoints that know no layout: slices of flattened tensors under their Hugging Face names.

A folder `step-00000040` holds
    rank-00003.safetensors  one of each writing rank, with keys `<kind>:<name>:<start>`: 1-D data that begins at element
                            `start` of the flattened tensor. Kinds: `master` (fp32), the optimizer's own names of its
                            state tensors (exp_avg, fp32), and `weight` (the training dtype, if that is not fp32)
    pieces.json             where each tensor's pieces lie: {name: {shape, pieces: [[start, count, file], ...]}}
    config.json             the settings of the run, without secrets
    checkpoint.json         everything else, to be read by people too, with the size and digest of every other file
The folder is complete when it has checkpoint.json: it is written aside, synced and renamed.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fourfold.checkpoint.files import CHUNK, NAMES, digest_of
from fourfold.model.weights import read_header

MASTER = "master"
WEIGHT = "weight"
INDEX = "checkpoint.json"
PIECES = "pieces.json"
CONFIG = "config.json"
FORMAT = 2
KEPT = "kept_for_ever"
DTYPES = {name: dtype for dtype, name in NAMES.items()}


class NewerFormat(ValueError):
    """A checkpoint that a later version wrote: sound, but not for this one."""


def rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def key(kind: str, name: str, start: int) -> str:
    return f"{kind}:{name}:{start}"


@dataclass(frozen=True)
class _Piece:
    start: int
    count: int
    file: str


class Pieces:
    """All slices of a checkpoint. Opening reads no tensor file; reading one opens those that have a part of it."""

    def __init__(self, folder: Path) -> None:
        """Raises ValueError if the folder is no complete checkpoint."""
        self.folder = folder
        self.index = read_index(folder)
        table = read_table(folder)
        self._shapes = {name: torch.Size(entry["shape"]) for name, entry in table.items()}
        self._pieces = {
            name: sorted((_Piece(*piece) for piece in entry["pieces"]), key=lambda piece: piece.start)
            for name, entry in table.items()
        }
        self._headers: dict[str, tuple[dict[str, Any], int]] = {}

    def kinds(self) -> set[str]:
        return set(self.index["kinds"])

    def shapes(self) -> dict[str, torch.Size]:
        return self._shapes

    def dtype(self, kind: str) -> torch.dtype:
        return DTYPES[self.index["kinds"][kind]]

    def read(self, name: str, *, kind: str = MASTER, start: int = 0, count: int | None = None) -> Tensor:
        """Elements [start, start + count) of a flattened tensor on the CPU, in the dtype of its kind."""
        count = self._shapes[name].numel() - start if count is None else count
        result = torch.empty(count, dtype=self.dtype(kind))
        self._read_into(result, name, kind=kind, start=start)
        return result

    def read_into(self, target: Tensor, name: str, *, kind: str = MASTER, start: int = 0) -> None:
        """Fill the 1-D `target`, of any dtype and on any device, from element `start` on; in hand is one chunk."""
        if target.device.type == "cpu" and target.dtype is self.dtype(kind):
            self._read_into(target, name, kind=kind, start=start)
            return
        for at in range(0, len(target), CHUNK):
            part = target[at : at + CHUNK]
            part.copy_(self.read(name, kind=kind, start=start + at, count=len(part)))

    def _read_into(self, target: Tensor, name: str, *, kind: str, start: int) -> None:
        end, filled = start + len(target), 0
        for piece in self._pieces.get(name, []):
            low, high = max(start, piece.start), min(end, piece.start + piece.count)
            if low < high:
                self._fill(target[low - start : high - start], piece, kind=kind, name=name, at=low - piece.start)
                filled += high - low
        if filled != len(target):
            raise ValueError(f"Checkpoint {self.folder} has {filled} of {len(target)} elements of {kind} {name}.")

    def _fill(self, target: Tensor, piece: _Piece, *, kind: str, name: str, at: int) -> None:
        """Straight from the file: a mapping would count its pages to this process."""
        header, data = self._header(piece.file)
        entry = header[key(kind, name, piece.start)]
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


def read_index(folder: Path) -> dict[str, Any]:
    """Raises ValueError if it is missing, damaged or of another format."""
    index = _read_json(folder / INDEX)
    missing = sorted({"format", "progress", "files", "kinds", "run"} - set(index))
    if missing and index.get("format", FORMAT) == FORMAT:
        raise ValueError(f"{folder.absolute() / INDEX} is damaged: it lacks {', '.join(missing)}.")
    if index["format"] != FORMAT:
        raise (NewerFormat if index["format"] > FORMAT else ValueError)(
            f"{folder.absolute() / INDEX} has format {index['format']}; this version reads {FORMAT}."
        )
    return index


def read_table(folder: Path) -> dict[str, Any]:
    """{name: {shape, pieces}}. Raises ValueError if it is not what was written."""
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
