"""Documents that name themselves, and what is made of them: shared by tests of prepared data."""

import itertools
import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fourfold.data.mixture import MixtureRows
from fourfold.data.pack import COLUMNS
from fourfold.data.prepared import Prepared, prepare
from fourfold.data.rows import RowSet
from fourfold.data.stream import StreamRowSet
from fourfold.schema import DataConfig, Packing, SourceKind

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }} </s>{% endgeneration %}"
    "{% else %}{{ m.content }} {% endif %}{% endfor %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a number: word `7` is id 9."""
    words = ["<pad>", "</s>", *map(str, range(500))]
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["</s>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", chat_template=TEMPLATE
    )


def write_documents(file: Path, count: int, *, first: int = 0) -> DataConfig:
    """Document i says the number i, i % 3 + 2 times."""
    rows = [{"text": " ".join([str(i)] * (i % 3 + 2))} for i in range(first, first + count)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataConfig(kind=SourceKind.jsonl, path=str(file), packing=Packing.concat)


def make(data: DataConfig, tmp_path: Path, *, seq_len: int = 8, seed: int = 0, show: bool = False) -> Prepared:
    return prepare(
        data, tokenizer=tokenizer(), seq_len=seq_len, seed=seed, cache_dir=tmp_path / "cache", show_progress=show
    )


def all_rows(rows: RowSet | MixtureRows | StreamRowSet, *, first: int | None = None) -> list[dict[str, list[int]]]:
    found: Iterable[dict[str, np.ndarray]]
    found = rows if isinstance(rows, StreamRowSet) else map(rows.row, range(len(rows)))
    return [{name: row[name].tolist() for name in COLUMNS} for row in itertools.islice(found, first)]


def spoken(rows: RowSet | MixtureRows | StreamRowSet | None) -> set[int]:
    """The documents, by their number, that have tokens in these rows."""
    assert rows is not None
    return {token - 2 for row in all_rows(rows) for token in row["input_ids"]} - {-2, -1}
