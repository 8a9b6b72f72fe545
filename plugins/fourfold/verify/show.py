"""What a person sees of it: where it is, a table of each pass, and the verdict."""

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.table import Table

from fourfold.layout import Layout
from fourfold.log import console, print_table
from fourfold.verify.compare import CHANGE, GRADIENT, LOSS, NORM, Comparison, Tensors, Update
from fourfold.verify.diagnose import place

if TYPE_CHECKING:
    from fourfold.verify.passes import Pass

BOUNDS = f"bounds: loss {LOSS:g}, gradient {GRADIENT:g} of its norm, norm {NORM:g}, weights {CHANGE:g} of their change"


def progress(text: str, *, last: bool = False) -> None:
    """On standard error: one line that changes where a person looks on, else a line each."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="\n" if last else "", file=sys.stderr, flush=True)
    else:
        print(text, file=sys.stderr, flush=True)


def show_start(name: str, rows: list[tuple[str, str]], notes: list[str]) -> None:
    print_table(f"verify {name}", [*rows, *(("note", note) for note in notes)])


def show_passes(comparisons: list[Comparison]) -> None:
    for one in comparisons:
        verdict = "equal" if one.equal else "DIFFERS"
        title = f"{one.layout.describe()}: {verdict}"
        table = Table(box=None, pad_edge=False, title=title, title_justify="left", title_style="bold")
        table.add_column("", style="dim", no_wrap=True)
        for name in ("ranks", "one process", "off by"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("at worst", overflow="fold")
        for cells in _cells(one):
            table.add_row(*cells)
        console().print(table)
    print(BOUNDS)


def _cells(one: Comparison) -> Iterator[tuple[str, ...]]:
    """Of the worst update each."""
    loss = max(one.updates, key=lambda update: update.loss_error)
    yield "loss", f"{loss.loss:.8f}", f"{loss.truth.loss:.8f}", f"{loss.loss_error:.1e}"
    norm = max(one.updates, key=lambda update: update.norm_error)
    yield "gradient norm", f"{norm.worst_norm:.8f}", f"{norm.truth.norm:.8f}", f"{norm.norm_error:.1e}"
    gradients = [update.gradients for update in one.updates if update.gradients is not None]
    yield ("gradients", "", "", *_worst(gradients, one.layout))
    yield ("weights' change", "", "", *_worst([update.changes for update in one.updates], one.layout))
    for axis, ranks in one.sent.items():
        yield (f"bytes, {axis}", *_bytes(ranks))


def _worst(found: list[Tensors], layout: Layout) -> tuple[str, str]:
    if not found:
        return "-", "out of reach"
    name, error, rank = max((tensors.worst() for tensors in found), key=lambda one: one[1])
    return f"{error:.1e}", f"{name} ({place(layout, rank)})"


def _bytes(ranks: list[tuple[int, int | None]]) -> tuple[str, str, str]:
    """Of all ranks in an update, counted and by the formula."""
    plans = [plan for _, plan in ranks if plan is not None]
    counted, planned = sum(count for count, _ in ranks), sum(plans)
    if len(plans) < len(ranks):
        return f"{counted:,}", "no formula", "-"
    return f"{counted:,}", f"plan {planned:,}", str(sum(abs(count - (plan or 0)) for count, plan in ranks))


def show_verdict(passes: "list[Pass]", *, seconds: float) -> None:
    if all(one.comparison.equal for one in passes):
        losses = ", ".join(f"{update.loss:.6f}" for update in passes[0].comparison.updates)
        count = f"{len(passes)} {'layout' if len(passes) == 1 else 'layouts'}"
        print(f"EQUAL to one process: {count}, losses {losses} ({seconds:.0f} s)", flush=True)
        return
    for one in (one for one in passes if not one.comparison.equal):
        print(f"\nNOT EQUAL to one process: {one.comparison.layout.describe()}\n{_numbers(one.comparison.updates)}")
        for text in one.causes:
            print(f"  - {text}")
    print(f"({seconds:.0f} s)", flush=True)


def _numbers(updates: list[Update]) -> str:
    lines = []
    for number, update in enumerate(updates, start=1):
        truth = update.truth
        lines.append(
            f"  update {number}: loss {update.loss:.8g}, one process {truth.loss:.8g}; norm {update.worst_norm:.8g}, one process {truth.norm:.8g}"
        )
    return "\n".join(lines)
