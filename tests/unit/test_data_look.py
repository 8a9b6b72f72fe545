"""`fourfold data`: what it counts and shows, on a terminal and in a file."""

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fourfold.cli import data_command
from fourfold.data import look
from fourfold.data.pack import PackSettings, pack
from fourfold.data.row_text import row_text
from fourfold.data.tokens import encode
from tests.unit.data_words import MARKED, WORDS, chat, tokenizer


def lines(*documents: dict[str, Any], seq_len: int = 24, **options: Any) -> list[str]:
    words = tokenizer(MARKED)
    [row] = pack([encode(one, tokenizer=words) for one in documents], settings=PackSettings(seq_len=seq_len))
    return [text.plain for text in row_text(row, tokenizer=words, **{"full": True, "marks": True, **options})]


def test_targets_stand_apart_from_what_is_only_read() -> None:
    assert lines({"messages": chat("u:a b", "a:c d")}, {"text": "e"}) == [
        "── document 0: 9 tokens, 3 targets",
        "⟦<s> <u> a b </s> <a>⟧ c d </s>",
        "── document 1: 3 tokens, 2 targets",
        "⟦<s>⟧ e </s>",
        "── 12 padded",
    ]


def test_on_a_terminal_colours_say_it() -> None:
    found = lines({"messages": chat("u:a", "a:c")}, marks=False)
    assert found[1] == "<s> <u> a </s> <a> c </s>"
    words = tokenizer(MARKED)
    [row] = pack([encode({"messages": chat("u:a", "a:c")}, tokenizer=words)], settings=PackSettings(seq_len=8))
    [_, text, _] = row_text(row, tokenizer=words, full=True, marks=False)
    assert [(text.plain[span.start : span.end], span.style) for span in text.spans] == [
        ("<s> <u> a </s> <a>", "dim"),
        (" c </s>", "green"),
    ]


def test_long_rows_are_elided_in_the_middle() -> None:
    long = {"text": "a " * 400 + "b"}
    [_, text, _] = lines(long, seq_len=500, full=False)
    assert len(text) < 500
    assert text.startswith("⟦<s>⟧ a a")
    assert "characters …" in text
    assert text.endswith("a b </s>")
    many = [{"text": WORDS[6 + number % 7]} for number in range(20)]
    found = lines(*many, seq_len=60, full=False)
    assert [line for line in found if "documents …" in line] == ["… 14 documents …"]
    assert "── document 19: 3 tokens, 2 targets" in found
    assert len([line for line in lines(*many, seq_len=60) if line.startswith("── document")]) == 20


def test_a_cut_document_says_that_it_goes_on() -> None:
    words = tokenizer()
    first, second = pack([encode({"text": "a b c d e"}, tokenizer=words)], settings=PackSettings(seq_len=4))
    headings = [next(row_text(row, tokenizer=words, full=True, marks=True)).plain for row in (first, second)]
    assert headings[0] == "── document 0: 4 tokens, 4 targets, goes on in another row"
    assert headings[1] == "── document 0: 3 tokens, 2 targets"


@pytest.fixture
def shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the command on a mixture; returns what it prints."""
    chats = [
        {"messages": [{"role": "user", "content": f"ask {i}"}, {"role": "assistant", "content": f"say {i}"}]}
        for i in range(9)
    ]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*chats, {"text": ""}]))
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("word " * 700)

    def run(*words: str, terminal: bool = False) -> str:
        out = io.StringIO()
        monkeypatch.setattr(look, "console", lambda: Console(file=out, width=100, force_terminal=terminal))
        monkeypatch.setattr("fourfold.log.console", lambda: Console(file=out, width=100))
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["fourfold"])
        with pytest.raises(SystemExit) as left:
            data_command(["task=quickstart", "cache_dir=cache", "data.max_documents=null", *words])
        assert left.value.code == 0
        return out.getvalue()

    return run


def test_the_command_shows_a_mixture(shown: Any) -> None:
    sources = "data.sources=[{path: chat.jsonl, kind: jsonl, weight: 1}, {path: notes, weight: 1}]"
    text = shown("--rows", "3", "data=text", "data.path=null", sources, "seq_len=64")
    for part in (
        "data of quickstart",
        "2 sources",
        "documents  11; left out: 1 empty; 1 spread over several rows",
        "best_fit",
        "50.0%",
        "tokens of a document",
        "█",
        "row 3: ",
        "⟦",
        "say",
    ):
        assert part in text, text
    assert "\x1b" not in text


def test_on_a_terminal_it_is_coloured(shown: Any) -> None:
    text = shown("data=jsonl", "data.path=chat.jsonl", "--rows", "1", terminal=True)
    assert "\x1b[32m" in text
    assert "⟦" not in text


def test_a_stream_is_counted_as_far_as_it_is_shown(shown: Any) -> None:
    text = shown("data=jsonl", "data.path=chat.jsonl", "data.streaming=true", "data.packing=none", "--rows", "2")
    assert "2 (of the stream so far)" in text


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        data_command(["--help"])
    assert left.value.code == 0
    assert "--full" in capsys.readouterr().out


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys; import fourfold.data.look; "
        "bad = [name for name in ('deepspeed', 'fourfold.train') if name in sys.modules]; assert not bad, bad"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
