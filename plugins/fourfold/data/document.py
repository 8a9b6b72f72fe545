"""What flows from a source to the rows: a document as it was read, and as tokens."""

from typing import Any, NamedTuple

Document = dict[str, Any]
"""One of
    {"text": str}
    {"messages": [{"role": ..., "content": ...}, ...]}
    {"prompt": str, "completion": str}
    {"input_ids": [int, ...], "labels": [int, ...] or None, "where": str}    `where` names the row in errors
"""


class Encoded(NamedTuple):
    """One document: `input_ids[n]` and, for each, whether it is to be predicted. A blank document has none."""

    input_ids: list[int]
    is_target: list[bool]


def blank() -> Document:
    """What was read where there is nothing to learn from: empty text, an unreadable file."""
    return {"text": ""}


def is_blank(document: Document) -> bool:
    return document.get("text") == ""
