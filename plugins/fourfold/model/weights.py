"""Safetensors files of a model folder, read by the slice. Nothing is gathered and no file stays mapped, so a reader's
memory is what it asked for plus the pages of one tensor."""

import json
import struct
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fourfold.overlaps import Block, overlaps
from fourfold.slices import Slice


class Weights:
    """Tensors of one or several safetensors files by name."""

    def __init__(self, folder: Path) -> None:
        """Reads the headers only. Raises ValueError for a folder without safetensors, or a missing or truncated file."""
        self.folder = folder
        self._file_of: dict[str, Path] = {}
        self._shape_of: dict[str, torch.Size] = {}
        self._dtypes: set[str] = set()
        for path in _files(folder):
            for name, entry in read_header(path).items():
                self._dtypes.add(entry["dtype"])
                self._file_of[name] = path
                self._shape_of[name] = torch.Size(entry["shape"])

    def names(self) -> set[str]:
        return set(self._file_of)

    def shape(self, name: str) -> torch.Size:
        return self._shape_of[name]

    def exceeds(self, dtype: torch.dtype) -> bool:
        """Whether a tensor has more precision in its file than `dtype` holds."""
        return dtype.itemsize < 4 and "F32" in self._dtypes

    def read(self, name: str, *, start: int = 0, count: int | None = None) -> Tensor:
        """Elements [start, start + count) of the flattened tensor, in the dtype of the file; default: all of it."""
        from safetensors import safe_open

        shape = self.shape(name)
        count = shape.numel() - start if count is None else count
        if not shape or count == 0:
            with safe_open(self._file_of[name], framework="pt") as file:
                return file.get_tensor(name).reshape(-1)[start : start + count].clone()
        row = shape[1:].numel()
        first, last = start // row, -(-(start + count) // row)
        with safe_open(self._file_of[name], framework="pt") as file:
            rows = file.get_slice(name)[first:last].reshape(-1)
        return rows[start - first * row : start - first * row + count]

    def read_part(self, name: str, part: Slice, start: int, count: int) -> Tensor:
        """Elements [start, start + count) of the flattened local `part` of the tensor, zeros for its padding, in the
        dtype of the file. Read are the rows and columns that it holds, not the whole tensor."""
        whole = Slice.whole(self.shape(name))
        blocks = list(overlaps(part, whole, start=start, count=count))
        if len(blocks) == 1 and blocks[0].numel() == count:
            return self._read_block(name, blocks[0]).reshape(-1)
        result = self.read(name, count=min(1, whole.numel())).new_zeros(count)
        for block in blocks:
            place = result.as_strided((block.rows, block.columns), (part.width, 1), block.at - start)
            place.copy_(self._read_block(name, block))
        return result

    def _read_block(self, name: str, block: Block) -> Tensor:
        """[rows, columns]"""
        from safetensors import safe_open

        if block.rows == 1:
            return self.read(name, start=block.of, count=block.columns).view(1, -1)
        row, column = divmod(block.of, self.shape(name)[1:].numel())
        with safe_open(self._file_of[name], framework="pt") as file:
            return file.get_slice(name)[row : row + block.rows, column : column + block.columns]


def read_header(path: Path) -> dict[str, Any]:
    """Entry (`shape`, `dtype`, `data_offsets`) of each tensor. Raises ValueError if the file is cut short or none.

    Layout: 8 bytes little-endian length, that many bytes of JSON, then the data (safetensors format specification).
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        text = file.read(length) if 0 < length <= size else b""
    try:
        header = json.loads(text)
    except ValueError:
        raise ValueError(f"{path.absolute()} is not a safetensors file, or its header is cut short.") from None
    header.pop("__metadata__", None)
    expected = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if size != expected:
        raise ValueError(
            f"{path.absolute()} has {size} bytes where its header says {expected}: it is "
            f"{'truncated' if size < expected else 'damaged'}. Copy or download it again."
        )
    return header


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        listed = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        missing = [name for name in listed if not (folder / name).is_file()]
        if missing:
            raise ValueError(f"{folder.absolute()}: {index.name} lists {', '.join(missing)}, which is not there.")
        return [folder / name for name in listed]
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    others = sorted(path.name for path in folder.glob("*.bin"))
    hint = (
        f"It has {others[0]}: convert it once with AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)."
        if others
        else "model.path must be a Hugging Face model folder with weights."
    )
    raise ValueError(f"{folder.absolute()} has no safetensors files. {hint}")
