"""Where the elements of one slice of a tensor lie in another slice of it: as few blocks as the cuts allow."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fourfold.slices import Ranges, Slice


@dataclass(frozen=True)
class Block:
    """[rows, columns] elements: the first is element `at` of the flattened wanted slice and element `of` of the flattened
    held one, and the rows of a block are a row of either slice apart. Contiguous elements are one row, however long."""

    at: int
    of: int
    rows: int
    columns: int

    def numel(self) -> int:
        return self.rows * self.columns


def overlaps(wanted: Slice, held: Slice, *, start: int, count: int) -> Iterator[Block]:
    """Blocks of `held` among elements [start, start + count) of the flattened `wanted`, both without their padding.

    `held` as a whole may lack some. Their number grows with that of the ranges, never with that of the rows.
    """
    assert wanted.shape == held.shape, (wanted.shape, held.shape)
    end = min(start + count, wanted.numel())
    if start >= end or not held.numel():
        return
    row_runs, column_runs = _runs(wanted.rows, held.rows), _runs(wanted.columns, held.columns)
    if column_runs == [(0, 0, wanted.width)] and held.width == wanted.width:
        yield from _whole_rows(row_runs, width=held.width, start=start, end=end)
        return
    for top, bottom, left, right in _rectangles(start, end, width=wanted.width):
        for row, row_of, rows in _clipped(row_runs, first=top, last=bottom):
            for column, column_of, columns in _clipped(column_runs, first=left, last=right):
                yield Block(row * wanted.width + column, row_of * held.width + column_of, rows, columns)


def in_hand(block: Block, *, width: int, most: int) -> Iterator[tuple[int, Block]]:
    """(rows before it, part of the block) of at most `most` elements from the first to the last, where rows are `width`
    apart in the held slice. A row that is longer stays whole."""
    step = max(1, (most - block.columns) // width + 1)
    for row in range(0, block.rows, step):
        yield row, replace(block, of=block.of + row * width, rows=min(step, block.rows - row))


Run = tuple[int, int, int]  # first in the wanted slice, first in the held one, how many


def _runs(wanted: Ranges, held: Ranges) -> list[Run]:
    """Rows (or columns) that both have; neighbours in both are one run."""
    merged: list[Run] = []
    for at, of, count in _common(wanted, held):
        if merged and (merged[-1][0] + merged[-1][2], merged[-1][1] + merged[-1][2]) == (at, of):
            first_at, first_of, before = merged.pop()
            merged.append((first_at, first_of, before + count))
        else:
            merged.append((at, of, count))
    return merged


def _common(wanted: Ranges, held: Ranges) -> Iterator[Run]:
    at = 0
    for first, last in wanted:
        of = 0
        for held_first, held_last in held:
            low, high = max(first, held_first), min(last, held_last)
            if low < high:
                yield at + low - first, of + low - held_first, high - low
            of += held_last - held_first
        at += last - first


def _whole_rows(runs: list[Run], *, width: int, start: int, end: int) -> Iterator[Block]:
    """Rows of the same columns in the same order are contiguous in both."""
    for at, of, count in _clipped([(a * width, o * width, n * width) for a, o, n in runs], first=start, last=end):
        yield Block(at, of, 1, count)


def _rectangles(start: int, end: int, *, width: int) -> Iterator[tuple[int, int, int, int]]:
    """(first row, last row, first column, last column), the lasts exclusive: a part of a row, whole rows, a part."""
    (top, left), (bottom, right) = divmod(start, width), divmod(end, width)
    if top == bottom:
        yield top, top + 1, left, right
        return
    if left:
        yield top, top + 1, left, width
        top += 1
    if top < bottom:
        yield top, bottom, 0, width
    if right:
        yield bottom, bottom + 1, 0, right


def _clipped(runs: list[Run], *, first: int, last: int) -> Iterator[Run]:
    for at, of, count in runs:
        low, high = max(at, first), min(at + count, last)
        if low < high:
            yield low, of + low - at, high - low
