"""What a run would learn from, shown: counts, lengths of documents, and its first rows with their targets.

One process, no process group, no DeepSpeed: for a look before a run is started, and at what a template makes of a chat.
"""

import itertools
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .. import legality
from ..log import console, print_table, short
from ..model.source import read_config, read_tokenizer, resolve_folder
from ..schema import TrainConfig
from .loader import first_rows
from .pack import Row
from .prepared import Prepared, prepare_for
from .row_text import row_text
from .stats import PackStats, described
from .stream import StreamRowSet

BAR = 40  # characters of the longest bar
LEGEND = {
    True: "\ngreen: to be predicted; dim: read only (the first token of a row's piece is predicted by nothing)",
    False: "\n⟦read only⟧, the rest is to be predicted (the first token of a row's piece is predicted by nothing)",
}


def look(config: TrainConfig, *, rows: int, full: bool) -> None:
    """Prepare the data of a run, or open it from the cache, and print it. ValueError as for a run."""
    legality.check_data(config)
    folder = resolve_folder(config.model)
    tokenizer = read_tokenizer(folder)
    vocabulary = read_config(folder, model=config.model).vocab_size
    made = prepare_for(config, tokenizer=tokenizer, vocab_size=vocabulary, show_progress=True)
    shown = list(itertools.islice(first_rows(made.train, seed=config.seed), rows))
    out = console()
    print_table(f"data of {config.name}", list(_counts(made, config=config)))
    if len(made.sources) > 1:
        out.print(_sources(made))
    stats = made.train.stats if isinstance(made.train, StreamRowSet) else made.stats
    out.print(_histogram(stats, seq_len=config.seq_len))
    if shown:
        out.print(Text(LEGEND[out.is_terminal], style="dim"))
    for number, row in enumerate(shown, start=1):
        _show(row, number=number, tokenizer=tokenizer, full=full, out=out)


def _counts(made: Prepared, *, config: TrainConfig) -> Iterator[tuple[str, str]]:
    data = config.data
    streamed = isinstance(made.train, StreamRowSet)
    stats = made.train.stats if isinstance(made.train, StreamRowSet) else made.stats
    yield "source", str(data.path) if data.sources is None else f"{len(data.sources)} sources"
    yield "documents", described(stats).replace(" documents", "", 1) + (" (of the stream so far)" if streamed else "")
    yield "rows", f"{stats.rows} of {config.seq_len} tokens, {data.packing.value}, {stats.efficiency:.2%} filled"
    if len(made.sources) > 1 and not isinstance(made.train, StreamRowSet):
        yield "epoch", f"{len(made.train)} rows"
    yield "tokens", short(stats.tokens) + (" in all sources, each once" if len(made.sources) > 1 else "")
    share = stats.targets / max(stats.tokens, 1)
    yield "targets", f"{short(stats.targets)} ({share:.1%} of the tokens), {stats.rows_without_target} rows without"
    if made.eval_stats:
        yield "evaluation", f"{described(made.eval_stats)}, {made.eval_stats.rows} rows"
    if made.digest:
        yield "digest", made.digest


def _sources(made: Prepared) -> Table:
    table = Table(box=None, pad_edge=False, title="sources", title_justify="left", title_style="bold")
    table.add_column("path", overflow="fold")
    for name in ("documents", "left out", "rows", "rows an epoch", "share", "filled"):
        table.add_column(name, justify="right")
    total = sum(source.rows_per_epoch for source in made.sources)
    for source in made.sources:
        stats = source.stats
        table.add_row(
            source.path,
            str(stats.documents),
            str(stats.left_out),
            str(stats.rows),
            str(source.rows_per_epoch),
            f"{source.rows_per_epoch / total:.1%}",
            f"{stats.efficiency:.1%}",
        )
    return table


def _histogram(stats: PackStats, *, seq_len: int) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False, title="tokens of a document", title_justify="left")
    table.title_style = "bold"
    table.add_column(justify="right", style="dim")
    table.add_column(justify="right")
    table.add_column()
    first = next((bucket for bucket, count in enumerate(stats.lengths) if count), 0)
    for bucket in range(first, len(stats.lengths)):
        count = stats.lengths[bucket]
        low, high = 2**bucket, 2 ** (bucket + 1) - 1
        bar = "█" * round(BAR * count / max(stats.lengths)) or ("▏" if count else "")
        table.add_row(f"{low} to {high}", str(count), bar + ("  seq_len" if low <= seq_len <= high else ""))
    return table


def _show(row: Row, *, number: int, tokenizer: Any, full: bool, out: Console) -> None:
    out.print()
    documents, padding = int(row["document_ids"].max()) + 1, int((row["document_ids"] < 0).sum())
    targets = int((row["labels"] >= 0).sum())
    title = f"row {number}: documents {documents}, targets {targets}, padding {padding}"
    out.rule(Text(title, style="bold"), align="left", style="dim")
    for text in row_text(row, tokenizer=tokenizer, full=full, marks=not out.is_terminal):
        out.print(text, highlight=False)
