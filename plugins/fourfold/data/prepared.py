"""Tokenised and packed once, then memory-mapped by every rank and every later run with the same data and tokenizer.

Each source is prepared by itself and kept in `cache_dir/data/<key>/` (cache.py, work.py), that of a mixture and that to
evaluate on too: changing one of them leaves the others. Every rank calls `prepare`; no process group takes part.
"""

import json
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from ..schema import DataConfig, MixtureSource, TrainConfig
from .huggingface import quiet
from .mixture import MixtureRows, rows_per_epoch, source_config
from .rows import RowSet
from .stats import PackStats, total
from .stream import StreamRowSet
from .vocabulary import check_vocabulary
from .work import PreparedRows, Work

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer


@dataclass(frozen=True)
class PreparedSource:
    """One source of the training data."""

    path: str
    stats: PackStats
    rows_per_epoch: int


@dataclass
class Prepared:
    """Rows to train on and, if there are any, rows to evaluate on. A stream counts along, in `train.stats`."""

    train: RowSet | MixtureRows | StreamRowSet
    stats: PackStats  # of all sources together, each once
    eval: RowSet | None = None
    eval_stats: PackStats | None = None
    digest: str | None = None  # changes with the content of the training rows, wherever they lie; None: a stream
    sources: tuple[PreparedSource, ...] = ()  # of a stream: none
    eval_digest: str | None = None  # of the rows to evaluate on


def prepare_for(config: TrainConfig, *, tokenizer: "Tokenizer", vocab_size: int, show_progress: bool) -> Prepared:
    """`prepare` with the settings of a run. ValueError also if the tokenizer has ids that the model has not."""
    check_vocabulary(tokenizer, vocab_size, model_path=config.model.path)
    return prepare(
        config.data,
        tokenizer=tokenizer,
        seq_len=config.seq_len,
        seed=config.seed,
        cache_dir=config.cache_dir,
        show_progress=show_progress,
    )


def prepare(
    data: DataConfig, *, tokenizer: "Tokenizer", seq_len: int, seed: int, cache_dir: str | Path, show_progress: bool
) -> Prepared:
    """Packed rows of `seq_len` tokens, the same on every rank. A second call with the same arguments reads no source.

    ValueError: what `documents` and `encode` refuse; no target in a whole source; as many documents held out as there
    are; a `cache_dir` that cannot be written.
    """
    work = partial(Work, tokenizer=tokenizer, seq_len=seq_len, seed=seed, show_progress=show_progress)
    root = Path(cache_dir).expanduser().absolute() / "data"
    configs = [data] if data.sources is None else [source_config(data, source) for source in data.sources]
    works = [work(data=config, where=f"data.path={config.path}") for config in configs]
    with quiet(show_progress=show_progress):
        parts = [one.prepared(root) for one in works]
        evaluation = parts[0].get("eval")
        if data.eval_path is not None:
            own = replace(data, path=data.eval_path, sources=None, eval_path=None, streaming=False, max_documents=None)
            evaluation = work(data=own, where=f"data.eval_path={data.eval_path}").prepared(root)["train"]
        made = _stream(works, data.sources) if data.streaming else _stored(works, parts, data.sources)
    if evaluation is not None:
        made.eval, made.eval_stats, made.eval_digest = evaluation.rows, evaluation.stats, evaluation.digest
    return made


def _stream(works: list[Work], sources: list[MixtureSource] | None) -> Prepared:
    weights = [1.0 if source.weight is None else source.weight for source in sources] if sources else [1.0]
    stream = StreamRowSet([one.stream for one in works], settings=works[0].settings, weights=weights)
    return Prepared(stream, stream.stats)


def _stored(works: list[Work], parts: list[dict[str, PreparedRows]], sources: list[MixtureSource] | None) -> Prepared:
    train = [part["train"] for part in parts]
    sizes = [len(one.rows) for one in train]
    counts = rows_per_epoch(sizes, sources) if sources else sizes
    about = [
        PreparedSource(str(one.data.path), made.stats, rows)
        for one, made, rows in zip(works, train, counts, strict=True)
    ]
    rows: RowSet | MixtureRows = train[0].rows
    digest = train[0].digest
    if sources:
        rows = MixtureRows([one.rows for one in train], counts=counts)
        digest = _together([one.digest for one in train], counts=counts)
    return Prepared(rows, total(one.stats for one in train), digest=digest, sources=tuple(about))


def _together(digests: list[str], *, counts: list[int]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(list(zip(digests, counts, strict=True))).encode())
