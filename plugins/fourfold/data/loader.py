"""Rows to micro-batches: which rows an update takes, and which of them a data rank gets.

An update takes the next `global_batch_size` rows of the epoch's own permutation, whatever the number of ranks; data
rank r gets every data_size-th of them, from the r-th. The position in the data is one number, the rows taken since the
start of the run over all epochs, so that a run can go on from it on another number of ranks. In a stream it says where to
go on, but not what to pass over unread: a Shortcut does.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .mixture import MixtureRows
from .pack import COLUMNS, Row, padding_row
from .rows import Rows, epoch_order
from .stream import Mark, StreamRowSet

if TYPE_CHECKING:
    from torch import Tensor

MicroBatch = dict[str, "Tensor"]  # each column (pack.py) int64 [micro_batch_size, seq_len]
Shortcut = dict[str, Any]  # plain numbers and lists, to be kept in a checkpoint


@dataclass
class Update:
    """What one data rank computes between two optimizer steps."""

    micro_batches: list[MicroBatch]  # as many on every data rank; padding rows have no target
    rows: int  # real ones over all data ranks: global_batch_size, or fewer at the end of an epoch
    rows_after: int  # position in the data once this update is done
    epoch: int  # 0, 1, 2...
    shortcut: Shortcut | None = None  # to `rows_after` in a stream, to be handed to `updates`


@dataclass
class _Window:
    """The rows of one update over all data ranks: `items` are indices of rows, or the rows themselves in a stream."""

    items: list[Any]
    rows_after: int
    epoch: int
    shortcut: Shortcut | None = None


def updates_per_epoch(rows: int, global_batch_size: int) -> int:
    """The last one may be short."""
    return math.ceil(rows / global_batch_size)


def total_updates(rows: int | None, *, global_batch_size: int, num_epochs: float | None, max_steps: int | None) -> int:
    """Updates of a whole run: `num_epochs` or `max_steps`, whichever ends first; `rows=None` is a stream.

    ValueError: neither is set; a stream without `max_steps`, or with `num_epochs` (its epoch has no known length).
    """
    if rows is None:
        if max_steps is None or num_epochs is not None:
            raise ValueError(
                f"data.streaming=true: the length of an epoch is not known, so that max_steps={max_steps} "
                f"num_epochs={num_epochs} do not give the run's; set max_steps=<updates> num_epochs=null"
            )
        return max_steps
    if max_steps is None and num_epochs is None:
        raise ValueError("the run has no length: set max_steps=<updates> or num_epochs=<passes over the data>")
    limits = [] if max_steps is None else [max_steps]
    if num_epochs is not None:
        # As a fraction of the decimal digits: 0.1 x 30 updates is 3, not ceil(3.0000000000000004)
        limits.append(math.ceil(Fraction(str(num_epochs)) * updates_per_epoch(rows, global_batch_size)))
    return min(limits)


class Loader:
    """Updates of one data rank; CP, TP and PP ranks of the same data rank read the same ones."""

    def __init__(
        self,
        rows: Rows | MixtureRows | StreamRowSet,
        *,
        seed: int,
        global_batch_size: int,
        micro_batch_size: int,
        data_rank: int,
        data_size: int,
        pad_id: int,
    ) -> None:
        assert 0 <= data_rank < data_size, (data_rank, data_size)
        assert global_batch_size % (micro_batch_size * data_size) == 0, (global_batch_size, micro_batch_size, data_size)
        self._rows = rows
        self._seed = seed
        self._global_batch_size = global_batch_size
        padding = padding_row(rows.seq_len, pad_id)
        self._share = _Share(micro_batch_size, data_rank=data_rank, data_size=data_size, padding=padding)

    def updates(
        self,
        start_row: int = 0,
        *,
        num_epochs: float | None,
        max_steps: int | None,
        shortcut: Shortcut | None = None,
    ) -> Iterator[Update]:
        """From `start_row`, an earlier update's `rows_after` or any other row, to the end of the run.

        `num_epochs` and `max_steps` are those of the whole run, counted from row 0 and not from `start_row`.
        Streams are read in their order: from row 0 to get to `start_row`, or from where `shortcut` says, which is that of
        an update at or before it.
        """
        rows = self._rows
        known = None if isinstance(rows, StreamRowSet) else len(rows)
        total = total_updates(
            known, global_batch_size=self._global_batch_size, num_epochs=num_epochs, max_steps=max_steps
        )
        if isinstance(rows, StreamRowSet):
            begin = _Pass.of(shortcut) if shortcut else _Pass()
            assert begin.position <= start_row, (shortcut, start_row)
            windows = self._stream(rows, begin=begin, start_row=start_row, total=total)
            return self._deal(windows, fetch=lambda row: row)
        return self._deal(self._shuffled(rows, start_row=start_row, total=total), fetch=rows.row)

    def _deal(self, windows: Iterator[_Window], *, fetch: Callable[[Any], Row]) -> Iterator[Update]:
        for window in windows:
            yield Update(
                list(self._share.micro_batches(window.items, fetch=fetch)),
                rows=len(window.items),
                rows_after=window.rows_after,
                epoch=window.epoch,
                shortcut=window.shortcut,
            )

    def _shuffled(self, rows: Rows | MixtureRows, *, start_row: int, total: int) -> Iterator[_Window]:
        size, length = self._global_batch_size, len(rows)
        epochs, updates = divmod(total, updates_per_epoch(length, size))
        end = epochs * length + min(updates * size, length)  # in rows: a batch size changed on resume loses none
        position = start_row
        while position < end:
            epoch, done = divmod(position, length)
            order = _order(rows, seed=self._seed, epoch=epoch)
            for first in range(done, min(length, end - epoch * length), size):
                items = order[first : min(first + size, end - epoch * length)].tolist()
                position += len(items)
                yield _Window(items, rows_after=position, epoch=epoch)

    def _stream(self, rows: StreamRowSet, *, begin: "_Pass", start_row: int, total: int) -> Iterator[_Window]:
        size = self._global_batch_size
        while True:
            stream = rows.read(begin.mark)
            skipped = sum(1 for _ in itertools.islice(stream, max(start_row - begin.position, 0)))
            passed = begin.position - begin.rows + skipped
            updates = begin.updates + updates_per_epoch(passed, size)
            while updates < total and (taken := list(itertools.islice(stream, size))):
                passed, updates = passed + len(taken), updates + 1
                items = [row for row, _ in taken]
                yield _Window(items, begin.rows + passed, begin.epoch, shortcut=begin.at(taken[-1][1]))
            if updates >= total:
                return
            begin = _Pass(epoch=begin.epoch + 1, rows=begin.rows + passed, updates=updates)


@dataclass(frozen=True)
class _Pass:
    """One pass over a stream, from its start or from a mark on."""

    epoch: int = 0
    rows: int = 0  # before this pass
    updates: int = 0  # before this pass
    mark: Mark | None = None

    @property
    def position(self) -> int:
        return self.rows + (self.mark.passed if self.mark else 0)

    def at(self, mark: Mark) -> Shortcut:
        return asdict(replace(self, mark=mark))

    @classmethod
    def of(cls, shortcut: Shortcut) -> "_Pass":
        return cls(**{**shortcut, "mark": Mark(**shortcut["mark"])})


def _order(rows: Rows | MixtureRows, *, seed: int, epoch: int) -> NDArray[np.int64]:
    if isinstance(rows, MixtureRows):
        return rows.order(seed=seed, epoch=epoch)
    return epoch_order(len(rows), seed=seed, epoch=epoch)


def first_rows(rows: Rows | MixtureRows | StreamRowSet, *, seed: int) -> Iterator[Row]:
    """Those of the first epoch, in the order in which updates take them."""
    if isinstance(rows, StreamRowSet):
        return iter(rows)
    return (rows.row(int(number)) for number in _order(rows, seed=seed, epoch=0))


def eval_batches(
    rows: Rows, *, micro_batch_size: int, data_rank: int, data_size: int, pad_id: int
) -> Iterator[MicroBatch]:
    """Every row once over all data ranks, in order; as many batches on each, made up by rows without target."""
    padding = padding_row(rows.seq_len, pad_id)
    share = _Share(micro_batch_size, data_rank=data_rank, data_size=data_size, padding=padding)
    return share.micro_batches(range(len(rows)), fetch=rows.row)


class _Share:
    """The part of a window of rows that one data rank gets."""

    def __init__(self, micro_batch_size: int, *, data_rank: int, data_size: int, padding: Row) -> None:
        self._size = micro_batch_size
        self._rank = data_rank
        self._ranks = data_size
        self._padding = padding

    def micro_batches(self, window: Sequence[Any], *, fetch: Callable[[Any], Row]) -> Iterator[MicroBatch]:
        """ceil(rows / (micro_batch_size x data_size)) of them on every rank, also on one that has no row left."""
        import torch

        mine = window[self._rank :: self._ranks]
        for number in range(math.ceil(len(window) / (self._size * self._ranks))):
            batch = [fetch(item) for item in mine[number * self._size : (number + 1) * self._size]]
            batch += [self._padding] * (self._size - len(batch))
            yield {name: torch.from_numpy(np.stack([row[name] for row in batch])) for name in COLUMNS}
