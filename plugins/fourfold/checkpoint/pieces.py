"""Checkpoints that know no layout: slices of flattened tensors under their Hugging Face names.

A folder `step-00000040` holds one safetensors file a writing rank, `rank-00003.safetensors`, with keys
`<kind>:<name>:<start>` (kind: master, or the optimizer's own name of a state tensor such as exp_avg; 1-D fp32 data that
begins at element `start` of the flattened tensor), and `checkpoint.json` with everything else. The folder is complete
when it has that file: it is written aside, synced and renamed.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fourfold.model.weights import read_header

MASTER = "master"
INDEX = "checkpoint.json"
FORMAT = 1


@dataclass(frozen=True)
class Piece:
    file: Path
    key: str
    start: int
    count: int


class Pieces:
    """All slices of a checkpoint, read from the headers of its files."""

    def __init__(self, folder: Path) -> None:
        """Raises ValueError if the folder is no complete checkpoint or a file is truncated."""
        self.folder = folder
        self.index = read_index(folder)
        self._pieces: dict[tuple[str, str], list[Piece]] = {}
        for file in self.index["files"]:
            path = folder / file
            if not path.is_file():
                raise ValueError(f"Checkpoint {folder} is incomplete: {file} is missing.")
            for key, entry in read_header(path).items():
                kind, name, start = key.split(":")
                piece = Piece(path, key, int(start), entry["shape"][0])
                self._pieces.setdefault((kind, name), []).append(piece)
        for pieces in self._pieces.values():
            pieces.sort(key=lambda piece: piece.start)

    def kinds(self) -> set[str]:
        return {kind for kind, _ in self._pieces}

    def shapes(self) -> dict[str, torch.Size]:
        return {name: torch.Size(shape) for name, shape in self.index["shapes"].items()}

    def read(self, name: str, *, kind: str = MASTER, start: int = 0, count: int | None = None) -> Tensor:
        """Elements [start, start + count) of a flattened tensor, fp32; only the pieces that overlap are opened."""
        from safetensors import safe_open

        count = self.shapes()[name].numel() - start if count is None else count
        result = torch.empty(count)
        filled = 0
        for piece in self._pieces.get((kind, name), []):
            low, high = max(start, piece.start), min(start + count, piece.start + piece.count)
            if low < high:
                with safe_open(piece.file, framework="pt") as file:
                    values = file.get_slice(piece.key)[low - piece.start : high - piece.start]
                result[low - start : high - start] = values
                filled += high - low
        if filled != count:
            raise ValueError(f"Checkpoint {self.folder} has {filled} of {count} elements of {kind} {name}.")
        return result


def read_index(folder: Path) -> dict[str, Any]:
    """Raises ValueError if it is missing, damaged or of another format."""
    try:
        index = json.loads((folder / INDEX).read_text())
    except OSError:
        raise ValueError(f"{folder.absolute()} is not a complete checkpoint: it has no {INDEX}.") from None
    except ValueError as error:
        raise ValueError(f"{folder.absolute() / INDEX} is damaged: {error}.") from None
    missing = sorted({"format", "progress", "files", "shapes", "run"} - set(index))
    if missing:
        raise ValueError(f"{folder.absolute() / INDEX} is damaged: it lacks {', '.join(missing)}.")
    if index["format"] != FORMAT:
        raise ValueError(f"{folder.absolute() / INDEX} has format {index['format']}; this version reads {FORMAT}.")
    return index


def write_rank_file(folder: Path, *, rank: int, tensors: dict[tuple[str, str, int], Tensor]) -> str:
    """Write this rank's slices, {(kind, name, start): [count]}; returns the file's name."""
    from safetensors.torch import save_file

    file = f"rank-{rank:05d}.safetensors"
    save_file({f"{kind}:{name}:{start}": value.cpu() for (kind, name, start), value in tensors.items()}, folder / file)
    sync(folder / file)
    return file


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Atomically: a reader sees the old file or the new one."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(json.dumps(content, indent=1) + "\n")
    sync(aside)
    aside.replace(path)


def sync(path: Path) -> None:
    """Flush a file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
