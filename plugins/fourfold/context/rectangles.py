"""Which (query, key) pairs attention computes, as rectangles of a local row. Pure arithmetic on intervals.

A rank holds some stretches (Interval) of a row's global positions, one after the other: its local order. Documents are
intervals too; positions of none (padding) attend to nothing and nobody attends to them. Between two lists of stretches,
causal attention within documents is a list of rectangles of local positions:
    full     every pair
    causal   a square of the same positions: key <= query
    band     the pairs of it within a sliding window: 0 <= query - key < window; never longer than a few windows
"""

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

Interval = tuple[int, int]
Stretches = Sequence[Interval]  # of global positions, in local order

BAND_TILE = 512  # queries of a band rectangle, at most: its mask has as many rows, and window + BAND_TILE columns


class Rectangle(NamedTuple):
    """Local queries [q0, q1) x local keys [k0, k1). `offset` is the position of q0 less that of k0."""

    q0: int
    q1: int
    k0: int
    k1: int
    kind: Literal["full", "causal", "band"]
    offset: int

    def pairs(self, window: int | None) -> int:
        queries, keys = self.q1 - self.q0, self.k1 - self.k0
        if self.kind == "full":
            return queries * keys
        if self.kind == "causal":
            return queries * (queries + 1) // 2
        assert window is not None
        rows = (self.offset + i for i in range(queries))
        return sum(max(0, min(keys, row + 1) - max(0, row - window + 1)) for row in rows)


class Part(NamedTuple):
    """A piece of a document on one rank: positions [start, end), the first of them at `local`."""

    start: int
    end: int
    local: int


def rectangles(
    queries: Stretches, keys: Stretches, *, documents: Stretches, window: int | None = None
) -> list[Rectangle]:
    """Rectangles of all allowed pairs, each pair in exactly one, by queries."""
    found: list[Rectangle] = []
    mine, theirs = _by_document(queries, documents), _by_document(keys, documents)
    for document, parts in mine.items():
        if document in theirs:
            found += _within(parts, theirs[document], window=window)
    return sorted(found)


def _by_document(stretches: Stretches, documents: Stretches) -> dict[int, list[Part]]:
    starts = [start for start, _ in documents]
    parts: dict[int, list[Part]] = {}
    local = 0
    for begin, end in stretches:
        number = max(bisect_right(starts, begin) - 1, 0)
        while number < len(documents) and documents[number][0] < end:
            start, stop = max(begin, documents[number][0]), min(end, documents[number][1])
            if start < stop:
                parts.setdefault(number, []).append(Part(start, stop, local + start - begin))
            number += 1
        local += end - begin
    return parts


def _within(queries: list[Part], keys: list[Part], *, window: int | None) -> list[Rectangle]:
    """Rectangles of one document."""
    queries, keys = _joined(queries), _joined(keys)
    if window is None and queries == keys and _one_after_another(queries):
        return [Rectangle(queries[0].local, _end(queries[-1]), keys[0].local, _end(keys[-1]), "causal", 0)]
    cuts = sorted({at for part in (*queries, *keys) for at in (part.start, part.end)})
    found = [rectangle for query in _cut(queries, cuts) for key in _cut(keys, cuts) for rectangle in _of(query, key)]
    found = _merged(found, window=window)
    return found if window is None else [tile for one in found for tile in _windowed(one, window=window)]


def _of(query: Part, key: Part) -> Iterator[Rectangle]:
    """Pieces of equal or disjoint positions."""
    q1, k1, offset = query.local + query.end - query.start, key.local + key.end - key.start, query.start - key.start
    if query.start == key.start:
        yield Rectangle(query.local, q1, key.local, k1, "causal", 0)
    elif key.end <= query.start:
        yield Rectangle(query.local, q1, key.local, k1, "full", offset)


def _joined(parts: list[Part]) -> list[Part]:
    """In the order of positions; pieces that follow each other in positions and on the rank are one."""
    joined: list[Part] = []
    for part in sorted(parts):
        if joined and joined[-1].end == part.start and _end(joined[-1]) == part.local:
            joined[-1] = joined[-1]._replace(end=part.end)
        else:
            joined.append(part)
    return joined


def _one_after_another(parts: list[Part]) -> bool:
    """Whether the pieces lie side by side on the rank: what is causal in positions is so in local order."""
    return all(_end(before) == after.local for before, after in itertools.pairwise(parts))


def _end(part: Part) -> int:
    return part.local + part.end - part.start


def _cut(parts: list[Part], cuts: list[int]) -> Iterator[Part]:
    for part in parts:
        inside = [part.start, *(at for at in cuts if part.start < at < part.end), part.end]
        for start, end in itertools.pairwise(inside):
            yield Part(start, end, part.local + start - part.start)


def _merged(found: list[Rectangle], *, window: int | None) -> list[Rectangle]:
    """Neighbouring full rectangles as one: first along keys, then along queries. Fewer and larger calls of the kernel."""
    full = [one for one in found if one.kind == "full"]
    for along in ("k", "q"):
        full = _side_by_side(full, along=along, window=window)
    return [*full, *(one for one in found if one.kind != "full")]


def _side_by_side(found: list[Rectangle], *, along: str, window: int | None) -> list[Rectangle]:
    """A window needs the positions of a rectangle in one piece; without one its local range is all that counts."""
    across = "k" if along == "q" else "q"
    merged: list[Rectangle] = []
    for one in sorted(found, key=lambda one: (_range(one, across), _range(one, along))):
        last = merged[-1] if merged else None
        fits = (
            last is not None
            and _range(last, across) == _range(one, across)
            and _range(last, along)[1] == _range(one, along)[0]
            and (window is None or _straight(last, one))
        )
        if last is not None and fits:
            merged[-1] = last._replace(q1=one.q1, k1=one.k1)
        else:
            merged.append(one)
    return merged


def _range(one: Rectangle, side: str) -> Interval:
    return (one.q0, one.q1) if side == "q" else (one.k0, one.k1)


def _straight(one: Rectangle, other: Rectangle) -> bool:
    """Whether positions go on from one to the other as local order does."""
    return one.offset - (one.q0 - one.k0) == other.offset - (other.q0 - other.k0)


def _windowed(one: Rectangle, *, window: int) -> Iterator[Rectangle]:
    """The part of a rectangle within the window, in tiles whose mask is small."""
    last = one.offset + one.q1 - 1 - one.q0  # position of the last query less that of the first key
    if last < window:
        yield one
        return
    for q0 in range(one.q0, one.q1, BAND_TILE):
        q1 = min(q0 + BAND_TILE, one.q1)
        offset = one.offset + q0 - one.q0
        first_key = max(0, offset - window + 1)
        keys = one.k1 - one.k0 if one.kind == "full" else q1 - one.q0
        if first_key < keys:
            seen = min(q1, q0 + keys - 1 + window - offset)  # queries that some key is near enough for
            k0, k1 = one.k0 + first_key, one.k0 + keys
            tile_offset = offset - first_key
            near = tile_offset + seen - 1 - q0 < window
            whole = one.kind == "full" and near
            yield Rectangle(q0, seen, k0, k1, "full" if whole else "band", tile_offset)
