"""What a person sees and what is kept: one progress bar or plain lines, tables, metrics.jsonl, trackers."""

import json
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

BESIDE = 48  # characters that the bar, the count and the times take on its line


def console() -> Console:
    """Standard output; 100 columns where it is not a terminal, so that tables are not folded in log files."""
    return Console() if sys.stdout.isatty() else Console(width=100)


def print_table(title: str, rows: list[tuple[str, str]]) -> None:
    table = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False, title_style="bold")
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value)
    console().print(table)


def short(number: float, unit: str = "") -> str:
    """1234567 -> `1.23M`; with a unit `1.23 Munit`."""
    gap = " " if unit else ""
    for factor, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= factor:
            return f"{number / factor:.3g}{gap}{letter}{unit}"
    return f"{number:.3g}{gap}{unit}"


def gibibytes(number: float) -> str:
    return f"{number / 2**30:.2f} GiB"


def _keep_up_to(path: Path, step: int) -> None:
    """Drop metrics of updates that are to be run again after a crash; a line cut short by it goes too."""
    kept = []
    for line in path.read_text().splitlines(keepends=True):
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line)
        except ValueError:
            continue
    aside = path.with_name(f".{path.name}")
    aside.write_text("".join(kept))
    aside.replace(path)


def _fitting(parts: list[str], width: int) -> str:
    """As many of them as a line has room for."""
    while len(parts) > 1 and len("  ".join(parts)) > width:
        parts = parts[:-1]
    return "  ".join(parts)


class Reporter:
    """Progress of the main process; on other processes every call does nothing."""

    def __init__(self, *, enabled: bool, total_steps: int, first_step: int, output_dir: Path) -> None:
        self._metrics_path = output_dir / "metrics.jsonl" if enabled else None
        if self._metrics_path and self._metrics_path.exists():
            _keep_up_to(self._metrics_path, first_step)
        self._enabled = enabled
        self._bar: Progress | None = None
        self._total = total_steps
        if enabled and sys.stdout.isatty():
            self._bar = Progress(
                BarColumn(bar_width=10),
                MofNCompleteColumn(),
                TextColumn("{task.fields[text]}"),
                TimeElapsedColumn(),
                TextColumn("ETA"),
                TimeRemainingColumn(),
            )
            self._task = self._bar.add_task("train", total=total_steps, completed=first_step, text="")

    def __enter__(self) -> "Reporter":
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar:
            self._bar.stop()

    def step(self, step: int, *, text: list[str], metrics: dict[str, Any], show: bool) -> None:
        """One update is done: move the bar, and keep its metrics. `text` is in parts, the most important first."""
        self.record(step, metrics=metrics)
        if self._bar:
            self._bar.update(self._task, completed=step, text=_fitting(text, self._bar.console.width - BESIDE))
        elif self._enabled and (show or step == self._total):
            print(f"step {step}/{self._total}  {'  '.join(text)}", flush=True)

    def record(self, step: int, *, metrics: dict[str, Any]) -> None:
        if self._metrics_path is None:
            return
        try:
            with self._metrics_path.open("a") as file:
                file.write(json.dumps({"step": step, **metrics}) + "\n")
        except OSError as error:
            self.say(f"{self._metrics_path} cannot be written ({error.strerror}); metrics are shown only from here on")
            self._metrics_path = None

    def say(self, text: str) -> None:
        """A line above the bar."""
        if self._bar:
            self._bar.console.print(text, highlight=False)
        elif self._enabled:
            print(text, flush=True)
