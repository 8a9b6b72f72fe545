"""A packed row as text: documents one under the other, targets apart from what is only read.

A token is a target if the position before it has to predict it. On a terminal targets are green and the rest is dim;
elsewhere what is no target stands between the marks ⟦ and ⟧.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.text import Text

from .pack import Row
from .pieces import IGNORE

TARGET, MASKED = "green", "dim"
SHOWN = 400  # characters of a document that is elided
DOCUMENTS = 6  # of a row that is elided


def row_text(row: Row, *, tokenizer: Any, full: bool, marks: bool) -> Iterator[Text]:
    """A heading and the text of each document, and the padding; elided in the middle unless `full`."""
    documents = int(row["document_ids"].max()) + 1
    elided = range(0) if full or documents <= DOCUMENTS else range(DOCUMENTS - 2, documents - 2)
    for number in range(documents):
        if number in elided:
            if number == elided[0]:
                yield Text(f"… {len(elided)} documents …", style="italic")
            continue
        here = np.flatnonzero(row["document_ids"] == number)
        ids, labels = row["input_ids"][here], row["labels"][here]
        yield _heading(number, labels=labels)
        text = _text(ids, labels, tokenizer=tokenizer, marks=marks)
        yield text if full else _elided(text)
    padding = int((row["document_ids"] < 0).sum())
    if padding:
        yield Text(f"── {padding} padded", style=MASKED)


def _heading(number: int, *, labels: NDArray[np.int64]) -> Text:
    targets = int((labels != IGNORE).sum())
    goes_on = ", goes on in another row" if labels[-1] != IGNORE else ""
    return Text(f"── document {number}: {len(labels)} tokens, {targets} targets{goes_on}", style="cyan")


def _text(ids: NDArray[np.int64], labels: NDArray[np.int64], *, tokenizer: Any, marks: bool) -> Text:
    """Stretches of targets and of others, each as what it adds to the text before it."""
    is_target = np.concatenate([[False], labels[:-1] != IGNORE])
    borders = [0, *(np.flatnonzero(np.diff(is_target)) + 1).tolist(), len(ids)]
    text, before = Text(), ""
    for start, end in itertools.pairwise(borders):
        after = tokenizer.decode(ids[:end].tolist(), clean_up_tokenization_spaces=False)
        added = after[len(before) :]
        if is_target[start]:
            text.append(added, style=TARGET)
        else:
            text.append(f"⟦{added}⟧" if marks else added, style=MASKED)
        before = after
    return text


def _elided(text: Text) -> Text:
    if len(text) <= SHOWN + SHOWN // 4:
        return text
    head, tail = SHOWN * 2 // 3, SHOWN // 3
    gap = Text(f" … {len(text) - head - tail} characters … ", style="italic")
    return text[:head] + gap + text[len(text) - tail :]
