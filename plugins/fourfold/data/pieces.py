"""Documents to labelled pieces: what is left out, what is cut, and what each position has to predict."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..schema import LongDocuments
from .stats import PackStats

IGNORE = -100  # a label that never counts


class Piece(NamedTuple):
    """A stretch of one document. int32 [n] each: a vocabulary is far below 2^31."""

    ids: NDArray[np.int32]
    labels: NDArray[np.int32]  # the next token of the document where that is a target, else -100
    document: int  # its number among those read, from 0
    start: int = 0  # tokens of the document before it

    def after(self, tokens: int) -> "Piece":
        return self._replace(ids=self.ids[tokens:], labels=self.labels[tokens:], start=self.start + tokens)

    def up_to(self, end: int) -> "Piece":
        return self._replace(ids=self.ids[:end], labels=self.labels[:end])


def labelled(
    documents: Iterable[tuple[Sequence[int], Sequence[bool]]],
    *,
    seq_len: int,
    long_documents: LongDocuments,
    stats: PackStats,
) -> Iterator[Piece]:
    """Whole (input_ids, is_target) documents that have a place in rows, in order; `stats` counts the others.

    Truncated ones are cut before labels are made, so that their last token predicts nothing. ValueError: a document of
    more than `seq_len` tokens with long_documents=error.
    """
    for number, (input_ids, is_target) in enumerate(documents):
        stats.documents += 1
        if not len(input_ids):
            stats.empty_documents += 1
            continue
        stats.count_length(len(input_ids))
        piece = _labelled(input_ids, is_target, number=number)
        wanted = _has_target(piece)
        if wanted and len(input_ids) > seq_len:
            kept = _shortened(piece, is_target, seq_len=seq_len, long_documents=long_documents, stats=stats)
            if kept is None:
                continue
            piece, wanted = kept, _has_target(kept)
        if wanted:
            yield piece
        else:
            stats.documents_without_target += 1


def cut(piece: Piece, *, seq_len: int) -> Iterator[Piece]:
    """Stretches of `seq_len` and the rest. The last position of each still predicts the next token of the document."""
    if len(piece.ids) <= seq_len:
        yield piece
        return
    for start in range(0, len(piece.ids), seq_len):
        yield piece.after(start).up_to(seq_len)


def _labelled(input_ids: Sequence[int], is_target: Sequence[bool], *, number: int) -> Piece:
    ids = np.asarray(input_ids, np.int32)
    labels = np.empty_like(ids)
    labels[:-1] = ids[1:]
    if not all(is_target):  # of a text they all are
        labels[:-1][~np.asarray(is_target[1:], bool)] = IGNORE
    labels[-1] = IGNORE
    return Piece(ids, labels, number)


def _has_target(piece: Piece) -> bool:
    return bool((piece.labels != IGNORE).any())


def _shortened(
    piece: Piece, is_target: Sequence[bool], *, seq_len: int, long_documents: LongDocuments, stats: PackStats
) -> Piece | None:
    """A document of more than `seq_len` tokens as the policy wants it; None: dropped."""
    tokens = len(piece.ids)
    if long_documents is LongDocuments.error:
        raise ValueError(
            f"document {piece.document} (the first is 0) has {tokens} tokens and a row seq_len={seq_len}: use "
            f"seq_len={tokens}, or data.long_documents=split, truncate or drop"
        )
    if long_documents is LongDocuments.drop:
        stats.dropped_documents += 1
        stats.dropped_tokens += tokens
        return None
    if long_documents is LongDocuments.truncate:
        stats.truncated_documents += 1
        stats.truncated_tokens += tokens - seq_len
        return _labelled(piece.ids[:seq_len].tolist(), is_target[:seq_len], number=piece.document)
    return piece
