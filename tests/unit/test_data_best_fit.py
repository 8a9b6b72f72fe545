"""Best fit: whole documents, rows nearly full, the same whatever the window as far as documents go."""

import itertools
from typing import Any

import numpy as np
import pytest

from fourfold.data.best_fit import best_fit
from fourfold.data.pack import PackSettings, Row, pack
from fourfold.data.pieces import IGNORE
from fourfold.data.stats import PackStats
from fourfold.schema import Packing


def test_by_hand() -> None:
    # 6 and 4 | 5, 3 and 2 | 5: 4 goes to the 6 that it fills, not to a 5
    assert best_fit([5, 4, 6, 5, 3, 2], capacity=10) == [[0, 3], [1, 2], [4, 5]]
    assert best_fit([3, 7, 5, 5], capacity=10) == [[0, 1], [2, 3]]
    assert best_fit([10, 10], capacity=10) == [[0], [1]]
    assert best_fit([], capacity=10) == []


def naive(lengths: list[int], *, capacity: int) -> int:
    """Rows of best-fit decreasing by looking at every row."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [room for room in rooms if room >= length]
        if fitting:
            rooms.remove(min(fitting))
            rooms.append(min(fitting) - length)
        else:
            rooms.append(capacity - length)
    return len(rooms)


@pytest.mark.parametrize("seed", range(5))
def test_as_good_as_the_plain_algorithm(seed: int) -> None:
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 100, size=400).tolist()
    rows = best_fit(lengths, capacity=100)
    assert sorted(number for row in rows for number in row) == list(range(400))
    assert all(sum(lengths[number] for number in row) <= 100 for row in rows)
    assert len(rows) == naive(lengths, capacity=100)


def texts(lengths: list[int]) -> list[tuple[list[int], list[bool]]]:
    """Every token differs."""
    starts = np.cumsum([0, *lengths]).tolist()
    return [
        (list(range(start, start + length)), [True] * length) for start, length in zip(starts, lengths, strict=False)
    ]


def packed(lengths: list[int], *, stats: PackStats | None = None, **settings: Any) -> list[Row]:
    return list(pack(texts(lengths), settings=PackSettings(pad_id=10**6, **settings), stats=stats))


@pytest.mark.parametrize("packing", Packing)
@pytest.mark.parametrize("seq_len", [1, 7, 64])
def test_every_target_once_isolated_and_padding_last(packing: Packing, seq_len: int) -> None:
    lengths = np.random.default_rng(seq_len).integers(1, 40, size=60).tolist()
    stats = PackStats()
    rows = packed(lengths, seq_len=seq_len, packing=packing, stats=stats)
    labels = np.concatenate([row["labels"] for row in rows])
    inputs = np.concatenate([row["input_ids"] for row in rows])
    expected = [token for ids, _ in texts(lengths) for token in ids[1:]]
    assert sorted(labels[labels != IGNORE].tolist()) == expected
    assert (labels[labels != IGNORE] == inputs[labels != IGNORE] + 1).all()
    assert stats.targets == len(expected)
    assert stats.tokens + stats.padding == len(rows) * seq_len
    for row in rows:
        documents = row["document_ids"]
        used = int((documents >= 0).sum())
        assert (documents[:used] >= 0).all()
        assert (row["labels"][used:] == IGNORE).all()
        starts = np.flatnonzero(np.diff(documents, prepend=-2))
        assert (row["position_ids"][starts] == 0).all()
        assert (
            np.diff(row["position_ids"]) == np.where(np.diff(documents) == 0, 1, np.diff(row["position_ids"]))
        ).all()


def test_documents_stay_whole() -> None:
    lengths = np.random.default_rng(0).integers(1, 32, size=500).tolist()
    stats = PackStats()
    packed(lengths, seq_len=64, stats=stats)
    assert (stats.cut_documents, stats.pieces) == (0, sum(length > 1 for length in lengths))
    assert stats.efficiency > 0.99


def test_windows_bound_what_is_in_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = np.random.default_rng(0).integers(2, 64, size=300).tolist()
    whole = packed(lengths, seq_len=64)
    monkeypatch.setattr("fourfold.data.fill.WINDOW_TOKENS", 500)
    monkeypatch.setattr("fourfold.data.fill.WINDOW_ROWS", 1)
    rows = packed(lengths, seq_len=64)
    assert (
        sorted(np.concatenate([row["labels"] for row in rows]).tolist())[-100:]
        == sorted(np.concatenate([row["labels"] for row in whole]).tolist())[-100:]
    )
    firsts = [int(row["input_ids"][0]) for row in rows]
    assert max(before - after for before, after in itertools.pairwise(firsts)) < 600  # no row from far back
    assert len(rows) < 1.15 * len(whole)


def test_same_documents_same_rows() -> None:
    lengths = np.random.default_rng(3).integers(2, 64, size=300).tolist()
    for one, other in zip(packed(lengths, seq_len=64), packed(lengths, seq_len=64), strict=True):
        assert all((one[name] == other[name]).all() for name in one)
