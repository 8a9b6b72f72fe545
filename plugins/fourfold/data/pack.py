"""Documents to rows of `seq_len` tokens, isolated from each other.

A row is int64 [seq_len] arrays:
    input_ids
    labels        what position t has to predict, already shifted: the next token of the same document if that is a
                  target, else -100. A document is cut after its labels are made: the last position of a piece still
                  predicts the next token, so that no target is lost there. (40 tokens in rows of 16 are 16, 16 and 8 of
                  them and 39 targets; pieces labelled each by itself would have 37.)
    position_ids  0, 1, 2... from the start of each piece of a document (what a row's end cut off is not seen any more)
    document_ids  0, 1, 2... in a row; -1 where it is padded, which is at its end only
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..schema import LongDocuments, Packing
from .fill import Place, fill_alone, fill_best, fill_concat
from .pieces import IGNORE, Piece, labelled
from .stats import PackStats

Row = dict[str, NDArray[np.int64]]

COLUMNS = ("input_ids", "labels", "position_ids", "document_ids")


@dataclass(frozen=True, kw_only=True)
class PackSettings:
    seq_len: int  # tokens of a row
    packing: Packing = Packing.best_fit
    long_documents: LongDocuments = LongDocuments.split
    pad_id: int = 0  # the id at padded positions; any will do


def padding_row(seq_len: int, pad_id: int) -> Row:
    """A row without any target: makes up the number of rows of a rank that has fewer."""
    return {
        "input_ids": np.full(seq_len, pad_id, np.int64),
        "labels": np.full(seq_len, IGNORE, np.int64),
        "position_ids": np.arange(seq_len, dtype=np.int64),
        "document_ids": np.full(seq_len, -1, np.int64),
    }


def pack(
    documents: Iterable[tuple[Sequence[int], Sequence[bool]]],
    *,
    settings: PackSettings,
    stats: PackStats | None = None,
) -> Iterator[Row]:
    """Rows of (input_ids, is_target) documents; `stats` counts along.

    Empty documents, and those without a target after their first token (which nothing predicts), are counted and left
    out. ValueError: a document of more than seq_len tokens with long_documents=error.
    """
    found = pack_from(documents, place=Place(), settings=settings, stats=PackStats() if stats is None else stats)
    return (row for row, _ in found)


def pack_from(
    documents: Iterable[tuple[Sequence[int], Sequence[bool]]],
    *,
    place: Place,
    settings: PackSettings,
    stats: PackStats,
) -> Iterator[tuple[Row, Place]]:
    """Rows, and the place after each. `documents` begins where `place` says: those it has passed over are not in it."""
    seq_len = settings.seq_len
    assert seq_len > 0, seq_len
    pieces = labelled(documents, seq_len=seq_len, long_documents=settings.long_documents, stats=stats)
    if place != Place():
        pieces = _begun(pieces, place=place)
    fill = {Packing.best_fit: fill_best, Packing.concat: fill_concat, Packing.none: fill_alone}[settings.packing]
    for number, packed in enumerate(fill(pieces, seq_len=seq_len, stats=stats)):
        if number >= place.rows:
            yield _row(packed.pieces, settings=settings, stats=stats), packed.after


def _begun(pieces: Iterator[Piece], *, place: Place) -> Iterator[Piece]:
    for piece in pieces:
        rest = piece.after(place.tokens) if piece.document == 0 else piece
        yield rest._replace(document=piece.document + place.documents)


def _row(pieces: list[Piece], *, settings: PackSettings, stats: PackStats) -> Row:
    """One row, counted; its padding is a document of its own."""
    lengths = np.array([len(piece.ids) for piece in pieces])
    starts = np.cumsum(lengths) - lengths
    used = int(lengths.sum())
    row = padding_row(settings.seq_len, settings.pad_id)
    row["input_ids"][:used] = np.concatenate([piece.ids for piece in pieces])
    row["labels"][:used] = np.concatenate([piece.labels for piece in pieces])
    row["document_ids"][:used] = np.repeat(np.arange(len(pieces)), lengths)
    row["position_ids"][:used] -= np.repeat(starts, lengths)
    row["position_ids"][used:] -= used
    targets = int(np.count_nonzero(row["labels"] != IGNORE))
    stats.rows += 1
    stats.rows_without_target += targets == 0
    stats.tokens += used
    stats.targets += targets
    stats.padding += settings.seq_len - used
    stats.pieces += len(pieces)
    return row
