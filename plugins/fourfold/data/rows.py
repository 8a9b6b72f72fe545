"""Sets of packed rows on disk, memory-mapped."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from .huggingface import quiet
from .pack import COLUMNS, Row
from .stats import PackStats

if TYPE_CHECKING:
    import pyarrow
    from datasets import Dataset

PART_TOKENS = 4 << 20  # positions written at a time: 4 columns of int32 make 64 MiB
PART = "part-{:05d}"


class Rows(Protocol):
    """What a loader needs of a finite set of rows."""

    @property
    def seq_len(self) -> int: ...

    def __len__(self) -> int: ...

    def row(self, i: int) -> Row: ...


def epoch_order(rows: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
    """[rows]: the epoch's own permutation."""
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(rows)


class RowSet:
    """Packed rows in a folder that `write_rows` made; opening reads no row."""

    def __init__(self, folder: Path) -> None:
        from datasets import concatenate_datasets, load_from_disk

        parts = sorted(folder.glob("part-*"))
        data: Dataset = concatenate_datasets([load_from_disk(part, keep_in_memory=False) for part in parts])
        self._data = data.with_format("numpy", dtype=np.int64)
        self.seq_len = int(data.features[COLUMNS[0]].length)

    def __len__(self) -> int:
        return len(self._data)

    def row(self, i: int) -> Row:
        """int64 [seq_len] arrays by column (pack.py)."""
        if not 0 <= i < len(self):
            raise IndexError(f"row {i} of {len(self)}")
        found = self._data[i]
        return {name: found[name] for name in COLUMNS}


def check_targets(stats: PackStats, *, where: str = "the data") -> None:
    """ValueError when a whole source gave nothing to learn from."""
    if stats.rows == 0:
        raise ValueError(
            f"{where}: {stats.documents} documents read, none has a token to predict "
            f"({stats.documents_without_target} without target: conversations without an assistant turn, or single "
            f"tokens; {stats.dropped_documents} dropped for their length; {stats.empty_documents} empty)"
        )


def write_rows(rows: Iterable[Row], folder: Path, *, seq_len: int) -> str:
    """Save rows as `datasets` folders of bounded size, so that a corpus is never held as a whole.

    As int32: a vocabulary and a row are far below 2^31. Returns the xxh3-128 of the content in hex.
    """
    digest = xxhash.xxh3_128()
    at_a_time = max(PART_TOKENS // seq_len, 1)
    batch: list[dict[str, NDArray[np.int32]]] = []
    parts = 0
    for row in rows:
        batch.append({name: row[name].astype(np.int32) for name in COLUMNS})
        for name in COLUMNS:
            digest.update(batch[-1][name].data)
        if len(batch) == at_a_time:
            _write_part(batch, folder / PART.format(parts))
            batch, parts = [], parts + 1
    if batch:
        _write_part(batch, folder / PART.format(parts))
    return digest.hexdigest()


def _write_part(rows: list[dict[str, NDArray[np.int32]]], folder: Path) -> None:
    import pyarrow
    from datasets import Dataset

    with quiet(show_progress=False):
        Dataset(pyarrow.table({name: _column([row[name] for row in rows]) for name in COLUMNS})).save_to_disk(folder)


def _column(arrays: list[NDArray[np.int32]]) -> "pyarrow.Array":
    """Arrow's fixed_size_list."""
    import pyarrow

    return pyarrow.FixedSizeListArray.from_arrays(np.concatenate(arrays), len(arrays[0]))
