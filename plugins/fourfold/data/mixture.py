"""Several finite sources as one: how many rows each gives in an epoch, and which.

In epoch e of the mixture source i, of n_i rows, gives its rows number e k_i ... e k_i + k_i - 1, counted on over its own
passes, each of which is a permutation of its own. So it is gone through evenly, whatever k_i, and a row is a function
of seed and position alone.
"""

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from ..schema import DataConfig, MixtureSource
from .files import kind_of
from .pack import Row
from .rows import RowSet, epoch_order

OWN = 0x4D495854  # last word of the seed of a source's own permutations: no other draw shares their stream
FOR_THE_MIXTURE = ("weight", "epochs")


def source_config(data: DataConfig, source: MixtureSource) -> DataConfig:
    """The settings of one source as if it were all the data: its own keys, else those of `data`; nothing to evaluate on.

    A file that is a table by its name is read as one, whatever the kind of `data`.
    """
    kind = source.kind or kind_of(source.path) or data.kind
    own = {key: value for key, value in vars(source).items() if value is not None and key not in FOR_THE_MIXTURE}
    return replace(data, **{"sources": None, "eval_path": None, "eval_documents": 0, **own, "kind": kind})


def rows_per_epoch(sizes: Sequence[int], sources: Sequence[MixtureSource]) -> list[int]:
    """k_i of sources with n_i rows. By weights: the longest epoch in which no source repeats a row, at least one of each.

    Otherwise by passes over each source (`epochs`, default 1).
    """
    if sources[0].weight is None:
        return [max(1, round(_exact(source.epochs or 1.0) * size)) for size, source in zip(sizes, sources, strict=True)]
    weights = [_exact(source.weight or 0.0) for source in sources]
    length = min(size / weight for size, weight in zip(sizes, weights, strict=True))
    return [max(1, int(weight * length)) for weight in weights]


def _exact(number: float) -> Fraction:
    """Of its decimal digits: 0.1 of 30 rows is 3, not 3.0000000000000004."""
    return Fraction(str(number))


class MixtureRows:
    """The rows of all sources, one source after the other; `order` says which of them make up an epoch."""

    def __init__(self, sources: Sequence[RowSet], *, counts: Sequence[int]) -> None:
        self._sources = sources
        self._counts = counts
        self._first = np.cumsum([0, *map(len, sources)])
        self.seq_len = sources[0].seq_len

    def __len__(self) -> int:
        """Rows of an epoch."""
        return sum(self._counts)

    def row(self, i: int) -> Row:
        source = int(np.searchsorted(self._first, i, side="right")) - 1
        return self._sources[source].row(i - int(self._first[source]))

    def order(self, *, seed: int, epoch: int) -> NDArray[np.int64]:
        """[rows of an epoch]: numbers for `row`."""
        parts = [
            first + _own_rows(size, count, seed=[seed, number, OWN], epoch=epoch)
            for number, (first, size, count) in enumerate(
                zip(self._first, map(len, self._sources), self._counts, strict=False)
            )
        ]
        return np.concatenate(parts)[epoch_order(len(self), seed=seed, epoch=epoch)]


def _own_rows(size: int, count: int, *, seed: list[int], epoch: int) -> NDArray[np.int64]:
    """[count]: the next rows of a source of `size` after those of the epochs before."""
    begin, end = epoch * count, (epoch + 1) * count
    passes = range(begin // size, (end - 1) // size + 1)
    walk = [np.random.Generator(np.random.PCG64([one, *seed])).permutation(size) for one in passes]
    start = begin - passes[0] * size
    return np.concatenate(walk)[start : start + count]
