"""Prepared once, opened by all: cache, held-out documents, streams, several processes at once."""

import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from fourfold.data import work
from fourfold.data.fingerprint import cache_key
from fourfold.data.pack import COLUMNS
from fourfold.data.pieces import IGNORE
from fourfold.data.rows import RowSet
from fourfold.data.stream import StreamRowSet
from fourfold.schema import DataConfig, SourceKind
from tests.unit.data_making import all_rows, make, spoken, tokenizer, write_documents


@pytest.fixture
def _no_source(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: Any, **__: Any) -> Any:
        raise AssertionError("a source was read")

    monkeypatch.setattr(work, "documents", read)


def test_rows_and_counts(tmp_path: Path) -> None:
    made = make(write_documents(tmp_path / "d.jsonl", 3), tmp_path)
    assert isinstance(made.train, RowSet)
    assert [row["input_ids"] for row in all_rows(made.train)] == [[2, 2, 1, 3, 3, 3, 1, 4], [4, 4, 4, 1, 0, 0, 0, 0]]
    assert [row["labels"] for row in all_rows(made.train)][1] == [4, 4, 1, *[IGNORE] * 5]
    assert made.train.seq_len == 8
    assert all(made.train.row(0)[name].dtype == np.int64 for name in COLUMNS)
    assert (made.stats.documents, made.stats.tokens, made.stats.targets, made.stats.padding) == (3, 12, 9, 4)
    assert made.eval is made.eval_stats is None
    with pytest.raises(IndexError, match="row 2 of 2"):
        made.train.row(2)


def test_second_call_reads_no_source(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    data = write_documents(tmp_path / "d.jsonl", 40)
    data.eval_documents = 4
    first = make(data, tmp_path)
    request.getfixturevalue("_no_source")
    for lock in (tmp_path / "cache" / "data").glob("*.lock"):
        lock.unlink()
        lock.mkdir()  # nor does it lock anything: the cache may be read-only
    data.num_proc = 2  # how it is tokenised is not part of what is
    again = make(data, tmp_path)
    assert (again.stats, again.eval_stats) == (first.stats, first.eval_stats)
    assert isinstance(again.train, RowSet)
    assert isinstance(first.train, RowSet)
    assert all_rows(again.train) == all_rows(first.train)
    assert spoken(again.eval) == spoken(first.eval)


def test_whatever_changes_rows_changes_the_key(tmp_path: Path) -> None:
    data = write_documents(tmp_path / "d.jsonl", 5)
    words = tokenizer()

    def key(**options: Any) -> str:
        return cache_key(data, **{"tokenizer": words, "seq_len": 8, "seed": 0, **options})

    seen = [
        key(),
        key(seq_len=9),
        key(tokenizer=_changed(chat_template="x")),
        key(tokenizer=_changed(pad_token="</s>")),
    ]
    assert key(seed=1) == seen[0]  # nothing is chosen by seed
    words(["1 2", "3"], padding=True, truncation=True, max_length=5)  # leaves its settings in the backend
    assert key() == seen[0]
    data.text_column = "body"
    seen.append(key())
    data.eval_documents = 1
    seen += [key(), key(seed=1)]
    os.utime(data.path, ns=(1, 1))
    seen.append(key())
    assert len(set(seen)) == len(seen)


def _changed(**options: Any) -> PreTrainedTokenizerFast:
    words = tokenizer()
    for name, value in options.items():
        setattr(words, name, value)
    return words


@pytest.mark.parametrize("seed", [0, 1])
def test_held_out_documents_are_disjoint(seed: int, tmp_path: Path) -> None:
    data = write_documents(tmp_path / "d.jsonl", 60)
    data.eval_documents = 7
    made = make(data, tmp_path, seed=seed)
    train, held_out = spoken(made.train), spoken(made.eval)
    assert len(held_out) == 7
    assert train | held_out == set(range(60))
    assert not train & held_out
    assert made.eval_stats is not None
    assert (made.stats.documents, made.eval_stats.documents) == (53, 7)
    other = make(data, tmp_path, seed=2)
    assert spoken(other.eval) != held_out
    again = make(data, tmp_path / "elsewhere", seed=seed)
    assert spoken(again.eval) == held_out


def test_evaluation_data_of_their_own(tmp_path: Path) -> None:
    data = write_documents(tmp_path / "d.jsonl", 20)
    data.eval_path = write_documents(tmp_path / "e.jsonl", 5, first=100).path
    data.max_documents = 3  # of the training data
    made = make(data, tmp_path)
    assert spoken(made.train) == {0, 1, 2}
    assert spoken(made.eval) == set(range(100, 105))


@pytest.mark.parametrize("wanted", [5, 6])
def test_all_documents_held_out_is_refused(wanted: int, tmp_path: Path) -> None:
    data = write_documents(tmp_path / "d.jsonl", 5)
    data.eval_documents = wanted
    with pytest.raises(ValueError, match=rf"eval_documents={wanted} of 5 documents .* use at most 4"):
        make(data, tmp_path)
    assert not list((tmp_path / "cache" / "data").glob("*.tmp-*"))


def test_no_single_target_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "d.jsonl"
    file.write_text(json.dumps({"messages": [{"role": "user", "content": "1 2"}]}) + "\n" + '{"messages": []}\n')
    for name in ("first", "second"):
        with pytest.raises(ValueError, match=r"d\.jsonl: 2 documents read, none .* \(1 without target.*1 empty"):
            make(DataConfig(kind=SourceKind.jsonl, path=str(file)), tmp_path / name)


def test_evaluation_data_without_target_are_named(tmp_path: Path) -> None:
    data = write_documents(tmp_path / "d.jsonl", 5)
    (tmp_path / "e.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "1 2"}]}) + "\n")
    data.eval_path = str(tmp_path / "e.jsonl")
    with pytest.raises(ValueError, match=r"data\.eval_path=.*e\.jsonl: 1 documents read, none"):
        make(data, tmp_path)


def test_answer_beyond_its_row_is_counted(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "1 2 3 4 5"}, {"role": "assistant", "content": "6"}]
    file = tmp_path / "d.jsonl"
    file.write_text(json.dumps({"messages": messages}) + "\n")
    made = make(DataConfig(kind=SourceKind.jsonl, path=str(file)), tmp_path, seq_len=4)
    assert (made.stats.rows, made.stats.rows_without_target, made.stats.cut_documents, made.stats.targets) == (
        2,
        1,
        1,
        2,
    )


def test_stream_gives_the_same_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write_documents(tmp_path / "d.jsonl", 30)
    data.kind = SourceKind.datasets
    stored = make(data, tmp_path)
    data.streaming = True
    streamed = make(data, tmp_path)
    assert isinstance(streamed.train, StreamRowSet)
    assert all_rows(streamed.train) == all_rows(stored.train) == all_rows(streamed.train)
    assert streamed.train.stats == stored.stats
    assert len(list((tmp_path / "cache" / "data").glob("*/"))) == 1  # nothing kept of the stream


def test_stream_holds_out_its_first_documents(tmp_path: Path) -> None:
    data = write_documents(tmp_path / "d.jsonl", 30)
    data.streaming, data.eval_documents = True, 4
    made = make(data, tmp_path)
    assert spoken(made.eval) == set(range(4))
    assert spoken(made.train) == set(range(4, 30))


def test_several_tokenising_processes_give_the_same(tmp_path: Path) -> None:
    data = write_documents(tmp_path / "d.jsonl", 50)
    one = make(data, tmp_path / "one")
    data.num_proc = 2
    assert all_rows(make(data, tmp_path / "two").train) == all_rows(one.train)


def test_many_parts_are_one_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write_documents(tmp_path / "d.jsonl", 50)
    one = make(data, tmp_path / "one")
    monkeypatch.setattr("fourfold.data.rows.PART_TOKENS", 24)  # three rows
    many = make(data, tmp_path / "many")
    assert len(list((tmp_path / "many" / "cache" / "data").glob("*/train/part-*"))) > 5
    assert all_rows(many.train) == all_rows(one.train)


def test_failure_and_leftovers_leave_no_half_written_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write_documents(tmp_path / "d.jsonl", 9)
    root = tmp_path / "cache" / "data"
    killed = root / f"{cache_key(data, tokenizer=tokenizer(), seq_len=8, seed=0)}.tmp-1"
    (killed / "train").mkdir(parents=True)

    def failing(*_: Any, **__: Any) -> Any:
        yield {"text": "1 2"}
        raise OSError("disk on fire")

    with monkeypatch.context() as patch:
        patch.setattr(work, "documents", failing)
        with pytest.raises(OSError, match="disk on fire"):
            make(data, tmp_path)
    assert [path.suffix for path in root.iterdir()] == [".lock"]
    assert make(data, tmp_path).stats.documents == 9


def test_a_cache_with_a_part_missing_is_not_taken_for_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fourfold.data.rows.PART_TOKENS", 16)
    data = write_documents(tmp_path / "d.jsonl", 30)
    make(data, tmp_path)
    parts = sorted((tmp_path / "cache" / "data").glob("*/train/part-*"))
    assert len(parts) > 2
    shutil.rmtree(parts[1])
    with pytest.raises(ValueError, match=r"has \d+ of \d+ rows: remove"):
        make(data, tmp_path)


def test_nothing_is_printed_unless_asked(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work, "IN_A_FILE", 0.0)
    data = write_documents(tmp_path / "d.jsonl", 5)
    data.num_proc = 2
    make(data, tmp_path)
    assert tuple(capfd.readouterr()) == ("", "")
    make(data, tmp_path / "other", show=True)
    shown = capfd.readouterr()
    assert shown.out == ""
    assert "tokenise and pack data.path=" in shown.err
    assert "Saving" not in shown.err


def test_unwritable_cache_is_named(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(ValueError, match=r"cache_dir=.*cache cannot be written"):
        make(write_documents(tmp_path / "d.jsonl", 2), tmp_path)


WORKER = """
import sys, time
from pathlib import Path
from fourfold.data import work
sys.path.insert(0, sys.argv[1])
from tests.unit import data_making as tests
from fourfold.schema import DataConfig, SourceKind

def logged(data, *, path=None, read=work.documents):
    with open(sys.argv[3] + "/log", "a") as log:
        log.write(f"{sys.argv[4]}\\n")
    time.sleep(float(sys.argv[5]))
    return read(data, path=path)

work.documents = logged
ready = Path(sys.argv[3], "ready" + sys.argv[4])
ready.touch()
while not Path(sys.argv[3], "go").exists():
    time.sleep(0.005)
made = tests.make(DataConfig(kind=SourceKind.jsonl, path=sys.argv[2], packing="concat"), Path(sys.argv[3]))
print(tests.all_rows(made.train))
"""


def two_at_once(file: Path, folder: Path, *, seconds: float = 0.5) -> list[subprocess.CompletedProcess[str]]:
    """Two processes that call `prepare` at the same moment."""
    folder.mkdir(exist_ok=True)
    (folder / "go").unlink(missing_ok=True)
    for ready in folder.glob("ready*"):
        ready.unlink()
    arguments = [sys.executable, "-W", "error", "-c", WORKER, str(Path(__file__).parents[2]), str(file), str(folder)]
    running = [
        subprocess.Popen([*arguments, name, str(seconds)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for name in "ab"
    ]
    for _ in itertools.takewhile(lambda _: not all((folder / f"ready{name}").exists() for name in "ab"), range(6000)):
        assert all(process.poll() is None for process in running), [process.communicate() for process in running]
        time.sleep(0.01)
    (folder / "go").touch()
    outputs = [process.communicate(timeout=60) for process in running]
    return [
        subprocess.CompletedProcess(process.args, process.returncode, *output)
        for process, output in zip(running, outputs, strict=True)
    ]


def test_two_processes_prepare_once(tmp_path: Path) -> None:
    data = write_documents(tmp_path / "d.jsonl", 30)
    done = two_at_once(Path(data.path or ""), tmp_path / "shared")
    assert [process.returncode for process in done] == [0, 0], done
    assert done[0].stdout == done[1].stdout == f"{all_rows(make(data, tmp_path).train)}\n"
    assert len((tmp_path / "shared" / "log").read_text().split()) == 1


def test_r01_ranks_wait_as_long_as_it_takes_and_start_at_once_the_second_time(tmp_path: Path) -> None:
    """On a file lock, before any process group: no timeout of a collective counts."""
    data = write_documents(tmp_path / "d.jsonl", 30)
    place = tmp_path / "shared"
    done = two_at_once(Path(data.path or ""), place, seconds=3.0)
    assert [process.returncode for process in done] == [0, 0], done
    assert all("torch.distributed" not in process.stderr for process in done)
    assert len((place / "log").read_text().split()) == 1
    done = two_at_once(Path(data.path or ""), place, seconds=30.0)  # would run into the patience of the test
    assert [process.returncode for process in done] == [0, 0], done
    assert len((place / "log").read_text().split()) == 1


def test_two_processes_refuse_at_once(tmp_path: Path) -> None:
    """The second one does not read everything again to find out the same."""
    file = tmp_path / "d.jsonl"
    file.write_text(json.dumps({"messages": [{"role": "user", "content": "1 2"}]}) + "\n")
    done = two_at_once(file, tmp_path / "shared")
    assert all("ValueError" in process.stderr and "none has a token to predict" in process.stderr for process in done)
    assert len((tmp_path / "shared" / "log").read_text().split()) == 1
