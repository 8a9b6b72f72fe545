"""Packing: how full rows are, and what it costs beside the tokenizer alone.

    uv run python tools/bench/data.py                       on the tiny model's tokenizer, or SmolLM2's where it lies
    uv run python tools/bench/data.py --model /tmp/smollm2  (python tools/make_smollm2.py /tmp/smollm2)

Documents are the standard library's sources. Efficiency is the share of positions that hold a token. Speed is
that of tokenising, packing and writing rows to disk over datasets.map with the fast tokenizer alone, which writes tokens
to disk too; both in turn, in one process, each run from an empty folder. Seconds are those of the processor, so that
others on the machine do not count; one thread of the tokenizer.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import console, median_ratio, table, verdict

SMOLLM2 = Path("/tmp/smollm2")
FULL = 0.99  # target: share of positions that hold a token
SPEED = 0.9  # target: of the speed of datasets.map


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=None, help="folder with a tokenizer")
    parser.add_argument("--seq-lens", type=int, nargs="+", default=[2048, 8192, 32768])
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    os.environ |= {"TOKENIZERS_PARALLELISM": "false"}
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer = _tokenizer(options.model, scratch=Path(scratch))
        documents = _documents()
        console().print(_efficiency(documents, tokenizer=tokenizer, seq_lens=options.seq_lens))
        texts = [document["text"] for document in documents if document["text"]]
        for name, found in (("whole files", texts), ("pieces of 300 characters", _short(texts))):
            speed = _speed(found, name=name, tokenizer=tokenizer, runs=options.runs, scratch=Path(scratch) / name)
            console().print(speed)


def _tokenizer(model: Path | None, *, scratch: Path) -> Any:
    from transformers import AutoTokenizer
    from transformers.utils import logging

    from fourfold.model.tiny import create_tiny_llama

    logging.set_verbosity_error()
    if model is None and (SMOLLM2 / "tokenizer.json").is_file():
        model = SMOLLM2
    if model is None:
        model = scratch / "tiny"
        create_tiny_llama(model)
    return AutoTokenizer.from_pretrained(model)


def _documents() -> list[dict[str, Any]]:
    from fourfold.data.sources import documents
    from fourfold.schema import DataConfig

    return list(documents(DataConfig(path="stdlib")))


def _efficiency(documents: list[dict[str, Any]], *, tokenizer: Any, seq_lens: list[int]) -> Any:
    from fourfold.data.pack import PackSettings, pack
    from fourfold.data.stats import PackStats
    from fourfold.data.tokens import encode_all
    from fourfold.schema import Packing

    encoded = list(encode_all(documents, tokenizer=tokenizer))
    made = table(
        f"Packing of {len(documents)} documents, {sum(len(one.input_ids) for one in encoded):,} tokens",
        ("packing", "seq_len", "rows", "documents cut", "filled", "target", ""),
        note="Cut: spread over more than one row; those of best_fit and none are longer than a row.",
    )
    for seq_len in seq_lens:
        for packing in Packing:
            stats = PackStats()
            for _ in pack(encoded, settings=PackSettings(seq_len=seq_len, packing=packing), stats=stats):
                pass
            wanted = packing is Packing.best_fit
            made.add_row(
                packing.value,
                str(seq_len),
                str(stats.rows),
                str(stats.cut_documents),
                f"{stats.efficiency:.2%}",
                f"{FULL:.0%}" if wanted else "",
                verdict(-stats.efficiency, -FULL) if wanted else "",
            )
    return made


def _short(texts: list[str]) -> list[str]:
    pieces = [text[start : start + 300] for text in texts for start in range(0, len(text), 300)]
    return [piece for piece in pieces if piece.strip()]


def _speed(texts: list[str], *, name: str, tokenizer: Any, runs: int, scratch: Path) -> Any:
    scratch.mkdir()
    ours, theirs = [], []
    for number in range(runs + 1):
        found = [_seconds(work, texts, tokenizer, scratch / f"{work.__name__}-{number}") for work in _in_turn(number)]
        if number:  # the first one warms up
            one, other = found if number % 2 else reversed(found)
            ours.append(one)
            theirs.append(other)
    ratio, low, high = median_ratio(theirs, ours)  # of speeds
    characters = sum(map(len, texts)) / 1e6
    made = table(
        f"Tokenise and pack {len(texts)} documents ({name}), {characters:.1f} M characters, {runs} runs each in turn",
        ("", "s", "M characters/s", "speed", "quartiles", "target", ""),
    )
    made.add_row("datasets.map, tokenizer alone", f"{min(theirs):.2f}", f"{characters / min(theirs):.2f}", "1.00")
    made.add_row(
        "tokenise, pack, write rows",
        f"{min(ours):.2f}",
        f"{characters / min(ours):.2f}",
        f"{ratio:.2f}",
        f"{low:.2f} to {high:.2f}",
        f"{SPEED:.2f}",
        verdict(-ratio, -SPEED),
    )
    return made


def _seconds(work: Callable[[list[str], Any, Path], None], texts: list[str], tokenizer: Any, folder: Path) -> float:
    start = time.process_time()
    work(texts, tokenizer, folder)
    return time.process_time() - start


def _in_turn(number: int) -> list[Callable[[list[str], Any, Path], None]]:
    """Whoever comes first in one run comes second in the next."""
    return [_ours, _map] if number % 2 else [_map, _ours]


def _ours(texts: list[str], tokenizer: Any, folder: Path) -> None:
    from fourfold.data.pack import PackSettings, pack
    from fourfold.data.rows import write_rows
    from fourfold.data.tokens import encode_all

    encoded = encode_all(({"text": text} for text in texts), tokenizer=tokenizer)
    write_rows(pack(encoded, settings=PackSettings(seq_len=8192)), folder, seq_len=8192)


def _map(texts: list[str], tokenizer: Any, folder: Path) -> None:
    import datasets

    datasets.disable_progress_bars()
    data = datasets.Dataset.from_dict({"text": texts})
    folder.mkdir()
    data.map(
        lambda batch: {"input_ids": tokenizer(batch["text"], verbose=False)["input_ids"]},
        batched=True,
        remove_columns=["text"],
        cache_file_name=str(folder / "tokens.arrow"),
    )


if __name__ == "__main__":
    main()
