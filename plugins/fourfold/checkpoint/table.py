"""The table of a checkpoint (pieces.json): which elements of which slice of a tensor lie in which file.

    {name: {"shape": global shape, "slices": [{"rows": [[first, last], ...], "columns": [[first, last], ...]}, ...],
            "pieces": [[start, count, file, slice], ...]}}

`start` and `count` are elements of the flattened slice, `slice` its place in the list. A tensor that nothing cuts has no
`slices`: its pieces are of the whole. Before format 3 there were no slices, and a piece had three items.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from fourfold.slices import Slice

if TYPE_CHECKING:
    from fourfold.zero.engine import Fragment

Cut = dict[str, list[list[int]]]


@dataclass(frozen=True)
class Piece:
    """Elements [start, start + count) of the flattened slice, in `file`."""

    start: int
    count: int
    file: str

    @property
    def end(self) -> int:
        return self.start + self.count


@dataclass(frozen=True)
class Held:
    """A slice of a tensor and its pieces, which may be anywhere in it."""

    part: Slice
    pieces: list[Piece] = field(default_factory=list)


def listed(fragments: Iterable["Fragment"]) -> list[Any]:
    """What a rank tells of the fragments in its file: [name, start, count, rows and columns, or None for all] each."""
    return [[one.name, one.start, one.count, _cut(one.part)] for one in fragments]


def table_of(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The table, from the `file`, `pieces` (as `listed`) and `shapes` (of the parameters that it has) of each rank that
    wrote."""
    shapes = {name: torch.Size(shape) for report in reports for name, shape in report["shapes"].items()}
    table: dict[str, Any] = {name: {"shape": list(shape), "slices": [], "pieces": []} for name, shape in shapes.items()}
    for report in reports:
        for name, start, count, cut in report["pieces"]:
            entry = table[name]
            cut = cut or _whole(shapes[name])
            if cut not in entry["slices"]:
                entry["slices"].append(cut)
            entry["pieces"].append([start, count, report["file"], entry["slices"].index(cut)])
    for name, entry in table.items():
        if entry["slices"] in ([], [_whole(shapes[name])]):
            del entry["slices"]
    return table


def held(entry: Mapping[str, Any]) -> list[Held]:
    """The slices of one tensor of the table, also of one of format 2."""
    shape = torch.Size(entry["shape"])
    cuts = entry.get("slices") or [_whole(shape)]
    slices = [Held(Slice(shape, rows=_ranges(cut["rows"]), columns=_ranges(cut["columns"]))) for cut in cuts]
    for start, count, file, *index in entry["pieces"]:
        slices[index[0] if index else 0].pieces.append(Piece(start, count, file))
    return slices


def _cut(part: Slice) -> Cut | None:
    cut = {"rows": [list(one) for one in part.rows], "columns": [list(one) for one in part.columns]}
    return None if cut == _whole(part.shape) else cut


def _whole(shape: torch.Size) -> Cut:
    whole = Slice.whole(shape)
    return {"rows": [list(one) for one in whole.rows], "columns": [list(one) for one in whole.columns]}


def _ranges(listed: list[list[int]]) -> tuple[tuple[int, int], ...]:
    return tuple((first, last) for first, last in listed)
