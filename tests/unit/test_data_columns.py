"""Prompt and completion, tokens that come as such, exactly one bos: which tokens they become and which are targets."""

import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from fourfold.data.sources import documents
from fourfold.data.tokens import encode
from fourfold.schema import DataConfig, SourceKind
from tests.unit.data_words import MARKED, PLAIN, WORDS, chat, shown, tokenizer


class Slow:
    """The same tokens without character offsets."""

    is_fast = False

    def __init__(self, fast: PreTrainedTokenizerFast) -> None:
        self._fast = fast

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fast, name)

    def __call__(self, text: str, **options: Any) -> Any:
        assert "return_offsets_mapping" not in options
        return self._fast(text, **options)


def answer(prompt: str, completion: str) -> dict[str, str]:
    return {"prompt": prompt, "completion": completion}


@pytest.mark.parametrize("kind", [lambda words: words, Slow])
def test_completion_and_eos_are_the_targets(kind: Any) -> None:
    assert shown(answer("a b", " c d"), by=kind(tokenizer())) == ["<s>", "a", "b", "[c]", "[d]", "[</s>]"]
    assert shown(answer("a b ", "c"), by=kind(tokenizer(bos=False))) == ["a", "b", "[c]", "[</s>]"]
    assert shown(answer("", "c"), by=kind(tokenizer())) == ["<s>", "[c]", "[</s>]"]
    assert shown(answer("a", ""), by=kind(tokenizer())) == ["<s>", "a", "</s>"]  # no answer


def test_a_token_over_the_border_is_a_target_or_refused() -> None:
    words = tokenizer()
    words.add_tokens(["ab"])
    joined = encode(answer("c a", "b d"), tokenizer=words)
    assert words.convert_ids_to_tokens(joined.input_ids) == ["<s>", "c", "ab", "d", "</s>"]
    assert joined.is_target == [False, False, True, True, True]
    with pytest.raises(ValueError, match=r"prompt ending in 'c a' .* completion 'b d'.*fast tokenizer"):
        encode(answer("c a", "b d"), tokenizer=Slow(words))  # type: ignore[arg-type]


def test_own_eos_is_not_doubled_and_counts() -> None:
    words = tokenizer()
    words.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    assert shown(answer("a", " b"), by=words) == ["<s>", "a", "[b]", "[</s>]"]
    assert shown(answer("a", " b"), by=Slow(words)) == ["<s>", "a", "[b]", "[</s>]"]  # type: ignore[arg-type]


@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize(
    "document",
    [
        {"messages": chat("u:a", "a:b")},
        {"text": "<s> a b"},
        {"prompt": "<s> a", "completion": " b"},
        {"prompt": "", "completion": "<s> b"},
    ],
)
@pytest.mark.parametrize("template", [MARKED, PLAIN])
def test_d05_one_bos(document: dict[str, Any], adds: bool, template: str) -> None:
    """The document brings one, and the tokenizer adds one or not."""
    words = tokenizer(template, bos=adds)
    ids = encode(document, tokenizer=words).input_ids
    assert ids[0] == words.bos_token_id
    assert ids.count(words.bos_token_id) == 1


@pytest.mark.parametrize("document", [{"text": "a"}, {"prompt": "a", "completion": "b"}])
def test_d05_the_tokenizers_own_bos(document: dict[str, Any]) -> None:
    assert encode(document, tokenizer=tokenizer()).input_ids.count(1) == 1
    assert encode(document, tokenizer=tokenizer(bos=False)).input_ids.count(1) == 0


# ------------------------------------------------------------------------------------------ tokens


def tokens(ids: Any, labels: Any = None) -> dict[str, Any]:
    return {"input_ids": ids, "labels": labels, "where": "d.parquet, row 3"}


def test_tokens_are_taken_as_they_are() -> None:
    assert shown(tokens([6, 7, 8]), by=tokenizer()) == ["[a]", "[b]", "[c]"]  # no bos, no eos
    assert shown(tokens([6, 7, 8], [-100, 7, 8]), by=tokenizer()) == ["a", "[b]", "[c]"]


@pytest.mark.parametrize(
    ("ids", "labels", "says"),
    [
        ([6, len(WORDS)], None, rf"position 1: {len(WORDS)} is no id .* 0 to {len(WORDS) - 1}"),
        ([-1], None, "position 0: -1 is no id"),
        ([6, None], None, "position 1: None is no id"),
        ([6.0], None, r"position 0: 6\.0 is no id"),
        ([True], None, "position 0: True is no id"),
        ([6, 7], [6], "1 labels for 2 input_ids"),
        ([6, 7, 8], [-100, 8, 8], r"position 1: label 8 is neither the token there \(7\) nor -100 .*shifted by one"),
        ([6, 7, 8], [-100, 7, 0], r"position 2: label 0 is neither the token there \(8\) nor -100$"),
        ([6, 7], [-100, None], "position 1: label None"),
    ],
)
def test_wrong_tokens_are_named(ids: list[Any], labels: list[Any] | None, says: str) -> None:
    with pytest.raises(ValueError, match=rf"^d\.parquet, row 3.*{says}"):
        encode(tokens(ids, labels), tokenizer=tokenizer())


# ------------------------------------------------------------------------------------------ files


def test_a_row_of_several_columns_gives_the_first_kind(tmp_path: Path) -> None:
    import json

    full = {"messages": chat("u:a", "a:b"), "prompt": "p", "completion": "c", "input_ids": [1], "text": "t"}
    rows = []
    for missing in ("", "messages", "completion", "input_ids"):
        full = {**full, missing: None} if missing else full
        rows.append(full)
    file = tmp_path / "d.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = list(documents(DataConfig(kind=SourceKind.jsonl, path=str(file))))
    assert [sorted(document) for document in found] == [
        ["messages"],
        ["completion", "prompt"],
        ["input_ids", "labels", "where"],
        ["text"],
    ]
    assert found[2]["where"] == f"{file}:3"


def table() -> dict[str, list[Any]]:
    return {"prompt": ["a", "", "NA"], "completion": ["b", " ", "007"], "n": [1, 2, 3]}


@pytest.mark.parametrize("kind", ["parquet", "csv", "tsv"])
def test_tables_by_file_and_folder(kind: str, tmp_path: Path) -> None:
    import pandas

    frame = pandas.DataFrame(table())
    for name in ("b", "a/c"):
        file = tmp_path / f"{name}.{kind}"
        file.parent.mkdir(exist_ok=True)
        frame.to_parquet(file) if kind == "parquet" else frame.to_csv(
            file, index=False, sep="\t" if kind == "tsv" else ","
        )
    (tmp_path / "note.md").write_text("not read")
    expected = [answer("a", "b"), {"text": ""}, answer("NA", "007")]
    source = SourceKind("parquet" if kind == "parquet" else "csv")
    for streaming in (False, True):
        one = DataConfig(kind=source, path=str(tmp_path / f"b.{kind}"), streaming=streaming)
        assert list(documents(one)) == expected
        assert list(documents(DataConfig(kind=source, path=str(tmp_path), streaming=streaming))) == 2 * expected


def test_tokens_from_parquet(tmp_path: Path) -> None:
    import pandas

    pandas.DataFrame({"ids": [[6, 7], []], "labels": [[-100, 7], []]}).to_parquet(tmp_path / "d.parquet")
    data = DataConfig(kind=SourceKind.parquet, path=str(tmp_path), input_ids_column="ids")
    [first, second] = documents(data)
    assert shown(first, by=tokenizer()) == ["a", "[b]"]
    assert second == {"text": ""}


@pytest.mark.parametrize(
    ("kind", "content"), [("parquet", b"no parquet"), ("csv", b'text\n"a\n'), ("csv", b"\xff\xfe")]
)
def test_a_broken_table_is_named(kind: str, content: bytes, tmp_path: Path) -> None:
    file = tmp_path / f"d.{kind}"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=rf"{re.escape(str(file))} cannot be read as {kind}"):
        list(documents(DataConfig(kind=SourceKind(kind), path=str(file))))


@pytest.mark.parametrize("kind", ["parquet", "csv", "jsonl"])
def test_a_folder_without_such_files_is_refused(kind: str, tmp_path: Path) -> None:
    (tmp_path / "note.md").write_text("x")
    with pytest.raises(ValueError, match=rf"no document in {re.escape(str(tmp_path))}: no file there ends in \.{kind}"):
        documents(DataConfig(kind=SourceKind(kind), path=str(tmp_path)))


def test_a_null_in_a_table_is_named_by_its_row(tmp_path: Path) -> None:
    import pandas

    pandas.DataFrame({"text": ["a", None]}).to_parquet(tmp_path / "d.parquet")
    with pytest.raises(ValueError, match=r"d\.parquet, row 1: `text` is null"):
        list(documents(DataConfig(kind=SourceKind.parquet, path=str(tmp_path))))


@pytest.mark.parametrize("text", ["text\nHello, world\nfoo, bar\n", "id,text\n1,Hello, world\n", "id,text\n1\n"])
def test_a_csv_row_of_other_length_is_refused(tmp_path: Path, text: str) -> None:
    """pandas would take the first of too many cells for an index, and drop it without a word."""
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(ValueError, match=r"a\.csv cannot be read as csv: line 2 has \d cells and the header \d"):
        list(documents(DataConfig(kind=SourceKind.csv, path=str(tmp_path / "a.csv"))))


def test_an_empty_table_in_a_folder_is_no_document(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("")
    (tmp_path / "b.csv").write_text('text\n"a, b"\n')
    found = list(documents(DataConfig(kind=SourceKind.csv, path=str(tmp_path))))
    assert found == [{"text": "a, b"}]
