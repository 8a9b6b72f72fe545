"""The user's own rows, short and few: every update is one epoch of them, so that a row left out or taken twice shows."""

from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fourfold.data.loader import first_rows
from fourfold.data.pack import COLUMNS, Row
from fourfold.data.prepared import prepare_for
from fourfold.schema import TrainConfig
from fourfold.verify.recipe import DOCUMENTS, small_data

LOOKED_AT = 1024  # rows, for those with several documents: long files have few


@dataclass(frozen=True)
class KnownRows:
    """Rows in memory, as a loader wants them: int64 [rows, seq_len] by column."""

    columns: dict[str, NDArray[np.int64]]

    @property
    def seq_len(self) -> int:
        return int(self.columns["input_ids"].shape[1])

    def __len__(self) -> int:
        return len(self.columns["input_ids"])

    def row(self, i: int) -> Row:
        return {name: self.columns[name][i] for name in COLUMNS}

    @property
    def documents(self) -> list[int]:
        """Of each row."""
        return [int(row.max()) + 1 for row in self.columns["document_ids"]]

    def save(self, path: Path) -> None:
        np.savez(path, **self.columns)  # type: ignore[arg-type]

    @classmethod
    def load(cls, path: Path) -> "KnownRows":
        with np.load(path) as file:
            return cls({name: file[name] for name in COLUMNS})


def key_of(input_ids: Any, labels: Any) -> bytes:
    """By which a row is found again; of arrays or tensors [seq_len]."""
    return bytes(np.asarray(input_ids).tobytes() + np.asarray(labels).tobytes())


def real_rows(
    config: TrainConfig, *, tokenizer: Any, vocabularies: tuple[int, int], count: int, cache: Path
) -> KnownRows:
    """`count` rows of the recipe's data, those with the most documents for one half, with tokens of the first vocabulary folded
    into the second. Uses the run's own pipeline; its cache is `cache`. ValueError as for a run."""
    rows: list[Row] = []
    for documents in (DOCUMENTS, 16 * DOCUMENTS):
        small = replace(small_data(config, documents=documents), cache_dir=str(cache))
        made = prepare_for(small, tokenizer=tokenizer, vocab_size=vocabularies[0], show_progress=False)
        rows = list(islice(first_rows(made.train, seed=config.seed), LOOKED_AT))
        if len(rows) >= count:
            break
    rows = [rows[number % len(rows)] for number in range(max(count, len(rows)))]
    crowded = sorted(rows, key=lambda row: -int(row["document_ids"].max()))
    taken = [*crowded[: count // 2], *crowded[len(crowded) - count + count // 2 :]]
    return KnownRows({name: _folded(name, np.stack([row[name] for row in taken]), vocabularies[1]) for name in COLUMNS})


def _folded(name: str, values: NDArray[np.int64], vocabulary: int) -> NDArray[np.int64]:
    if name == "input_ids":
        return values % vocabulary
    return np.where(values >= 0, values % vocabulary, values) if name == "labels" else values
