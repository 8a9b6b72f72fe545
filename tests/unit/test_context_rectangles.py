"""Rectangles against brute force: every allowed (query, key) pair in exactly one of them, whoever holds what."""

import random
from collections.abc import Sequence

import pytest

from fourfold.context import rectangles as module
from fourfold.context.balance import zigzag
from fourfold.context.rectangles import Interval, Rectangle, Stretches, rectangles

Pairs = list[tuple[int, int]]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BAND_TILE", 3)


def cut(length: int, *, pieces: int, rng: random.Random) -> list[Interval]:
    cuts = sorted(rng.sample(range(1, length), min(length - 1, rng.randint(0, pieces))))
    return list(zip([0, *cuts], [*cuts, length], strict=True))


def partition(length: int, ranks: int, *, rng: random.Random) -> list[list[Interval]]:
    """Any stretches in any order on any rank; some ranks may have none."""
    stretches = cut(length, pieces=8, rng=rng)
    rng.shuffle(stretches)
    held: list[list[Interval]] = [[] for _ in range(ranks)]
    for stretch in stretches:
        held[rng.randrange(ranks)].append(stretch)
    return held


def allowed(queries: Stretches, keys: Stretches, *, documents: Stretches, window: int | None) -> Pairs:
    """Local positions of all pairs, by the definition."""
    document = {at: number for number, (start, end) in enumerate(documents) for at in range(start, end)}
    return [
        (i, j)
        for i, query in enumerate(positions(queries))
        for j, key in enumerate(positions(keys))
        if key <= query and query in document and document[query] == document.get(key)
        if window is None or query - key < window
    ]


def positions(stretches: Stretches) -> list[int]:
    return [at for start, end in stretches for at in range(start, end)]


def covered(found: Sequence[Rectangle], *, window: int | None) -> Pairs:
    return [pair for one in found for pair in pairs_of(one, window=window)]


def pairs_of(one: Rectangle, *, window: int | None) -> Pairs:
    pairs = [(i, j) for i in range(one.q0, one.q1) for j in range(one.k0, one.k1)]
    if one.kind == "full":
        return pairs
    if one.kind == "causal":
        assert one.q1 - one.q0 == one.k1 - one.k0
        return [(i, j) for i, j in pairs if i - one.q0 >= j - one.k0]
    assert window is not None
    return [(i, j) for i, j in pairs if 0 <= one.offset + (i - one.q0) - (j - one.k0) < window]


@pytest.mark.parametrize("seed", range(8))
def test_each_allowed_pair_is_in_exactly_one(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(250):
        length, ranks = rng.randint(2, 40), rng.randint(1, 4)
        held = partition(length, ranks, rng=rng)
        documents = cut(length, pieces=5, rng=rng)
        documents = documents[:-1] if rng.random() < 0.3 else documents  # the rest of the row is padding
        window = rng.choice([None, None, 1, 2, 5, 11])
        queries = held[rng.randrange(ranks)]
        keys = [one for part in held for one in part] if rng.random() < 0.3 else held[rng.randrange(ranks)]
        found = rectangles(queries, keys, documents=documents, window=window)
        want = allowed(queries, keys, documents=documents, window=window)
        assert sorted(covered(found, window=window)) == sorted(want), (queries, keys, documents, window)
        assert sum(one.pairs(window) for one in found) == len(want)
        assert all(one.q0 < one.q1 and one.k0 < one.k1 and one.pairs(window) for one in found), "none is empty"


def test_every_query_of_a_band_sees_a_key() -> None:
    """The CPU kernel's answer for one that does not would be wrong."""
    for window in (1, 2, 3, 7, 16):
        for held in zigzag(64, 4, ((0, 64),)):
            for one in rectangles(held, [(0, 64)], documents=[(0, 50), (50, 64)], window=window):
                assert {i for i, _ in pairs_of(one, window=window)} == set(range(one.q0, one.q1)), (window, one)


def test_few_and_large() -> None:
    row = [(0, 64)]
    assert rectangles(row, row, documents=row) == [Rectangle(0, 64, 0, 64, "causal", 0)]
    assert rectangles([(0, 8), (56, 64)], [(0, 8), (56, 64)], documents=row) == [
        Rectangle(0, 16, 0, 16, "causal", 0)
    ], "what lies in between is on another rank"
    assert rectangles([(32, 64)], [(0, 8), (8, 32)], documents=row) == [Rectangle(0, 32, 0, 32, "full", 32)]
    assert rectangles([(0, 32)], [(32, 64)], documents=row) == [], "the future"
    assert rectangles([(32, 64)], [(0, 32)], documents=[(0, 32), (32, 64)]) == [], "another document"


def test_a_window_that_nothing_reaches_over_changes_nothing() -> None:
    row = [(0, 24)]
    assert rectangles(row, row, documents=row, window=24) == rectangles(row, row, documents=row)


def test_a_windows_work_grows_with_the_tokens_only() -> None:
    counts = []
    for length in (128, 256):
        found = rectangles([(0, length)], [(0, length)], documents=[(0, length)], window=4)
        counts.append(sum((one.q1 - one.q0) * (one.k1 - one.k0) for one in found))
    assert counts[1] < 2.1 * counts[0]
