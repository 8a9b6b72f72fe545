"""One row of a source to its document, by the columns that it has.

The first of these that a row has (null counts as not there): messages, prompt and completion, input_ids, text. A row of
none of them is refused with its place; one that has a column with nothing in it is a blank document.
"""

from typing import Any

from ..schema import DataConfig
from .document import Document, blank


def to_document(row: Any, *, data: DataConfig, where: str) -> Document:
    """`where` names the row (file:line, or source and row number). ValueError: no column, null, or of another type."""
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected an object with {_columns(data)}, found {type(row).__name__}")
    if row.get(data.messages_column) is not None:
        return _chat(row[data.messages_column], column=data.messages_column, where=where)
    if row.get(data.prompt_column) is not None and row.get(data.completion_column) is not None:
        return _answer(row, data=data, where=where)
    if row.get(data.input_ids_column) is not None:
        return _tokens(row, data=data, where=where)
    if row.get(data.text_column) is not None:
        text = _text(row, column=data.text_column, where=where)
        return {"text": text} if text.strip() else blank()
    raise ValueError(f"{where}: {_missing(row, data=data)}")


def _missing(row: dict[str, Any], *, data: DataConfig) -> str:
    pair = (data.prompt_column, data.completion_column)
    known = (data.messages_column, *pair, data.input_ids_column, data.text_column)
    null = [f"`{name}`" for name in known if name in row and row[name] is None]
    if null:
        return f"{' and '.join(null)} {'is' if len(null) == 1 else 'are'} null: take the row out, or fill it"
    half = [name for name in pair if name in row]
    if half:
        other = next(name for name in pair if name not in row)
        return f"`{half[0]}` without `{other}` (data.prompt_column, data.completion_column)"
    return f"no {_columns(data)}; its columns are {sorted(map(str, row))}"


def _columns(data: DataConfig) -> str:
    return (
        f"`{data.text_column}` (data.text_column), `{data.messages_column}` (data.messages_column), "
        f"`{data.prompt_column}` with `{data.completion_column}` (data.prompt_column, data.completion_column) or "
        f"`{data.input_ids_column}` (data.input_ids_column)"
    )


def _text(row: dict[str, Any], *, column: str, where: str) -> str:
    text = row[column]
    if not isinstance(text, str):
        raise ValueError(f"{where}: `{column}` is {type(text).__name__}, expected text")
    _refuse_broken_text(text, where=where)
    return text


def _refuse_broken_text(text: str, *, where: str) -> None:
    """JSON can spell half a surrogate pair, which is no text that a tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where}: character {error.start} is half of a surrogate pair, no text") from None


def _answer(row: dict[str, Any], *, data: DataConfig, where: str) -> Document:
    prompt = _text(row, column=data.prompt_column, where=where)
    completion = _text(row, column=data.completion_column, where=where)
    return {"prompt": prompt, "completion": completion} if (prompt + completion).strip() else blank()


def _tokens(row: dict[str, Any], *, data: DataConfig, where: str) -> Document:
    ids, labels = row[data.input_ids_column], row.get(data.labels_column)
    for column, found in ((data.input_ids_column, ids), (data.labels_column, labels)):
        if found is not None and not isinstance(found, list):
            raise ValueError(f"{where}: `{column}` is {type(found).__name__}, expected a list of integers")
    return {"input_ids": ids, "labels": labels, "where": where} if ids else blank()


def _chat(messages: Any, *, column: str, where: str) -> Document:
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError(f"{where}: `{column}` must be a list of objects with `role` and `content`")
    for message in messages:
        if not isinstance(message.get("role"), str):
            raise ValueError(f"{where}: a message of `{column}` has no `role`; its keys are {sorted(message)}")
        if not isinstance(message.get("content"), str) and not message.get("tool_calls"):
            found = type(message["content"]).__name__ if "content" in message else "missing"
            raise ValueError(f"{where}: the `content` of a {message['role']} message is {found}, expected text")
        _refuse_broken_text(message.get("content") or "", where=where)
    return {"messages": messages} if messages else blank()
