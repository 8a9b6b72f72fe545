"""Where documents come from: text trees, JSON lines, Parquet, CSV and whatever else `datasets` reads.

The order is the same on every machine. Everything is read lazily: no source is ever held as a whole. What is blank comes
as a blank document, so that it can be counted.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ..schema import DataConfig, SourceKind
from .columns import to_document
from .document import Document, blank, is_blank
from .files import STDLIB, source_files


def documents(data: DataConfig, *, path: str | None = None) -> Iterable[Document]:
    """The documents of `path` (default: `data.path`, of which at most `max_documents` that are not blank).

    ValueError at the call: the path does not exist, or holds no such file. ValueError while reading: what no row can be
    (its file and line, or its number), a source with nothing but blank documents.
    """
    limit = data.max_documents if path is None else None
    path = data.path if path is None else path
    assert path is not None
    return _some(_limited(_read(data, path=path), limit=limit), where=_where(data, path))


def _read(data: DataConfig, *, path: str) -> Iterator[Document]:
    from .huggingface import open_dataset, read_table

    kind = SourceKind(data.kind)
    if kind is SourceKind.datasets:
        return _rows(open_dataset(data, path=path), data=data, where=path)
    files = source_files(data, path=path)
    if kind is SourceKind.text:
        return _texts(files)
    if kind is SourceKind.jsonl:
        return _json_lines(files, data=data)
    return (found for file in files for found in _rows(read_table(file, data=data), data=data, where=str(file)))


def _where(data: DataConfig, path: str) -> str:
    kind = SourceKind(data.kind)
    if kind is SourceKind.datasets:
        return f"{path} (data.split={data.split})"
    place = path if path == STDLIB else str(Path(path).expanduser().absolute())
    return f"{place} (data.pattern={data.pattern})" if kind is SourceKind.text else place


def _limited(found: Iterator[Document], *, limit: int | None) -> Iterator[Document]:
    taken = 0
    for document in found:
        yield document
        taken += not is_blank(document)
        if taken == limit:
            return


def _some(found: Iterator[Document], *, where: str) -> Iterator[Document]:
    """`found` unchanged; ValueError when it ends without having given anything but blank documents."""
    empty, count = True, 0
    for document in found:
        empty, count = empty and is_blank(document), count + 1
        yield document
    if empty:
        read = f"all {count} that were read are empty, white space or unreadable" if count else "nothing is there"
        raise ValueError(f"no document in {where}: {read}")


def _texts(files: list[Path]) -> Iterator[Document]:
    for file in files:
        try:
            text = file.read_bytes().decode("utf-8-sig")
        except UnicodeDecodeError:
            yield blank()
            continue
        # A NUL is valid UTF-8 but never text: UTF-16, archives and the like that happen to decode.
        yield {"text": text} if text.strip() and "\0" not in text else blank()


def _json_lines(files: list[Path], *, data: DataConfig) -> Iterator[Document]:
    for file in files:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except ValueError as error:  # not JSON, or not UTF-8
                    reason = error.msg if isinstance(error, json.JSONDecodeError) else error
                    raise ValueError(f"{file}:{number}: not one JSON value a line: {reason}") from None
                yield to_document(row, data=data, where=f"{file}:{number}")


def _rows(rows: Iterable[Any], *, data: DataConfig, where: str) -> Iterator[Document]:
    for number, row in enumerate(rows):
        yield to_document(row, data=data, where=f"{where}, row {number}")
