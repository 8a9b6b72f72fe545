"""Packed rows: hand-made expectations, and every target exactly once."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from fourfold.data.pack import COLUMNS, PackSettings, Row, padding_row
from fourfold.data.pack import pack as pack_documents
from fourfold.data.pieces import IGNORE
from fourfold.data.stats import PackStats
from fourfold.schema import Packing

N = IGNORE


def text(*ids: int) -> tuple[list[int], list[bool]]:
    return list(ids), [True] * len(ids)


def pack(documents: Any, *, stats: PackStats | None = None, **settings: Any) -> Iterator[Row]:
    return pack_documents(documents, settings=PackSettings(packing=Packing.concat, **settings), stats=stats)


def as_lists(rows: list[Row]) -> list[dict[str, list[int]]]:
    return [{name: row[name].tolist() for name in COLUMNS} for row in rows]


def test_rows_by_hand() -> None:
    stats = PackStats()
    documents = [text(10, 11, 12), text(20, 21, 22, 23), text(30, 31)]
    rows = list(pack(documents, seq_len=5, pad_id=9, stats=stats))
    assert as_lists(rows) == [
        {
            "input_ids": [10, 11, 12, 20, 21],
            "labels": [11, 12, N, 21, 22],  # the last position predicts 22, across the row's end
            "position_ids": [0, 1, 2, 0, 1],
            "document_ids": [0, 0, 0, 1, 1],
        },
        {
            "input_ids": [22, 23, 30, 31, 9],
            "labels": [23, N, 31, N, N],
            "position_ids": [0, 1, 0, 1, 0],
            "document_ids": [0, 0, 1, 1, -1],
        },
    ]
    assert all(row[name].dtype == np.int64 for row in rows for name in COLUMNS)
    assert stats == PackStats(
        documents=3, cut_documents=1, pieces=4, rows=2, tokens=9, targets=6, padding=1, lengths=[0, 2, 1]
    )
    assert stats.efficiency == 0.9


def test_only_targets_are_labels() -> None:
    [row] = pack([([1, 2, 3, 4, 5], [False, False, True, False, True])], seq_len=6)
    assert row["labels"].tolist() == [N, 3, N, 5, N, N]
    assert row["position_ids"].tolist() == [0, 1, 2, 3, 4, 0]


def test_document_ends_with_the_row() -> None:
    rows = list(pack([text(1, 2, 3), text(4, 5, 6)], seq_len=3))
    assert [row["labels"].tolist() for row in rows] == [[2, 3, N], [5, 6, N]]  # nothing leaks into the next document


def test_document_over_many_rows() -> None:
    stats = PackStats()
    rows = list(pack([text(*range(1, 11))], seq_len=3, stats=stats))
    assert [row["labels"].tolist() for row in rows] == [[2, 3, 4], [5, 6, 7], [8, 9, 10], [N, N, N]]
    assert [row["position_ids"].tolist() for row in rows] == [[0, 1, 2]] * 3 + [[0, 0, 1]]
    assert (stats.cut_documents, stats.pieces, stats.rows, stats.rows_without_target) == (1, 4, 4, 1)


def test_prompt_that_fills_a_row() -> None:
    stats = PackStats()
    rows = list(pack([([1, 2, 3, 4, 5], [False] * 4 + [True])], seq_len=2, stats=stats))
    assert [row["labels"].tolist() for row in rows] == [[N, N], [N, 5], [N, N]]
    assert (stats.rows_without_target, stats.documents_without_target, stats.targets) == (2, 0, 1)


def test_documents_without_target_take_no_room() -> None:
    stats = PackStats()
    documents = [([7, 8], [False, False]), text(1, 2), ([5], [True]), ([6, 7], [True, False]), ([], [])]
    [row] = pack(documents, seq_len=2, stats=stats)
    assert row["input_ids"].tolist() == [1, 2]
    assert (stats.documents, stats.empty_documents, stats.documents_without_target, stats.tokens) == (5, 1, 3, 2)


def test_no_document_no_row() -> None:
    assert list(pack([], seq_len=4)) == []


@pytest.mark.parametrize("seq_len", [1, 2, 3, 7, 64, 1000])
def test_every_target_exactly_once(seq_len: int) -> None:
    random = np.random.default_rng(seq_len)
    documents, expected, token = [], [], 0
    for length in random.integers(1, 40, size=60):
        ids = list(range(token, token + length))  # every token differs, so that a label names its place
        is_target = (random.random(length) < 0.6).tolist()
        documents.append((ids, is_target))
        expected += [number for number, wanted in zip(ids[1:], is_target[1:], strict=True) if wanted]
        token += int(length)
    stats = PackStats()
    rows = list(pack(documents, seq_len=seq_len, pad_id=token, stats=stats))
    labels = np.concatenate([row["labels"] for row in rows])
    inputs = np.concatenate([row["input_ids"] for row in rows])
    assert labels[labels != N].tolist() == expected
    assert (labels[labels != N] == inputs[labels != N] + 1).all()  # each is predicted by the token just before it
    assert stats.targets == len(expected)
    assert stats.tokens + stats.padding == len(rows) * seq_len


def test_padding_row() -> None:
    row = padding_row(3, 9)
    assert as_lists([row]) == [
        {"input_ids": [9, 9, 9], "labels": [N, N, N], "position_ids": [0, 1, 2], "document_ids": [-1, -1, -1]}
    ]
