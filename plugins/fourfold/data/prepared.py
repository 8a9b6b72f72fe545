"""Tokenised and packed once, then memory-mapped by every rank and every later run with the same data and tokenizer.

`cache_dir/data/<key>/` holds train/ and eval/ (rows.py) and prepared.json. Every rank calls `prepare`: the first one
to get the file lock does the work in a folder beside, which is renamed when it is whole; the others wait for the lock
and open it, or refuse with the first one's reason (<key>.refused) instead of finding it out again one by one. No
process group takes part, so that no collective can time out meanwhile.
"""

import itertools
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from filelock import FileLock

from ..schema import DataConfig
from .fingerprint import cache_key
from .huggingface import quiet
from .pack import PackStats, pack
from .parallel import encode_parallel
from .rows import RowSet, StreamRowSet, check_targets, write_rows
from .sources import Document, documents
from .tokens import Encoded, encode_all, pad_id

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

SUMMARY = "prepared.json"
HELD_OUT = 0x48454C44  # second word of the seed of the choice: no epoch's permutation (loader.py) shares its stream


@dataclass
class Prepared:
    """Rows to train on and, if there are any, rows to evaluate on. A stream counts along, in `train.stats`."""

    train: RowSet | StreamRowSet
    stats: PackStats
    eval: RowSet | None = None
    eval_stats: PackStats | None = None
    digest: str | None = None


def prepare(
    data: DataConfig, *, tokenizer: "Tokenizer", seq_len: int, seed: int, cache_dir: str | Path, show_progress: bool
) -> Prepared:
    """Packed rows of `seq_len` tokens, the same on every rank. A second call with the same arguments reads no source.

    ValueError: what `documents` and `encode` refuse; no target in the whole set; as many documents held out as there
    are; a `cache_dir` that cannot be written.
    """
    _check(data)
    work = _Work(data, tokenizer=tokenizer, seq_len=seq_len, seed=seed, show_progress=show_progress)
    with quiet(show_progress=show_progress):
        folder = work.cached(Path(cache_dir).expanduser().absolute() / "data") if work.parts else None
        stats = {part: PackStats(**counts) for part, counts in _summary(folder).items()}
        evaluation = RowSet(folder / "eval") if folder and "eval" in stats else None
        if "train" not in work.parts:
            stream = StreamRowSet(work.stream, seq_len=seq_len, pad_id=pad_id(tokenizer))
            return Prepared(stream, stream.stats, evaluation, stats.get("eval"))
        assert folder is not None
        return Prepared(RowSet(folder / "train"), stats["train"], evaluation, stats.get("eval"))


def _check(data: DataConfig) -> None:
    if data.eval_path is not None and data.eval_documents:
        raise ValueError(
            f"data.eval_path={data.eval_path} and data.eval_documents={data.eval_documents} exclude each other: "
            "unset one of them"
        )
    for name in ("eval_documents", "max_documents", "num_proc"):
        least = 0 if name == "eval_documents" else 1
        value = getattr(data, name)
        if value is not None and value < least:
            raise ValueError(f"data.{name}={value}: use {least} or more")


def _summary(folder: Path | None) -> dict[str, dict[str, int]]:
    return json.loads((folder / SUMMARY).read_text()) if folder else {}


def _stamp(file: Path) -> int | None:
    return file.stat().st_mtime_ns if file.exists() else None


class _Work:
    """One preparation: `parts` says which of train and eval are rows on disk (a stream's own rows are not)."""

    def __init__(
        self, data: DataConfig, *, tokenizer: "Tokenizer", seq_len: int, seed: int, show_progress: bool
    ) -> None:
        self.data = data
        self.tokenizer = tokenizer
        self.seq_len = seq_len
        self.seed = seed
        self.show_progress = show_progress
        has_eval = data.eval_path is not None or data.eval_documents > 0
        self.parts = (["train"] if not data.streaming else []) + (["eval"] if has_eval else [])

    def cached(self, root: Path) -> Path:
        """The folder of these rows below `root`, made if it is not there: it appears whole or not at all."""
        folder = root / cache_key(self.data, tokenizer=self.tokenizer, seq_len=self.seq_len, seed=self.seed)
        if folder.is_dir():  # no lock, so that a cache may be read-only
            return folder
        refused = folder.with_name(f"{folder.name}.refused")
        try:
            root.mkdir(parents=True, exist_ok=True)
            before = _stamp(refused)
            lock = FileLock(f"{folder}.lock")
            lock.acquire()
        except OSError as error:
            raise ValueError(f"cache_dir={root.parent} cannot be written: {error}") from error
        try:
            if _stamp(refused) != before and not folder.is_dir():  # by another rank, while this one waited
                raise ValueError(refused.read_text())
            if not folder.is_dir():
                self._make(folder)
        except ValueError as error:
            refused.write_text(str(error))
            raise
        finally:
            lock.release()
        return folder

    def stream(self) -> Iterator[Encoded]:
        """Tokens of a stream, one pass; what is held out for evaluation are its first documents."""
        rest = itertools.islice(documents(self.data), self.data.eval_documents, None)
        return encode_all(rest, tokenizer=self.tokenizer)

    def _make(self, folder: Path) -> None:
        """Under the lock: whatever a killed process left of this folder is nobody's any more."""
        for left in folder.parent.glob(f"{folder.name}.tmp-*"):
            shutil.rmtree(left)
        scratch = folder.with_name(f"{folder.name}.tmp-{os.getpid()}")
        try:
            summary = {part: asdict(self._pack(found, scratch / part)) for part, found in self._sources()}
            (scratch / SUMMARY).write_text(json.dumps(summary, indent=2))
            os.rename(scratch, folder)
            folder.with_name(f"{folder.name}.refused").unlink(missing_ok=True)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _sources(self) -> Iterator[tuple[str, Iterable[Document]]]:
        """The documents of each part, in the order in which they have to be read."""
        data, held_out = self.data, list[Document]()
        if "train" in self.parts:
            yield "train", self._without(held_out) if data.eval_documents else documents(data)
        elif data.eval_documents:
            held_out.extend(itertools.islice(documents(data), data.eval_documents))
        if "eval" in self.parts:
            yield "eval", held_out if data.eval_path is None else documents(data, path=data.eval_path)

    def _without(self, held_out: list[Document]) -> Iterator[Document]:
        """Documents to train on; the others, `eval_documents` chosen by seed, are put into `held_out` on the way."""
        count, wanted = sum(1 for _ in documents(self.data)), self.data.eval_documents
        if wanted >= count:
            raise ValueError(
                f"data.eval_documents={wanted} of {count} documents would leave none to train on: "
                f"use at most {count - 1}"
            )
        random = np.random.Generator(np.random.PCG64([self.seed, HELD_OUT]))
        chosen = set(random.choice(count, wanted, replace=False).tolist())
        for number, document in enumerate(documents(self.data)):
            if number in chosen:
                held_out.append(document)
            else:
                yield document

    def _pack(self, found: Iterable[Document], folder: Path) -> PackStats:
        stats = PackStats()
        encoded = self._encode(self._shown(found, part=folder.name))
        rows = pack(encoded, seq_len=self.seq_len, pad_id=pad_id(self.tokenizer), stats=stats)
        write_rows(rows, folder, seq_len=self.seq_len)
        check_targets(stats, where=self._where(folder.name))
        return stats

    def _where(self, part: str) -> str:
        if part == "eval" and self.data.eval_path is not None:
            return f"data.eval_path={self.data.eval_path}"
        return f"data.path={self.data.path}, {part} part"

    def _encode(self, found: Iterable[Document]) -> Iterator[Encoded]:
        if (self.data.num_proc or 1) > 1:
            return encode_parallel(found, tokenizer=self.tokenizer, num_proc=self.data.num_proc or 1)
        return encode_all(found, tokenizer=self.tokenizer)

    def _shown(self, found: Iterable[Document], *, part: str) -> Iterable[Document]:
        if not self.show_progress:
            return found
        from tqdm import tqdm

        return tqdm(found, desc=f"tokenise and pack ({part})", unit=" documents", leave=False)
