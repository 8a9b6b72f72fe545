"""Where documents come from: text trees, JSON lines, and whatever `datasets` reads, in one order on every machine.

A document is {"text": str} or {"messages": [{"role": ..., "content": ...}, ...]}. A row that has both gives its
messages; empty ones are passed over. Everything is read lazily: no source is ever held as a whole.
"""

import itertools
import json
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ..schema import DataConfig, SourceKind

Document = dict[str, Any]

STDLIB = "stdlib"
# Folders below the standard library that are not its sources, or that some distributions leave out.
NOT_STDLIB = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})


def documents(data: DataConfig, *, path: str | None = None) -> Iterable[Document]:
    """The documents of `path` (default: `data.path`, of which at most `max_documents`) in a deterministic order.

    ValueError at the call: the path does not exist. ValueError while reading: a broken line (file and line number),
    a row of neither column, a source without a single document.
    """
    limit = data.max_documents if path is None else None
    path = data.path if path is None else path
    kind = SourceKind(data.kind)
    if kind is SourceKind.text:
        found = _texts(text_files(data, path=path), where=_where(data, path))
    elif kind is SourceKind.jsonl:
        found = _json_lines(jsonl_files(path), data=data)
    else:
        from .huggingface import open_dataset

        found = _rows(open_dataset(data, path=path), data=data, path=path)
    return _some(itertools.islice(found, limit), where=_where(data, path))


def local_path(path: str) -> Path:
    """An absolute path, from the working directory; ValueError with the path tried when nothing is there."""
    tried = Path(path).expanduser().absolute()
    if not tried.exists():
        raise ValueError(f"data path {path!r} does not exist (tried {tried}): set data.path or data.eval_path")
    return tried


def text_files(data: DataConfig, *, path: str) -> list[Path]:
    """Files of a kind=text source, sorted by their path below the root; hidden files and folders are left out."""
    if path == STDLIB:
        root, hidden = Path(sysconfig.get_path("stdlib")), NOT_STDLIB
    else:
        root, hidden = local_path(path), frozenset[str]()
    if root.is_file():
        return [root]
    below = sorted({file.relative_to(root) for file in _matching(root, data.pattern, hidden=hidden)}, key=_parts)
    below = [name for name in below if not any(_left_out(part, hidden) for part in name.parts)]
    if path == STDLIB:
        below = [name for name in below if name.suffix == ".py"]
    return [root / name for name in below if (root / name).is_file()]


def _parts(path: Path) -> tuple[str, ...]:
    return path.parts


def _left_out(name: str, hidden: Iterable[str]) -> bool:
    return name.startswith(".") or name in hidden


def _matching(root: Path, pattern: str, *, hidden: Iterable[str]) -> Iterator[Path]:
    """`root.glob(pattern)`, without descending into folders at the top that are left out anyway (site-packages, .git)."""
    if not pattern.startswith("**/"):
        yield from root.glob(pattern)
        return
    yield from root.glob(pattern.removeprefix("**/"))
    for top in root.iterdir():
        if top.is_dir() and not top.is_symlink() and not _left_out(top.name, hidden):
            yield from top.glob(pattern)


def jsonl_files(path: str) -> list[Path]:
    """The file itself, or every *.jsonl below a folder, sorted by path."""
    root = local_path(path)
    if root.is_file():
        return [root]
    return sorted(root.rglob("*.jsonl"), key=lambda file: file.relative_to(root).parts)


def _where(data: DataConfig, path: str) -> str:
    kind = SourceKind(data.kind)
    if kind is SourceKind.text and path == STDLIB:
        return f"{sysconfig.get_path('stdlib')} (data.pattern={data.pattern})"
    if kind is SourceKind.text:
        return f"{local_path(path)} (data.pattern={data.pattern})"
    return f"{Path(path).expanduser().absolute()}" if kind is SourceKind.jsonl else f"{path} (data.split={data.split})"


def _some(found: Iterator[Document], *, where: str) -> Iterator[Document]:
    """`found` unchanged; ValueError when it ends without having given anything."""
    empty = True
    for document in found:
        empty = False
        yield document
    if empty:
        raise ValueError(f"no document in {where}: nothing there, or only empty or unreadable ones")


def _texts(files: list[Path], *, where: str) -> Iterator[Document]:
    if not files:
        raise ValueError(f"no file matches {where}")
    for file in files:
        try:
            text = file.read_bytes().decode("utf-8-sig")
        except UnicodeDecodeError:
            continue
        # A NUL is valid UTF-8 but never text: UTF-16, archives and the like that happen to decode.
        if text.strip() and "\0" not in text:
            yield {"text": text}


def _json_lines(files: list[Path], *, data: DataConfig) -> Iterator[Document]:
    for file in files:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except ValueError as error:  # not JSON, or not UTF-8
                    raise ValueError(f"{file}:{number}: not one JSON value a line: {error}") from None
                yield from _document(row, data=data, where=f"{file}:{number}")


def _rows(rows: Iterable[Any], *, data: DataConfig, path: str) -> Iterator[Document]:
    for number, row in enumerate(rows):
        yield from _document(row, data=data, where=f"{path}, row {number}")


def _document(row: Any, *, data: DataConfig, where: str) -> Iterator[Document]:
    """The document of one row, or nothing when it is empty. `where` names the row in errors."""
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected an object with {_columns(data)}, found {type(row).__name__}")
    messages, text = row.get(data.messages_column), row.get(data.text_column)
    if messages is not None:
        yield from _chat(messages, column=data.messages_column, where=where)
    elif isinstance(text, str):
        _refuse_broken_text(text, where=where)
        if text.strip():
            yield {"text": text}
    elif text is not None:
        raise ValueError(f"{where}: `{data.text_column}` is {type(text).__name__}, expected text")
    elif data.messages_column not in row and data.text_column not in row:
        raise ValueError(f"{where}: no {_columns(data)}; its columns are {sorted(row)}")


def _refuse_broken_text(text: str, *, where: str) -> None:
    """JSON can spell half a surrogate pair, which is no text that a tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where}: character {error.start} is half of a surrogate pair, no text") from None


def _columns(data: DataConfig) -> str:
    return f"`{data.text_column}` (data.text_column) or `{data.messages_column}` (data.messages_column)"


def _chat(messages: Any, *, column: str, where: str) -> Iterator[Document]:
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError(f"{where}: `{column}` must be a list of objects with `role` and `content`")
    for message in messages:
        if not isinstance(message.get("role"), str):
            raise ValueError(f"{where}: a message of `{column}` has no `role`; its keys are {sorted(message)}")
        if not isinstance(message.get("content"), str) and not message.get("tool_calls"):
            found = type(message["content"]).__name__ if "content" in message else "missing"
            raise ValueError(f"{where}: the `content` of a {message['role']} message is {found}, expected text")
        _refuse_broken_text(message.get("content") or "", where=where)
    if messages:
        yield {"messages": messages}
