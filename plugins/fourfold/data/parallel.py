"""Tokenising in several processes, by datasets.map."""

import json
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from .huggingface import quiet
from .sources import Document
from .tokens import BATCH, Encoded, encode_all

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

CHUNK = 1 << 25  # characters in hand at a time, for each process


def encode_parallel(documents: Iterable[Document], *, tokenizer: "Tokenizer", num_proc: int) -> Iterator[Encoded]:
    """`encode_all` with `num_proc` processes: same results, same order; holds num_proc x 32 MiB of text at most."""
    for texts in _chunks(documents, size=CHUNK * num_proc):
        yield from _map(texts, tokenizer=tokenizer, num_proc=min(num_proc, len(texts)))


def _chunks(documents: Iterable[Document], *, size: int) -> Iterator[list[str]]:
    """Documents as JSON (messages have no common Arrow type), `size` characters or a little more together."""
    chunk: list[str] = []
    held = 0
    for document in documents:
        chunk.append(json.dumps(document, ensure_ascii=False, default=str))
        held += len(chunk[-1])
        if held >= size:
            yield chunk
            chunk, held = [], 0
    if chunk:
        yield chunk


def _map(texts: list[str], *, tokenizer: "Tokenizer", num_proc: int) -> Iterator[Encoded]:
    from datasets import Dataset

    with quiet(show_progress=False):
        try:
            encoded = Dataset.from_dict({"document": texts}).map(
                _encode_batch,
                batched=True,
                batch_size=BATCH,
                num_proc=num_proc,
                remove_columns=["document"],
                fn_kwargs={"tokenizer": tokenizer},
                keep_in_memory=True,
                new_fingerprint="chunk",  # not cached, so that the tokenizer need not be hashed for each chunk
            )
        except ValueError as error:  # raised by a worker, told by the library
            raise ValueError(str(error)) from error
    for row in encoded:
        yield Encoded(row["input_ids"], row["is_target"])


def _encode_batch(batch: dict[str, list[str]], *, tokenizer: "Tokenizer") -> dict[str, list[Any]]:
    encoded = list(encode_all(map(json.loads, batch["document"]), tokenizer=tokenizer))
    return {"input_ids": [one.input_ids for one in encoded], "is_target": [one.is_target for one in encoded]}
