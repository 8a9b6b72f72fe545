"""Safetensors files as a stream: nothing is held but one chunk, and the digest is taken on the way.

safetensors' own save_file wants every tensor of a file in memory at once and copies each; the format itself is a header
and the bytes in order (8 bytes little-endian length, JSON, data).
"""

import json
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

CHUNK = 2**22  # elements in hand at a time: 16 MiB of fp32
NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


@dataclass(frozen=True)
class Entry:
    """A tensor to be written: `values(start, stop)` gives elements of it, flattened, in any dtype and on any device."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    values: Callable[[int, int], Tensor]

    @property
    def count(self) -> int:
        return torch.Size(self.shape).numel()


@dataclass(frozen=True)
class Written:
    bytes: int
    xxh3: str


def write_safetensors(path: Path, entries: list[Entry], *, metadata: dict[str, str] | None = None) -> Written:
    """Write and sync the file. Raises OSError, with a part of the file left, if the disk does not take it."""
    digest = xxhash.xxh3_128()
    with path.open("wb") as file:
        for block in _blocks(entries, metadata or {}):
            file.write(block)
            digest.update(block)
        file.flush()
        os.fsync(file.fileno())
        return Written(file.tell(), digest.hexdigest())


def _blocks(entries: list[Entry], metadata: dict[str, str]) -> Iterator[Any]:
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    at = 0
    for entry in entries:
        end = at + entry.count * entry.dtype.itemsize
        header[entry.name] = {"dtype": NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data begins aligned
    yield struct.pack("<Q", len(text)) + text
    for entry in entries:
        for start in range(0, entry.count, CHUNK):
            chunk = entry.values(start, min(start + CHUNK, entry.count)).detach()
            yield chunk.to(device="cpu", dtype=entry.dtype).contiguous().view(torch.uint8).numpy().data


def digest_of(path: Path) -> Written:
    """Size and digest of a file as it lies on the disk."""
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while block := file.read(4 * CHUNK):
            digest.update(block)
        return Written(file.tell(), digest.hexdigest())


def write_json(path: Path, content: dict[str, Any], *, indent: int | None = 1) -> None:
    """Atomically: a reader sees the old file or the new one."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_text(json.dumps(content, indent=indent) + "\n")
        sync(aside)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Flush a file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def disk_errors(what: str) -> Iterator[None]:
    """OSError inside becomes the user's: `what` could not be written, and why."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{what} could not be written: {error}.") from None
