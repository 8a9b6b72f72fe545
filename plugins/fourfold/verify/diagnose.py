"""Where a difference comes from: the pattern of what is wrong, and what the reference gives when it makes the same mistake."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fourfold.layout import DATA_AXES, Layout
from fourfold.verify.compare import LOSS, NORM, Comparison, Off, Tensors, Update, apart
from fourfold.verify.ranks import Result
from fourfold.verify.reference import Reference, unstacked
from fourfold.verify.rows import key_of

SAME = 1e-4  # relative: the same mistake, or one factor
LAYER = re.compile(r"\.layers\.(\d+)\.")

SUMMED = {  # what makes copies along an axis alike
    "dp_replicate": "the all-reduce over dp_replicate",
    "tp": "the sum over tp of parameters that each of its ranks holds whole (norms, biases, copied key heads)",
    "pp": "the sum over pp of a matrix that is tied to another stage's",
}


@dataclass(frozen=True)
class Case:
    """Of a layout that is not equal, what is known about its first update that is not."""

    layout: Layout
    results: list[Result]
    update: Update
    rows: dict[str, Tensor]
    reference: Reference  # with the weights from before the first update
    first: bool  # whether it is that

    def where(self, rank: int) -> str:
        return f"rank {rank} ({place(self.layout, rank)})"


def diagnose(
    comparison: Comparison, results: list[Result], *, rows: dict[str, Tensor], reference: Reference
) -> Iterator[str]:
    """Sentences, the likeliest cause first."""
    yield from comparison.unheld
    number = next((index for index, update in enumerate(comparison.updates) if not update.equal), None)
    if number is not None:
        case = Case(comparison.layout, results, comparison.updates[number], rows, reference, number == 0)
        found = list(_rows_read(case)) or list(_losses(case)) or list(_gradients(case)) or list(_step(case))
        yield from (text if case.first else f"in update {number + 1} only: {text}" for text in found)
    for axis, ranks in comparison.sent.items():
        for rank, (counted, plan) in enumerate(ranks):
            if plan not in (None, counted):
                yield (
                    f"rank {rank} ({place(comparison.layout, rank)}) sent {counted} bytes over {axis} in an update, and its "
                    f"formula says {plan}"
                )
                break


def place(layout: Layout, rank: int) -> str:
    """`tp 0, dp_shard 1`: its position on the axes that there are."""
    return ", ".join(f"{axis} {at}" for axis, at in layout.coordinate(rank).items() if layout.size(axis) > 1)


def _rows_read(case: Case) -> Iterator[str]:
    known = [key_of(ids, labels) for ids, labels in zip(case.rows["input_ids"], case.rows["labels"], strict=True)]
    read = [key for one in case.update.micro_batches for key in one.rows]
    wrong = {
        number: read.count(key)
        for number, key in enumerate(known)
        if read.count(key) % known.count(key) or key not in read
    }
    if len(read) != len(known) or wrong:
        counts = ", ".join(f"row {number} {count} times" for number, count in list(wrong.items())[:4])
        yield f"the data ranks read {len(read)} rows in an update of {len(known)}, each once if all were right: {counts}"


def _losses(case: Case) -> Iterator[str]:
    if case.update.loss_error <= LOSS:
        return
    batches = list(_against(case, case.update.truth.row_losses.tolist()))
    wrong = [one for one in batches if apart(one.got, one.want) > 10 * LOSS]
    if not wrong:
        yield (
            f"the token losses of every micro-batch are right and their mean is {case.update.loss / case.update.truth.loss:.4g} "
            f"of the reference's: the normaliser (targets of the global batch), or the sum of losses over "
            f"{_data_axes(case.layout)}"
        )
        return
    ratios = [one.got / one.want for one in batches if one.want]
    if max(ratios) - min(ratios) < SAME and case.first:
        yield f"every loss is {ratios[0]:.4g} of the reference's: a factor on the loss, not a token"
        return
    yield from _known_mistakes(case)
    documents = [int(row.max()) + 1 for row in case.rows["document_ids"]]
    several = [one for one in batches if any(documents[row] > 1 for row in one.rows)]
    if len(wrong) < len(batches) and all(one in several for one in wrong):
        yield (
            f"{len(wrong)} of {len(several)} micro-batches with several documents have a wrong loss, and those of one document "
            f"are right: document borders"
        )
    else:
        rows = ", ".join(map(str, wrong[0].rows))
        yield (
            f"{len(wrong)} of {len(batches)} micro-batches have a wrong loss: that of rows {rows} is {wrong[0].got:.6g} instead "
            f"of {wrong[0].want:.6g}"
        )


@dataclass(frozen=True)
class Batch:
    """A micro-batch: its rows, the sum of its token losses, and what it would be."""

    rows: list[int]
    got: float
    want: float


def _against(case: Case, losses: list[float]) -> Iterator[Batch]:
    """`losses` are of each row."""
    pairs = zip(case.rows["input_ids"], case.rows["labels"], strict=True)
    known = {key_of(ids, labels): number for number, (ids, labels) in enumerate(pairs)}
    for one in case.update.micro_batches:
        rows = [known[key] for key in one.rows]
        yield Batch(rows, one.loss, sum(losses[row] for row in rows))


def _known_mistakes(case: Case) -> Iterator[str]:
    """The reference makes each on purpose; the losses tell which it is."""
    mistakes: dict[str, Callable[[dict[str, Tensor]], Tensor]] = {
        "documents attend to each other: attention crosses their borders": case.reference.leaking_loss,
        "labels are shifted once too often: each position predicts the token after the next": _with_labels(case, -1),
        "labels are not shifted: each position predicts itself": _with_labels(case, 1),
    }
    if not case.first:
        return
    with torch.no_grad():
        for text, loss in mistakes.items():
            losses = [float(loss(row)) for row in unstacked(case.rows)]
            if all(apart(one.got, one.want) < SAME for one in _against(case, losses)):
                yield text
                return


def _with_labels(case: Case, shift: int) -> Callable[[dict[str, Tensor]], Tensor]:
    def loss(row: dict[str, Tensor]) -> Tensor:
        labels = row["labels"].roll(shift)
        labels[0 if shift > 0 else -1] = -100  # what came round the end
        return case.reference.row_loss({**row, "labels": labels})

    return loss


def _gradients(case: Case) -> Iterator[str]:
    found = case.update.gradients
    if found is None or not found.wrong():
        return
    wrong = found.wrong()
    factor = _one_factor(found.offs)
    if factor is not None:
        yield (
            f"every gradient is {factor:.4g} of the reference, on every rank: the normaliser, or a factor on the loss "
            f"(losses are right)"
        )
        return
    yield from _copies(case, found, what="gradients")
    held = {one.name for one in found.offs}
    if len(wrong) > 0.9 * len(held):
        yield (
            f"losses are right and {len(wrong)} of {len(held)} gradients are wrong: their sum over {_data_axes(case.layout)} is "
            f"dropped or takes in too few ranks"
        )
    yield from _by_kind(case, found, wrong, held)
    name, error, rank = found.worst()
    yield f"the worst gradient is that of {name}, off by {error:.2g} of its norm on {case.where(rank)}"


def _one_factor(offs: list[Off]) -> float | None:
    """What every part is of the reference, if it is one number other than 1."""
    real = [one for one in offs if one.rest < SAME]
    if len(real) < len(offs):
        return None
    low, high = min(one.ratio for one in real), max(one.ratio for one in real)
    return None if high - low > SAME * abs(high) or abs(high - 1) < SAME else (low + high) / 2


def _copies(case: Case, found: Tensors, *, what: str) -> Iterator[str]:
    """Ranks along one axis that should have the same and do not."""
    by_axis: dict[str, list[str]] = {}
    for name, one, other in found.copies_differ:
        a, b = case.layout.coordinate(one), case.layout.coordinate(other)
        by_axis.setdefault(" x ".join(axis for axis in a if a[axis] != b[axis]), []).append(name)
    for axes, names in by_axis.items():
        likely = f": {SUMMED[axes]}" if axes in SUMMED else ""
        yield f"ranks that differ in {axes} have other {what} of the same {_listed(list(dict.fromkeys(names)))}{likely}"


def _by_kind(case: Case, found: Tensors, wrong: list[str], held: set[str]) -> Iterator[str]:
    if len(wrong) == len(held):
        return
    stages = {case.layout.coordinate(one.rank)["pp"] for one in found.offs if one.error > found.bound}
    if case.layout.pp_size > 1 and len(stages) == 1:
        yield f"only parameters of pipeline rank {stages.pop()} (pp) have a wrong gradient: {_listed(wrong)}"
    elif all(case.update.truth.gradients[name].ndim < 2 for name in wrong):
        likely = " (tp: those see a part of the tokens on each rank, and are summed)" if case.layout.tp_size > 1 else ""
        yield f"only norms and biases have a wrong gradient{likely}: {_listed(wrong)}"
    else:
        yield f"{len(wrong)} of {len(held)} gradients are wrong: {_listed(wrong)}"


def _listed(names: list[str]) -> str:
    """The first of them; those of layers once."""
    alike = list(dict.fromkeys(LAYER.sub(".layers.*.", name) for name in names))
    return ", ".join(alike[:3]) + (f" and {len(alike) - 3} more" if len(alike) > 3 else "")


def _step(case: Case) -> Iterator[str]:
    """Losses and gradients are right."""
    norms, want = case.update.norms, case.update.truth.norm
    if case.update.norm_error > NORM:
        rank = max(range(len(norms)), key=lambda one: apart(norms[one], want))
        yield (
            f"gradients are right and the norm on {case.where(rank)} is {norms[rank]:.6g} instead of {want:.6g}: parameters that "
            f"several ranks hold are counted by more than one, or by none"
        )
        return
    yield from _copies(case, case.update.changes, what="weights after the step")
    name, error, rank = case.update.changes.worst()
    yield f"the weights move otherwise than the reference's: {name} by {error:.2g} of its change on {case.where(rank)}"


def _data_axes(layout: Layout) -> str:
    axes = [axis for axis in ("cp", *DATA_AXES) if layout.size(axis) > 1]
    return " x ".join(axes) or "no axis at all: every data axis is 1"
