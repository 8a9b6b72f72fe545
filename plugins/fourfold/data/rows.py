"""Sets of packed rows: on disk and memory-mapped (RowSet), or made while they are read (StreamRowSet)."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from .huggingface import quiet
from .pack import COLUMNS, PackStats, Row, pack
from .tokens import Encoded

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


class StreamRowSet:
    """Rows tokenised and packed while they are read; every reader gets the same ones in the same order.

    `stats` counts those of the newest pass. ValueError in a pass that ends without any row.
    """

    def __init__(self, encoded: Callable[[], Iterable[Encoded]], *, seq_len: int, pad_id: int) -> None:
        self._encoded = encoded
        self.seq_len = seq_len
        self._pad_id = pad_id
        self.stats = PackStats()

    def __iter__(self) -> Iterator[Row]:
        stats = self.stats = PackStats()
        yield from pack(self._encoded(), seq_len=self.seq_len, pad_id=self._pad_id, stats=stats)
        check_targets(stats)


def check_targets(stats: PackStats, *, where: str = "the data") -> None:
    """ValueError when a whole source gave nothing to learn from."""
    if stats.rows == 0:
        raise ValueError(
            f"{where}: {stats.documents} documents read, none has a token to predict "
            f"({stats.documents_without_target} without target: conversations without an assistant turn, or single tokens)"
        )


def write_rows(rows: Iterable[Row], folder: Path, *, seq_len: int) -> None:
    """Save rows as `datasets` folders of bounded size, so that a corpus is never held as a whole."""
    at_a_time = max(PART_TOKENS // seq_len, 1)
    batch: list[Row] = []
    parts = 0
    for row in rows:
        batch.append(row)
        if len(batch) == at_a_time:
            _write_part(batch, folder / PART.format(parts))
            batch, parts = [], parts + 1
    if batch:
        _write_part(batch, folder / PART.format(parts))


def _write_part(rows: list[Row], folder: Path) -> None:
    import pyarrow
    from datasets import Dataset

    with quiet(show_progress=False):
        Dataset(pyarrow.table({name: _column([row[name] for row in rows]) for name in COLUMNS})).save_to_disk(folder)


def _column(arrays: list[NDArray[np.int64]]) -> "pyarrow.Array":
    """Arrow's fixed_size_list of int32: a vocabulary and a row are far below 2^31."""
    import pyarrow

    return pyarrow.FixedSizeListArray.from_arrays(np.concatenate(arrays).astype(np.int32), len(arrays[0]))
