"""What the ranks of a layout computed, beside the reference: one number for each thing that has to be equal."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fourfold.layout import DATA_AXES, Layout
from fourfold.slices import Slice
from fourfold.verify.ranks import Piece, Result
from fourfold.verify.reference import Truth
from fourfold.verify.volume import SHARDS

LOSS, GRADIENT, NORM = 1e-6, 1e-5, 1e-5  # relative: of itself, of the gradient's own norm, of itself
CHANGE = 1e-4  # of the weights in a step, of the change's own norm: they are rounded, and it is a hundredth of them
FLOOR = 1e-6  # of the largest norm among the parameters: a gradient that is nothing but rounding has none of its own


@dataclass(frozen=True)
class Off:
    """How far one rank's part of a tensor is from the reference, as a share of the whole tensor's norm."""

    name: str
    rank: int
    error: float
    ratio: float  # of the part to the reference's, in its direction
    rest: float  # of the part across that direction, as a share of the reference's part
    place: tuple[Slice, int]


@dataclass(frozen=True)
class Tensors:
    """All parts on all ranks of all gradients, or of the weights' changes."""

    offs: list[Off]
    bound: float
    copies_differ: list[tuple[str, int, int]]  # (name, two ranks) that hold the same elements with other values

    def errors(self) -> dict[str, float]:
        """Of each whole tensor; of copies the worst counts."""
        squares: dict[str, dict[tuple[Slice, int], float]] = {}
        for one in self.offs:
            parts = squares.setdefault(one.name, {})
            parts[one.place] = max(parts.get(one.place, 0.0), one.error**2)
        return {name: math.sqrt(sum(parts.values())) for name, parts in squares.items()}

    def worst(self) -> tuple[str, float, int]:
        """(name, its error, the rank that has the worst part of it)"""
        name, error = max(self.errors().items(), key=lambda one: one[1] if one[1] == one[1] else math.inf)
        return name, error, max((one for one in self.offs if one.name == name), key=lambda one: one.error).rank

    def wrong(self) -> list[str]:
        return [name for name, error in self.errors().items() if not error <= self.bound]


@dataclass(frozen=True)
class MicroBatchLoss:
    """Of one data rank."""

    rows: list[bytes]  # by rows.key_of
    loss: float  # sum over their tokens


@dataclass(frozen=True)
class Update:
    """Of one update of one layout."""

    loss: float
    norms: list[float]  # by rank
    gradients: Tensors | None  # None where they are out of reach
    changes: Tensors
    micro_batches: list[MicroBatchLoss]
    truth: Truth

    @property
    def loss_error(self) -> float:
        return apart(self.loss, self.truth.loss)

    @property
    def worst_norm(self) -> float:
        return max(self.norms, key=lambda norm: apart(norm, self.truth.norm))

    @property
    def norm_error(self) -> float:
        return apart(self.worst_norm, self.truth.norm)

    @property
    def equal(self) -> bool:
        tensors = [one for one in (self.gradients, self.changes) if one is not None]
        return self.loss_error <= LOSS and self.norm_error <= NORM and not any(one.wrong() for one in tensors)


@dataclass(frozen=True)
class Comparison:
    """Of one layout."""

    layout: Layout
    updates: list[Update]
    sent: dict[str, list[tuple[int, int | None]]]  # by axis, for each rank: bytes counted in an update, and planned
    unheld: list[str]  # parameters of which no rank has all elements between them

    @property
    def volume_equal(self) -> bool:
        return all(plan in (None, count) for ranks in self.sent.values() for count, plan in ranks)

    @property
    def equal(self) -> bool:
        return self.volume_equal and not self.unheld and all(update.equal for update in self.updates)


def compare(results: list[Result], truths: list[Truth], *, layout: Layout) -> Comparison:
    updates = [_update(results, truth, number=number) for number, truth in enumerate(truths)]
    last = [(result.updates[-1].sent, result.planned) for result in results]
    sizes = {axis: layout.size(axis) for axis in ("tp", "cp", "pp")}
    sizes |= {SHARDS: layout.partition_size, "dp_replicate": layout.dp_replicate_size}
    axes = [axis for axis, size in sizes.items() if size > 1]
    sent = {axis: [(counted.get(axis, 0), plan.get(axis)) for counted, plan in last] for axis in axes}
    return Comparison(layout, updates, sent, list(_unheld(results, truths[0].before)))


def apart(got: float, want: float) -> float:
    """Relative distance; infinite for what is not a number."""
    distance = abs(got - want) / max(abs(want), 1e-12)
    return distance if distance == distance else math.inf


def _update(results: list[Result], truth: Truth, *, number: int) -> Update:
    seen = [result.updates[number] for result in results]
    gradients = [one.gradients for one in seen]
    change = {name: truth.after[name] - truth.before[name] for name in truth.after}
    return Update(
        loss=float(seen[0].reported["train/loss"]),
        norms=[one.norm for one in seen],
        gradients=None if None in gradients else _tensors(gradients, truth.gradients, bound=GRADIENT),  # type: ignore[arg-type]
        changes=_tensors([one.after for one in seen], change, bound=CHANGE, base=truth.before),
        micro_batches=_micro_batches(results, number=number),
        truth=truth,
    )


def _tensors(
    pieces: list[list[Piece]], want: dict[str, Tensor], *, bound: float, base: dict[str, Tensor] | None = None
) -> Tensors:
    """`base` is taken off what the ranks have."""
    norms = {name: float(values.norm()) for name, values in want.items()}
    least = FLOOR * max(norms.values())
    offs: list[Off] = []
    first: dict[tuple[str, Slice, int], tuple[int, Tensor]] = {}
    differ: list[tuple[str, int, int]] = []
    for rank, mine in enumerate(pieces):
        for piece in mine:
            got, reference = torch.from_numpy(piece.values), _part(want[piece.name], piece)
            key = (piece.name, piece.part, piece.start)
            before, values = first.setdefault(key, (rank, got))
            if not torch.equal(values, got):
                differ.append((piece.name, before, rank))
            if base is not None:
                got = got - _part(base[piece.name], piece)
            offs.append(_off(piece, rank, got, reference, norm=max(norms[piece.name], least)))
    return Tensors(offs, bound, differ)


def _off(piece: Piece, rank: int, got: Tensor, want: Tensor, *, norm: float) -> Off:
    got, want = got.double(), want.double()
    square = float(want @ want)
    ratio = float(got @ want) / square if square else 1.0
    rest = float((got - ratio * want).norm()) / math.sqrt(square) if square else float(got.norm()) / norm
    return Off(piece.name, rank, float((got - want).norm()) / norm, ratio, rest, (piece.part, piece.start))


def _part(whole: Tensor, piece: Piece) -> Tensor:
    return piece.part.cut(whole).flatten()[piece.start : piece.start + len(piece.values)]


def _micro_batches(results: list[Result], *, number: int) -> list[MicroBatchLoss]:
    """Ranks that differ in cp have a part of the tokens each; those that differ in tp or pp all have the same sums."""
    keys: dict[tuple[int, ...], list[bytes]] = {}
    losses: Counter[tuple[int, ...]] = Counter()
    for result in results:
        if result.coordinate["tp"] == result.coordinate["pp"] == 0:
            update = result.updates[number]
            for index, (rows, loss) in enumerate(zip(update.keys, update.losses, strict=True)):
                which = (*(result.coordinate[axis] for axis in DATA_AXES), index)
                keys[which] = rows
                losses[which] += loss  # type: ignore[assignment]
    return [MicroBatchLoss(rows, losses[which]) for which, rows in keys.items()]


def _unheld(results: list[Result], weights: dict[str, Tensor]) -> Iterator[str]:
    held = {name: torch.zeros(values.shape) for name, values in weights.items()}
    for piece in (piece for result in results for piece in result.updates[0].after):
        mark = piece.part.cut(held[piece.name]).flatten()[: piece.part.numel()]
        mark[piece.start : piece.start + len(piece.values)] = 1
        piece.part.place(mark, into=held[piece.name])
    for name, marks in held.items():
        if not marks.all():
            yield f"{int((marks == 0).sum())} of {marks.numel()} elements of {name} are held by no rank"
