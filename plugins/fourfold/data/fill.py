"""Three ways to fill rows with pieces of documents, each with the place from which it can go on.

best_fit    documents of up to seq_len tokens whole, rows nearly full; a window of documents at a time, so that memory
            is bounded and a stream can be packed too
concat      every row full: whatever document lies across its end is cut
alone       a document (or a stretch of a long one) a row
"""

from collections.abc import Iterator
from typing import NamedTuple

from .best_fit import best_fit
from .pieces import Piece, cut
from .stats import PackStats

WINDOW_TOKENS = 2 << 20  # best_fit has as many in hand, and no fewer than WINDOW_ROWS rows of them; 8 bytes each
WINDOW_ROWS = 256


class Place(NamedTuple):
    """Where in its documents a packing can be taken up again, so that the same rows follow."""

    documents: int = 0  # passed over
    tokens: int = 0  # of the next one (after it was shortened): passed over
    rows: int = 0  # that come once more from there, before those that follow


class Packed(NamedTuple):
    pieces: list[Piece]  # of one row
    after: Place


def fill_best(pieces: Iterator[Piece], *, seq_len: int, stats: PackStats) -> Iterator[Packed]:
    for window in _windows(pieces, least=max(WINDOW_TOKENS, WINDOW_ROWS * seq_len)):
        stats.cut_documents += sum(len(piece.ids) > seq_len for piece in window)
        stretches = [stretch for piece in window for stretch in cut(piece, seq_len=seq_len)]
        rows = best_fit([len(stretch.ids) for stretch in stretches], capacity=seq_len)
        for number, row in enumerate(rows, start=1):
            last = number == len(rows)
            after = Place(window[-1].document + 1) if last else Place(window[0].document, rows=number)
            yield Packed([stretches[one] for one in row], after)


def fill_concat(pieces: Iterator[Piece], *, seq_len: int, stats: PackStats) -> Iterator[Packed]:
    row: list[Piece] = []
    room = seq_len
    for piece in pieces:
        stats.cut_documents += len(piece.ids) > room
        rest = piece
        while len(rest.ids) >= room:
            row.append(rest.up_to(room))
            rest = rest.after(room)
            yield Packed(row, _before(rest))
            row, room = [], seq_len
        if len(rest.ids):
            row.append(rest)
            room -= len(rest.ids)
    if row:
        yield Packed(row, Place(row[-1].document + 1))


def fill_alone(pieces: Iterator[Piece], *, seq_len: int, stats: PackStats) -> Iterator[Packed]:
    for piece in pieces:
        stats.cut_documents += len(piece.ids) > seq_len
        for stretch in cut(piece, seq_len=seq_len):
            yield Packed([stretch], _before(piece.after(stretch.start + len(stretch.ids) - piece.start)))


def _before(rest: Piece) -> Place:
    return Place(rest.document, tokens=rest.start) if len(rest.ids) else Place(rest.document + 1)


def _windows(pieces: Iterator[Piece], *, least: int) -> Iterator[list[Piece]]:
    """Documents of `least` tokens or a little more together; the last window has what is left."""
    window: list[Piece] = []
    tokens = 0
    for piece in pieces:
        window.append(piece)
        tokens += len(piece.ids)
        if tokens >= least:
            yield window
            window, tokens = [], 0
    if window:
        yield window
