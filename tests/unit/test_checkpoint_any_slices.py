"""Slices of a tensor, any of them, written and read by any others: at each element, by few reads, none missed."""

import json
import random
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fourfold.checkpoint import pieces as pieces_module
from fourfold.checkpoint.files import Entry, write_safetensors
from fourfold.checkpoint.pieces import Pieces, key_of
from fourfold.checkpoint.table import table_of
from fourfold.slices import Ranges, Slice
from tests.unit.sliced_ranks import Reads


@pytest.fixture(autouse=True)
def nothing_need_survive(monkeypatch: pytest.MonkeyPatch) -> None:
    """These folders are many, and a disk takes its time to sync."""
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


def write(folder: Path, whole: Tensor, parts: list[tuple[Slice, list[int]]]) -> Path:
    """A checkpoint of the tensor `x`, in slices cut into pieces at the given elements."""
    folder.mkdir()
    reports, files = [], {}
    for number, (part, borders) in enumerate(parts):
        values = part.cut(whole).reshape(-1)
        spans = list(zip([0, *borders], [*borders, part.numel()], strict=True))
        entries = [
            Entry(key_of("master", "x", low), (high - low,), torch.float32, lambda a, b, v=values[low:high]: v[a:b])
            for low, high in spans
        ]
        name = f"rank-{number:05d}.safetensors"
        files[name] = asdict(write_safetensors(folder / name, entries))
        cut = {"rows": part.rows, "columns": part.columns}
        pieces = [["x", low, high - low, json.loads(json.dumps(cut))] for low, high in spans]
        reports.append({"file": name, "pieces": pieces, "shapes": {"x": list(whole.shape)}})
    (folder / "pieces.json").write_text(json.dumps(table_of(reports)))
    index = {"format": 3, "progress": {}, "kinds": {"master": "F32"}, "run": {}, "files": files}
    (folder / "checkpoint.json").write_text(json.dumps(index))
    return folder


def borders(chance: random.Random, size: int) -> list[int]:
    return sorted(chance.sample(range(1, size), min(size - 1, chance.randrange(3)))) if size > 1 else []


def dealt(chance: random.Random, size: int, hands: int) -> list[Ranges]:
    """[0, size) cut into ranges that are dealt out, in any order."""
    at = [0, *borders(chance, size), *borders(chance, size), size]
    ranges = [one for one in zip(sorted(set(at)), sorted(set(at))[1:], strict=False)]
    chance.shuffle(ranges)
    return [tuple(ranges[hand::hands]) for hand in range(hands) if ranges[hand::hands]]


def cuts(chance: random.Random, shape: torch.Size) -> list[Slice]:
    """Slices that hold each element once."""
    whole = Slice.whole(shape)
    rows = dealt(chance, shape[0], chance.randrange(1, 4))
    columns = dealt(chance, shape[1], chance.randrange(1, 4)) if len(shape) == 2 else [whole.columns]
    return [Slice(shape, one, other, padding=chance.randrange(3)) for one in rows for other in columns]


def test_any_elements_of_any_slice_are_read_from_any_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(0)
    for number in range(30):
        shape = torch.Size(chance.choice([[9, 7], [4, 12], [1, 5], [6, 1], [11], [3, 2, 2]]))
        whole = torch.randn(shape)
        written = [(part, borders(chance, part.numel())) for part in cuts(chance, shape)]
        pieces = Pieces(write(tmp_path / str(number), whole, written))
        for _ in range(20):
            monkeypatch.setattr(pieces_module, "CHUNK", chance.choice([1, 3, 8, 1000]))
            part = chance.choice(cuts(chance, shape))
            start = chance.randrange(part.numel())
            count = chance.randrange(part.numel() - start + 1)
            around = torch.full((count + 2,), 7.5, dtype=chance.choice([torch.float32, torch.float64]))
            pieces.read_into(around[1 : count + 1], "x", start=start, part=part)
            wanted = part.cut(whole).reshape(-1)[start : start + count].to(around.dtype)
            assert torch.equal(around, torch.cat([around.new_tensor([7.5]), wanted, around.new_tensor([7.5])])), (
                number,
                written,
                part,
                start,
                count,
            )


def test_every_missing_element_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(1)
    for number in range(20):
        shape = torch.Size(chance.choice([[9, 7], [4, 12], [11]]))
        pieces = Pieces(
            write(
                tmp_path / str(number),
                torch.randn(shape),
                [(one, borders(chance, one.numel())) for one in cuts(chance, shape)],
            )
        )
        slices = pieces._held["x"]
        lost_of = chance.choice(range(len(slices)))
        lost = slices[lost_of].pieces.pop(chance.randrange(len(slices[lost_of].pieces)))
        kept = torch.ones(shape)
        at = torch.arange(shape.numel()).view(shape)
        kept.view(-1)[slices[lost_of].part.cut(at).reshape(-1)[lost.start : lost.end]] = 0
        for _ in range(10):
            monkeypatch.setattr(pieces_module, "CHUNK", chance.choice([1, 3, 8, 1000]))
            part = chance.choice(cuts(chance, shape))
            start = chance.randrange(part.numel())
            target = torch.empty(chance.randrange(1, part.numel() - start + 1))
            found = int(part.cut(kept).reshape(-1)[start : start + len(target)].sum())
            if found == len(target):
                pieces.read_into(target, "x", start=start, part=part)
                continue
            with pytest.raises(ValueError, match=f"has {found} of {len(target)} elements of master x"):
                pieces.read_into(target, "x", start=start, part=part)


def columns_of(shape: torch.Size, *ranges: tuple[int, int]) -> list[Slice]:
    return [Slice(shape, ((0, shape[0]),), (one,)) for one in ranges]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_columns_are_read_by_blocks_of_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(pieces_module, "CHUNK", 100)
    shape = torch.Size([1000, 8])
    whole, reads = torch.randn(shape), Reads(monkeypatch)
    uncut = Pieces(write(tmp_path / "uncut", whole, [(Slice.whole(shape), [3333])]))
    halves = Pieces(write(tmp_path / "halves", whole, [(part, [1]) for part in columns_of(shape, (0, 4), (4, 8))]))
    (quarter,) = columns_of(shape, (2, 4))
    for pieces, read in ((uncut, 8000), (halves, 4000)):
        reads.sizes.clear()
        target = torch.empty(quarter.numel(), dtype=dtype)
        pieces.read_into(target, "x", part=quarter)
        assert torch.equal(target.view(1000, 2), whole[:, 2:4].to(dtype))
        assert max(reads.sizes) <= 100
        assert len(reads.sizes) < read / 80
    for pieces in (halves, uncut):
        reads.sizes.clear()
        target = torch.empty(shape, dtype=dtype)
        pieces.read_into(target.view(-1), "x")
        assert torch.equal(target, whole.to(dtype))
        if pieces is uncut and dtype is torch.float32:
            assert reads.sizes == [3333, 4667]  # straight to their place
        else:
            assert max(reads.sizes) <= 100
            assert len(reads.sizes) < 8000 / 80


def test_what_is_missing_is_counted(tmp_path: Path) -> None:
    shape = torch.Size([6, 4])
    left, right = columns_of(shape, (0, 2), (2, 4))
    pieces = Pieces(write(tmp_path / "one", torch.randn(shape), [(left, [])]))
    with pytest.raises(ValueError, match="has 12 of 24 elements of master x"):
        pieces.read("x")
    with pytest.raises(ValueError, match="has 0 of 3 elements of master x"):
        pieces.read_into(torch.empty(3), "x", part=right, start=2)
    pieces.read_into(torch.empty(12), "x", part=left)
    pieces = Pieces(write(tmp_path / "two", torch.randn(shape), [(left, [5]), (right, [])]))
    del pieces._held["x"][0].pieces[1]
    with pytest.raises(ValueError, match="has 17 of 24 elements of master x"):
        pieces.read("x")
    pieces = Pieces(write(tmp_path / "hole", torch.randn(shape), [(Slice.whole(shape), [7, 9])]))
    del pieces._held["x"][0].pieces[1]  # the last of one row, the first of the next
    with pytest.raises(ValueError, match="has 11 of 12 elements of master x"):
        pieces.read_into(torch.empty(12), "x", part=left)
    padded = Slice(shape, ((0, 6),), ((0, 4),), padding=1)
    with pytest.raises(ValueError, match="has 24 of 28 elements of master x"):  # padding is in no file
        Pieces(write(tmp_path / "all", torch.randn(shape), [(padded, [])])).read_into(torch.empty(28), "x", part=padded)


def test_overlapping_slices_are_refused(tmp_path: Path) -> None:
    shape = torch.Size([6, 4])
    parts = columns_of(shape, (0, 3), (2, 4))
    with pytest.raises(ValueError, match="has 30 of 24 elements of master x"):
        Pieces(write(tmp_path / "x", torch.randn(shape), [(part, []) for part in parts])).read("x")
