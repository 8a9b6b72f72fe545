"""D07: documents longer than a row, by each packing and each policy, with every count checked."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from fourfold.data.pack import PackSettings, Row, pack
from fourfold.data.pieces import IGNORE
from fourfold.data.stats import PackStats
from fourfold.schema import LongDocuments, Packing

LENGTHS = (5, 16, 17, 40)
WINDOW = 16
COUNTS = ("rows", "cut_documents", "pieces", "tokens", "targets", "padding")


def tagged() -> Iterator[tuple[list[int], list[bool]]]:
    """Token t of document d is 100 d + t + 100."""
    for number, length in enumerate(LENGTHS, start=1):
        yield [100 * number + position for position in range(length)], [True] * length


def packed(packing: str, policy: str) -> tuple[list[Row], PackStats]:
    stats = PackStats()
    settings = PackSettings(seq_len=WINDOW, packing=Packing(packing), long_documents=LongDocuments(policy), pad_id=7)
    return list(pack(tagged(), settings=settings, stats=stats)), stats


def tokens(rows: list[Row]) -> list[int]:
    return sorted(int(token) for row in rows for token in row["input_ids"][row["document_ids"] >= 0])


def targets(rows: list[Row]) -> list[int]:
    labels = np.concatenate([row["labels"] for row in rows])
    return sorted(labels[labels != IGNORE].tolist())


EXPECTED = {
    # all 78 tokens, and a target for each but the first of a document: 4 + 15 + 16 + 39
    ("best_fit", "split"): {"rows": 5, "cut_documents": 2, "pieces": 7, "tokens": 78, "targets": 74, "padding": 2},
    ("concat", "split"): {"rows": 5, "cut_documents": 3, "pieces": 8, "tokens": 78, "targets": 74, "padding": 2},
    ("none", "split"): {"rows": 7, "cut_documents": 2, "pieces": 7, "tokens": 78, "targets": 74, "padding": 34},
    # 5 + 16 + 16 + 16 tokens, cut before they are labelled: 4 + 15 + 15 + 15
    ("best_fit", "truncate"): {"rows": 4, "cut_documents": 0, "pieces": 4, "tokens": 53, "targets": 49, "padding": 11},
    ("concat", "truncate"): {"rows": 4, "cut_documents": 3, "pieces": 7, "tokens": 53, "targets": 49, "padding": 11},
    ("none", "truncate"): {"rows": 4, "cut_documents": 0, "pieces": 4, "tokens": 53, "targets": 49, "padding": 11},
    # 5 + 16
    ("best_fit", "drop"): {"rows": 2, "cut_documents": 0, "pieces": 2, "tokens": 21, "targets": 19, "padding": 11},
    ("concat", "drop"): {"rows": 2, "cut_documents": 1, "pieces": 3, "tokens": 21, "targets": 19, "padding": 11},
    ("none", "drop"): {"rows": 2, "cut_documents": 0, "pieces": 2, "tokens": 21, "targets": 19, "padding": 11},
}
LEFT_OUT = {
    "split": {},
    "truncate": {"truncated_documents": 2, "truncated_tokens": 1 + 24},
    "drop": {"dropped_documents": 2, "dropped_tokens": 17 + 40},
}


@pytest.mark.parametrize(("packing", "policy"), EXPECTED)
def test_d07_counts(packing: str, policy: str) -> None:
    rows, stats = packed(packing, policy)
    assert {name: getattr(stats, name) for name in COUNTS} == EXPECTED[packing, policy]
    reasons = ("truncated_documents", "truncated_tokens", "dropped_documents", "dropped_tokens")
    assert {name: getattr(stats, name) for name in reasons if getattr(stats, name)} == LEFT_OUT[policy]
    assert stats.documents == 4
    assert len(rows) == stats.rows


@pytest.mark.parametrize(("packing", "policy"), EXPECTED)
def test_d07_nothing_else_is_lost(packing: str, policy: str) -> None:
    rows, _ = packed(packing, policy)
    kept = [ids[:WINDOW] if policy == "truncate" else ids for ids, _ in tagged()]
    kept = [ids for ids in kept if policy != "drop" or len(ids) <= WINDOW]
    assert tokens(rows) == sorted(token for ids in kept for token in ids)
    assert targets(rows) == sorted(token for ids in kept for token in ids[1:])


@pytest.mark.parametrize("packing", ["best_fit", "none"])
def test_d07_a_long_document_is_whole_rows_and_a_rest(packing: str) -> None:
    rows, _ = packed(packing, "split")
    lengths = [int(((row["input_ids"] // 100) == 4).sum()) for row in rows]
    assert sorted(length for length in lengths if length) == [8, 16, 16]
    first = next(row for row in rows if row["input_ids"][0] == 400)
    assert first["labels"][-1] == 416  # across the cut


@pytest.mark.parametrize("packing", ["best_fit", "concat", "none"])
def test_d07_error_names_document_lengths_and_knob(packing: str) -> None:
    says = r"document 2 \(the first is 0\) has 17 tokens and a row seq_len=16: use seq_len=17, or data\.long_documents="
    with pytest.raises(ValueError, match=says):
        packed(packing, "error")


def test_a_truncated_prompt_without_its_answer_is_counted_twice() -> None:
    stats = PackStats()
    settings = PackSettings(seq_len=4, long_documents=LongDocuments.truncate)
    document: Any = (list(range(6)), [False] * 5 + [True])
    assert list(pack([document], settings=settings, stats=stats)) == []
    assert (stats.truncated_documents, stats.documents_without_target) == (1, 1)


@pytest.mark.parametrize("policy", ["drop", "error", "truncate"])
def test_a_long_document_without_target_is_left_out_for_that(policy: str) -> None:
    stats = PackStats()
    settings = PackSettings(seq_len=4, long_documents=LongDocuments(policy))
    assert list(pack([(list(range(6)), [False] * 6)], settings=settings, stats=stats)) == []
    assert (stats.documents_without_target, stats.dropped_documents, stats.truncated_documents) == (1, 0, 0)
