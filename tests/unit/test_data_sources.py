"""Where documents come from, in which order, and what is said when they do not."""

import json
import re
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from fourfold.data.document import is_blank
from fourfold.data.files import text_files
from fourfold.data.huggingface import open_dataset
from fourfold.data.sources import documents
from fourfold.schema import DataConfig, SourceKind

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]


def texts(data: DataConfig, **options: Any) -> list[str]:
    return [document["text"] for document in documents(data, **options) if not is_blank(document)]


def write(folder: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def json_lines(*rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_text_tree_in_path_order_without_unreadable_files(tmp_path: Path) -> None:
    files: dict[str, str | bytes] = {
        "b.txt": "b",
        "a/z.txt": "az",
        "a.txt": "a",
        "a/b/c.md": "abc",
        "empty.txt": " \n",
        "binary.bin": b"\xff\xfe\x00",
        "nul.bin": b"a\0b",
        ".git/config": "hidden",
        "bom.txt": b"\xef\xbb\xbfbom\r\n",
    }
    write(tmp_path, files)
    assert texts(DataConfig(path=str(tmp_path))) == ["abc", "az", "a", "b", "bom\r\n"]
    assert texts(DataConfig(path=str(tmp_path), pattern="*.txt")) == ["a", "b", "bom\r\n"]
    assert texts(DataConfig(path=str(tmp_path), max_documents=2)) == ["abc", "az"]
    assert texts(DataConfig(path=str(tmp_path / "b.txt"))) == ["b"]


def test_standard_library() -> None:
    data = DataConfig(path="stdlib", max_documents=5)
    files = text_files("stdlib", pattern=data.pattern)
    root = Path(sysconfig.get_path("stdlib"))
    names = [file.relative_to(root).parts for file in files]
    assert len(names) > 300
    assert names == sorted(names)
    assert ("argparse.py",) in names
    assert not {"test", "tests", "site-packages", "__pycache__"} & {part for name in names for part in name}
    assert all(name[-1].endswith(".py") for name in names)
    assert texts(data) == [text for file in files if (text := file.read_text("utf-8-sig", "strict")).strip()][:5]
    asyncio = text_files("stdlib", pattern="asyncio/*")
    assert {file.parent.name for file in asyncio} == {"asyncio"}


@pytest.mark.parametrize("kind", ["text", "jsonl", "datasets"])
@pytest.mark.parametrize("name", ["absent/deeply/x", "./absent", "absent.jsonl"])
def test_missing_path_shows_the_absolute_one(
    kind: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=re.escape(str(tmp_path / name))):
        documents(DataConfig(kind=SourceKind(kind), path=name))


def test_relative_path_is_the_working_directorys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"one/data/x.txt": "first", "two/data/x.txt": "second"})
    monkeypatch.chdir(tmp_path / "one")
    found = documents(DataConfig(path="data"))
    monkeypatch.chdir(tmp_path / "two")  # read after a change of directory, as Hydra may make one
    assert [document["text"] for document in found] == ["first"]
    assert texts(DataConfig(path="data")) == ["second"]
    assert texts(DataConfig(path="absent"), path="../one/data") == ["first"]


@pytest.mark.parametrize("files", [{}, {"empty.txt": ""}, {"binary": b"\xff"}])
def test_empty_text_source_is_refused(files: dict[str, str | bytes], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(str(tmp_path))):
        list(documents(DataConfig(path=str(write(tmp_path, files)))))


@pytest.mark.parametrize(
    "content", ["", "\n\n", json_lines({"text": ""}), json_lines({"text": " \t"}, {"messages": []})]
)
def test_empty_jsonl_is_refused(content: str, tmp_path: Path) -> None:
    write(tmp_path, {"a.jsonl": content})
    with pytest.raises(ValueError, match=rf"no document in {re.escape(str(tmp_path))}"):
        list(documents(DataConfig(kind=SourceKind.jsonl, path=str(tmp_path))))


def test_jsonl_columns_and_folder(tmp_path: Path) -> None:
    rows = json_lines({"text": "t", "messages": None}, {"messages": CHAT, "text": "ignored"}) + "\n"
    write(tmp_path, {"b.jsonl": rows, "a/c.jsonl": json_lines({"text": "c"}), "note.txt": "not read"})
    data = DataConfig(kind=SourceKind.jsonl, path=str(tmp_path))
    assert list(documents(data)) == [{"text": "c"}, {"text": "t"}, {"messages": CHAT}]
    write(tmp_path, {"other.json": json_lines({"body": "x", "text": 3}, {"talk": CHAT})})
    renamed = DataConfig(
        kind=SourceKind.jsonl, path=str(tmp_path / "other.json"), text_column="body", messages_column="talk"
    )
    assert list(documents(renamed)) == [{"text": "x"}, {"messages": CHAT}]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "cut', "not one JSON value a line"),
        (b'{"text": "\xff"}', "not one JSON value a line"),
        (b'["text"]', "expected an object"),
        (b'{"prompts": "x"}', r"its columns are \['prompts'\]"),
        (b'{"text": null}', "`text` is null"),
        (b'{"text": null, "messages": null}', "`messages` and `text` are null"),
        (b'{"prompt": "x"}', "`prompt` without `completion`"),
        (b'{"prompt": "x", "completion": null}', "`completion` is null"),
        (b'{"prompt": "x", "completion": 3}', "`completion` is int"),
        (b'{"input_ids": "x"}', "`input_ids` is str, expected a list of integers"),
        (b'{"input_ids": [1], "labels": 1}', "`labels` is int, expected a list of integers"),
        (b'{"text": 3}', "`text` is int"),
        (b'{"messages": "x"}', "must be a list of objects"),
        (b'{"messages": [{"from": "human", "value": "x"}]}', r"its keys are \['from', 'value'\]"),
    ],
)
def test_broken_line_is_named(line: bytes, message: str, tmp_path: Path) -> None:
    file = write(tmp_path, {"d.jsonl": b'{"text": "ok"}\n\n' + line + b"\n"}) / "d.jsonl"
    with pytest.raises(ValueError, match=rf"^{re.escape(str(file))}:3: .*{message}"):
        list(documents(DataConfig(kind=SourceKind.jsonl, path=str(file))))


@pytest.mark.parametrize("suffix", ["parquet", "jsonl", "csv"])
def test_datasets_reads_local_files_and_folders(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    cache = tmp_path / "cache"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    file = tmp_path / "folder" / f"train.{suffix}"
    file.parent.mkdir()
    table = datasets.Dataset.from_dict({"text": ["a", "b", "", "c"]})
    {"parquet": table.to_parquet, "jsonl": table.to_json, "csv": table.to_csv}[suffix](file)
    cached = set(cache.rglob("*"))
    for path in (file, file.parent):
        for streaming in (False, True):
            data = DataConfig(kind=SourceKind.datasets, path=str(path), streaming=streaming)
            assert texts(data) == ["a", "b", "c"]
    assert not [path for path in set(cache.rglob("*")) - cached if path.suffix == ".arrow"]  # no second copy on disk


def test_datasets_parquet_keeps_messages(tmp_path: Path) -> None:
    import datasets

    file = tmp_path / "chat.parquet"
    datasets.Dataset.from_list([{"messages": CHAT}, {"messages": CHAT[:1]}]).to_parquet(file)
    found = list(documents(DataConfig(kind=SourceKind.datasets, path=str(file))))
    assert found == [{"messages": CHAT}, {"messages": CHAT[:1]}]


def test_datasets_saved_folder_and_its_splits(tmp_path: Path) -> None:
    import datasets

    one, two = datasets.Dataset.from_dict({"text": ["a"]}), datasets.Dataset.from_dict({"text": ["b", "c"]})
    two.save_to_disk(tmp_path / "plain")
    datasets.DatasetDict({"train": one, "test": two}).save_to_disk(tmp_path / "splits")
    plain = DataConfig(kind=SourceKind.datasets, path=str(tmp_path / "plain"))
    splits = DataConfig(kind=SourceKind.datasets, path=str(tmp_path / "splits"), split="test")
    assert texts(plain) == texts(splits) == ["b", "c"]
    splits.streaming = True
    assert isinstance(open_dataset(splits, path=splits.path), datasets.IterableDataset)
    assert texts(splits) == ["b", "c"]
    splits.split = "dev"
    with pytest.raises(ValueError, match=r"data\.split=dev is not in .*use one of train, test"):
        texts(splits)


@pytest.mark.parametrize(("name", "content"), [("x.parquet", "no parquet"), ("x.bin", "?"), ("empty/note.md", "")])
def test_datasets_unreadable_local_path_is_named(name: str, content: str, tmp_path: Path) -> None:
    path = (write(tmp_path, {name: content}) / name.split("/")[0]).absolute()
    with pytest.raises(ValueError, match=re.escape(str(path))):
        list(documents(DataConfig(kind=SourceKind.datasets, path=str(path))))


def test_datasets_wrong_split_of_a_file_folder(tmp_path: Path) -> None:
    write(tmp_path, {"train.jsonl": json_lines({"text": "a"})})
    with pytest.raises(ValueError, match=r"data\.split=dev"):
        list(documents(DataConfig(kind=SourceKind.datasets, path=str(tmp_path), split="dev")))


def test_hub_id_goes_to_the_hub_and_failure_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked = []

    def load_dataset(path: str, **options: Any) -> Any:
        asked.append((path, options))
        if path == "no/such":
            raise ConnectionError("offline")
        return datasets.Dataset.from_dict({"text": ["from the hub"]})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.chdir(tmp_path)
    assert texts(DataConfig(kind=SourceKind.datasets, path="org/name", subset="s", split="dev")) == ["from the hub"]
    assert asked == [("org/name", {"name": "s", "split": "dev", "streaming": False})]
    with pytest.raises(ValueError, match=rf"tried {re.escape(str(tmp_path / 'no/such'))}.*offline"):
        documents(DataConfig(kind=SourceKind.datasets, path="no/such"))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"messages": [{"role": "user"}]}', "the `content` of a user message is missing"),
        ('{"messages": [{"role": "user", "content": [{"type": "text"}]}]}', "is list, expected text"),
        ('{"text": "a \\ud800 b"}', "character 2 is half of a surrogate pair"),
        ('{"messages": [{"role": "user", "content": "\\udfff"}]}', "character 0 is half of a surrogate pair"),
    ],
)
def test_what_no_tokenizer_takes_is_told_with_its_line(tmp_path: Path, line: str, says: str) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text('{"text": "good"}\n' + line + "\n")
    with pytest.raises(ValueError, match=f"{file}:2: ") as caught:
        list(documents(DataConfig(kind=SourceKind.jsonl, path=str(file))))
    assert says in str(caught.value)
