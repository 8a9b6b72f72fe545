"""D06: empty, blank, one-token and unreadable documents; null and missing columns."""

import json
from pathlib import Path
from typing import Any

import pytest

from fourfold.data.loader import Loader
from fourfold.schema import DataConfig, Packing, SourceKind
from tests.unit.data_making import make, spoken

BLANK: list[dict[str, Any]] = [{"text": ""}, {"text": " \n\t"}, {"messages": []}]


def jsonl(folder: Path, rows: list[Any]) -> DataConfig:
    file = folder / "d.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataConfig(kind=SourceKind.jsonl, path=str(file))


@pytest.mark.parametrize("packing", Packing)
@pytest.mark.parametrize("place", [0, 2, 4])
def test_d06_blank_documents_are_skipped_and_counted(place: int, packing: Packing, tmp_path: Path) -> None:
    rows: list[Any] = [{"text": f"{i} {i}"} for i in range(4)]
    data = jsonl(tmp_path, [*rows[:place], *BLANK, *rows[place:]])
    data.packing = packing
    made = make(data, tmp_path)
    assert (made.stats.documents, made.stats.empty_documents) == (7, 3)
    assert spoken(made.train) == {0, 1, 2, 3}


def test_d06_one_token_has_no_target(tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "1"}]}
    made = make(jsonl(tmp_path, [chat, {"text": "2"}, {"input_ids": [5]}, {"input_ids": []}]), tmp_path)
    assert (made.stats.documents, made.stats.documents_without_target, made.stats.empty_documents) == (4, 2, 1)
    assert made.stats.targets == 1  # the eos of "2"


def test_d06_unreadable_files_are_counted(tmp_path: Path) -> None:
    folder = tmp_path / "tree"
    folder.mkdir()
    for name, content in {"a": b"1 1", "b": b"\xff\xfe\x00", "c": b"a\0b", "d": b" \n", "e": b""}.items():
        (folder / name).write_bytes(content)
    made = make(DataConfig(path=str(folder)), tmp_path)
    assert (made.stats.documents, made.stats.empty_documents) == (5, 4)


@pytest.mark.parametrize("row", [{"text": None}, {"other": "x"}, {"messages": None}, {}])
def test_d06_null_and_missing_are_refused_with_their_line(row: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"d\.jsonl:2: "):
        make(jsonl(tmp_path, [{"text": "1 1"}, row]), tmp_path)


def test_d06_nothing_but_blank_documents(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no document in .*d\.jsonl: all 3 that were read are empty, white space or"):
        make(jsonl(tmp_path, BLANK), tmp_path)


@pytest.mark.parametrize("streaming", [False, True])
def test_d06_held_out_documents_are_not_blank(streaming: bool, tmp_path: Path) -> None:
    rows = [row for i in range(10) for row in (BLANK[i % 3], {"text": f"{i} {i}"})]
    data = jsonl(tmp_path, rows)
    data.eval_documents, data.streaming = 3, streaming
    made = make(data, tmp_path)
    assert made.eval_stats is not None
    assert (made.eval_stats.documents, made.eval_stats.empty_documents) == (3, 0)
    assert len(spoken(made.eval)) == 3
    assert spoken(made.train) | spoken(made.eval) == set(range(10))


def test_d06_blank_documents_do_not_use_up_the_limit(tmp_path: Path) -> None:
    data = jsonl(tmp_path, [*BLANK, {"text": "1 1"}, {"text": ""}, {"text": "2 2"}, {"text": "3 3"}])
    data.max_documents = 2
    assert spoken(make(data, tmp_path).train) == {1, 2}


def test_d06_the_only_row_of_one_rank(tmp_path: Path) -> None:
    """One row for two ranks: the other gets a row without target, and as many micro-batches."""
    made = make(jsonl(tmp_path, [*BLANK, {"text": "1 1"}]), tmp_path)
    for rank in (0, 1):
        loader = Loader(
            made.train, seed=0, global_batch_size=2, micro_batch_size=1, data_rank=rank, data_size=2, pad_id=0
        )
        [update] = loader.updates(num_epochs=1, max_steps=None)
        assert len(update.micro_batches) == 1
        assert int((update.micro_batches[0]["labels"] >= 0).sum()) == (2 if rank == 0 else 0)
