"""What prepared rows depend on, as one key: the settings, the tokenizer's content, and the state of the sources."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..schema import DataConfig, SourceKind
from .files import source_files
from .huggingface import hub_fingerprint, local_files
from .mixture import source_config

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

FORMAT = 2  # of the rows and their counts: raise it whenever this folder would write other ones
BEGINNING = 1 << 16  # bytes
NOT_IN_ROWS = ("path", "sources", "eval_path", "num_proc")  # the paths are in the sources' states, made absolute


def cache_key(data: DataConfig, *, tokenizer: "Tokenizer", seq_len: int, seed: int) -> str:
    """sha256 in hex. Reads the state of the sources (paths, sizes, times) but none of their content.

    ValueError: a source that is not there.
    """
    settings = {name: value for name, value in asdict(data).items() if name not in NOT_IN_ROWS}
    return _sha256(
        {
            "format": FORMAT,
            "settings": settings,
            "seq_len": seq_len,
            "seed": seed if data.eval_documents and not data.streaming else None,
            "tokenizer": tokenizer_digest(tokenizer),
            "source": _state(data),
        }
    )


def stream_state(data: DataConfig) -> str:
    """Changes with the files of a stream: their names below the source, sizes and beginnings, wherever they lie."""
    configs = [data] if data.sources is None else [source_config(data, source) for source in data.sources]
    return _sha256([_beginnings(config) for config in configs])


def _beginnings(data: DataConfig) -> Any:
    path = data.path
    assert path is not None
    if SourceKind(data.kind) is SourceKind.datasets:
        files = local_files(path)
        if files is None:
            return [path, hub_fingerprint(data, path=path)]
    else:
        files = source_files(data, path=path)
    return [(file.name, file.stat().st_size, _beginning(file)) for file in files]


def _beginning(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.sha256(stream.read(BEGINNING)).hexdigest()


def tokenizer_digest(tokenizer: "Tokenizer") -> str:
    """sha256 of what decides about tokens: vocabulary and rules, chat template, special tokens."""
    return _sha256([type(tokenizer).__name__, _rules(tokenizer), tokenizer.chat_template, tokenizer.special_tokens_map])


def _rules(tokenizer: "Tokenizer") -> Any:
    if not tokenizer.is_fast:
        return [tokenizer.get_vocab(), repr(sorted(tokenizer.init_kwargs.items()))]
    rules = json.loads(tokenizer.backend_tokenizer.to_str())
    # Truncation and padding are left over from the tokenizer's latest call; ours sets neither.
    return {name: part for name, part in rules.items() if name not in ("truncation", "padding")}


def _state(data: DataConfig) -> Any:
    path = data.path
    assert path is not None
    if SourceKind(data.kind) is not SourceKind.datasets:
        return _files(source_files(data, path=path))
    files = local_files(path)
    return _files(files) if files is not None else [path, hub_fingerprint(data, path=path)]


def _files(files: Iterable[Path]) -> list[tuple[str, int, int]]:
    return [(str(file), status.st_size, status.st_mtime_ns) for file in files for status in [file.stat()]]


def _sha256(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()
