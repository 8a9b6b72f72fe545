"""One source, tokenised and packed: its rows on disk, or its tokens as a stream.

The folder holds train/ and eval/ (rows.py) and prepared.json with their counts.
"""

import itertools
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..schema import DataConfig, LongDocuments, Packing
from .cache import cached
from .document import Document, Encoded, is_blank
from .fingerprint import cache_key
from .pack import PackSettings, pack
from .parallel import encode_parallel
from .rows import RowSet, check_targets, write_rows
from .sources import documents
from .stats import PackStats
from .tokens import encode_all
from .vocabulary import pad_id

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

SUMMARY = "prepared.json"
IN_A_FILE = 20.0  # seconds between two words on progress where no terminal redraws them
HELD_OUT = 0x48454C44  # second word of the seed of the choice: no epoch's permutation (rows.py) shares its stream


@dataclass(frozen=True)
class PreparedRows:
    rows: RowSet
    stats: PackStats
    digest: str  # of the rows' content


@dataclass(frozen=True, kw_only=True)
class Work:
    """What the rows are made of. `where` names the source in errors."""

    data: DataConfig
    where: str
    tokenizer: "Tokenizer"
    seq_len: int
    seed: int
    show_progress: bool

    @property
    def settings(self) -> PackSettings:
        return PackSettings(
            seq_len=self.seq_len,
            packing=Packing(self.data.packing),
            long_documents=LongDocuments(self.data.long_documents),
            pad_id=pad_id(self.tokenizer),
        )

    def prepared(self, root: Path) -> dict[str, PreparedRows]:
        """`train` (not of a stream) and `eval` (if documents are held out), from the cache below `root` or made now."""
        if self.data.streaming and not self.data.eval_documents:
            return {}
        key = cache_key(self.data, tokenizer=self.tokenizer, seq_len=self.seq_len, seed=self.seed)
        folder = cached(root, key=key, make=self._make)
        summary = json.loads((folder / SUMMARY).read_text())
        found = {
            part: PreparedRows(RowSet(folder / part), PackStats(**about["stats"]), about["digest"])
            for part, about in summary.items()
        }
        for part, one in found.items():
            if len(one.rows) != one.stats.rows:
                raise ValueError(f"{folder / part} has {len(one.rows)} of {one.stats.rows} rows: remove {folder}")
        return found

    def stream(self, skipped: int) -> Iterator[Encoded]:
        """Tokens of a stream from a document on, one pass; what is held out for evaluation are its first documents."""
        rest = _after(documents(self.data), self.data.eval_documents)
        return encode_all(itertools.islice(rest, skipped, None), tokenizer=self.tokenizer)

    def _make(self, folder: Path) -> None:
        summary = {part: self._pack(found, folder / part) for part, found in self._parts()}
        (folder / SUMMARY).write_text(json.dumps(summary, indent=2))

    def _parts(self) -> Iterator[tuple[str, Iterable[Document]]]:
        """The documents of each part, in the order in which they have to be read."""
        wanted, held_out = self.data.eval_documents, list[Document]()
        if self.data.streaming:
            held_out.extend(itertools.islice(itertools.filterfalse(is_blank, documents(self.data)), wanted))
        else:
            yield "train", self._without(held_out) if wanted else documents(self.data)
        if wanted:
            yield "eval", held_out

    def _without(self, held_out: list[Document]) -> Iterator[Document]:
        """Documents to train on; the others, `eval_documents` chosen by seed, are put into `held_out` on the way."""
        count, wanted = sum(not is_blank(one) for one in documents(self.data)), self.data.eval_documents
        if wanted >= count:
            raise ValueError(
                f"data.eval_documents={wanted} of {count} documents would leave none to train on: "
                f"use at most {count - 1}"
            )
        random = np.random.Generator(np.random.PCG64([self.seed, HELD_OUT]))
        chosen = set(random.choice(count, wanted, replace=False).tolist())
        numbers = itertools.count()
        for document in documents(self.data):
            if not is_blank(document) and next(numbers) in chosen:
                held_out.append(document)
            else:
                yield document

    def _pack(self, found: Iterable[Document], folder: Path) -> dict[str, Any]:
        stats = PackStats()
        part = folder.name
        rows = pack(self._encode(self._shown(found, part=part)), settings=self.settings, stats=stats)
        digest = write_rows(rows, folder, seq_len=self.seq_len)
        check_targets(stats, where=self._name(part))
        return {"stats": asdict(stats), "digest": digest}

    def _encode(self, found: Iterable[Document]) -> Iterator[Encoded]:
        workers = self.data.num_proc or 1
        encode = encode_all if workers == 1 else partial(encode_parallel, num_proc=workers)
        return encode(found, tokenizer=self.tokenizer)

    def _shown(self, found: Iterable[Document], *, part: str) -> Iterable[Document]:
        if not self.show_progress:
            return found
        from tqdm import tqdm

        often = {} if sys.stderr.isatty() else {"delay": IN_A_FILE, "mininterval": IN_A_FILE}
        return tqdm(found, desc=f"tokenise and pack {self._name(part)}", unit=" documents", leave=False, **often)

    def _name(self, part: str) -> str:
        return self.where if part == "train" else f"{self.where}, held out"


def _after(found: Iterable[Document], count: int) -> Iterator[Document]:
    """What follows the first `count` documents that are not blank."""
    taken = 0
    for document in found:
        if taken == count:
            yield document
        taken += taken < count and not is_blank(document)
