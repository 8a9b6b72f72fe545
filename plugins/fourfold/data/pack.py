"""Documents to rows of `seq_len` tokens: one after the other, cut where a row ends, isolated from each other.

A row is int64 [seq_len] arrays:
    input_ids
    labels        what position t has to predict, already shifted: the next token of the same document if that is a
                  target, else -100. The last position of a row still predicts the next token of a document that the
                  row's end cuts, so that no target is lost there.
    position_ids  0, 1, 2... from the start of each piece of a document (what a row's end cut off is not seen any more)
    document_ids  0, 1, 2... in a row; -1 where it is padded
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Row = dict[str, NDArray[np.int64]]

IGNORE = -100  # a label that never counts
COLUMNS = ("input_ids", "labels", "position_ids", "document_ids")


@dataclass
class PackStats:
    """Counts of one packing, up to the last row taken from it."""

    documents: int = 0  # read
    documents_without_target: int = 0  # left out of the rows: isolated, they could not change any gradient
    cut_documents: int = 0  # spread over more than one row
    pieces: int = 0  # documents in rows, one count for each row
    rows: int = 0
    rows_without_target: int = 0  # e.g. filled by a prompt whose answer is in the next row
    tokens: int = 0  # in rows, padding left out
    targets: int = 0  # labels that count
    padding: int = 0  # positions

    @property
    def efficiency(self) -> float:
        """Share of the positions that hold a token."""
        return self.tokens / max(self.tokens + self.padding, 1)


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
    seq_len: int,
    pad_id: int = 0,
    stats: PackStats | None = None,
) -> Iterator[Row]:
    """Rows of (input_ids, is_target) documents, in order ("concat"); `stats` counts along.

    A document without a target after its first token (which nothing predicts) is counted and left out.
    """
    assert seq_len > 0, seq_len
    stats = PackStats() if stats is None else stats
    row, used, number = padding_row(seq_len, pad_id), 0, 0
    for input_ids, is_target in documents:
        ids = np.asarray(input_ids, np.int64)
        following = _following(ids, np.asarray(is_target, bool))
        if not _count_document(stats, following=following, fits=len(ids) <= seq_len - used):
            continue
        start = 0
        while start < len(ids):
            taken = slice(start, start + min(seq_len - used, len(ids) - start))
            _write(row, ids[taken], following[taken], at=used, number=number)
            used, start, number = used + taken.stop - start, taken.stop, number + 1
            if used == seq_len:
                yield _finished(row, used, stats)
                row, used, number = padding_row(seq_len, pad_id), 0, 0
    if used:
        yield _finished(row, used, stats)


def _following(ids: NDArray[np.int64], is_target: NDArray[np.bool_]) -> NDArray[np.int64]:
    """[n] -> [n]: the next token of the document where it is a target, else -100."""
    following = np.full(len(ids), IGNORE, np.int64)
    following[:-1] = np.where(is_target[1:], ids[1:], IGNORE)
    return following


def _write(row: Row, ids: NDArray[np.int64], labels: NDArray[np.int64], *, at: int, number: int) -> None:
    here = slice(at, at + len(ids))
    row["input_ids"][here] = ids
    row["labels"][here] = labels
    row["position_ids"][here] = np.arange(len(ids))
    row["document_ids"][here] = number


def _count_document(stats: PackStats, *, following: NDArray[np.int64], fits: bool) -> bool:
    """Whether the document has a target, that is, a place in the rows."""
    stats.documents += 1
    wanted = int(np.count_nonzero(following != IGNORE))
    stats.documents_without_target += wanted == 0
    stats.cut_documents += wanted > 0 and not fits
    return wanted > 0


def _finished(row: Row, used: int, stats: PackStats) -> Row:
    """Count the row; its padding, from position `used`, becomes a document of its own."""
    padding = len(row["input_ids"]) - used
    row["position_ids"][used:] = np.arange(padding)
    targets = int(np.count_nonzero(row["labels"] != IGNORE))
    stats.rows += 1
    stats.rows_without_target += targets == 0
    stats.tokens += used
    stats.targets += targets
    stats.padding += padding
    stats.pieces += int(row["document_ids"][used - 1]) + 1
    return row
