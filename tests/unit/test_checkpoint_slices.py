"""Checkpoints of tensors that tensor parallelism cuts: any ranks' slices from any other ranks' slices, bit by bit."""

import json
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from fourfold.checkpoint import pieces as pieces_module
from fourfold.checkpoint.export import export
from fourfold.checkpoint.files import Entry, digest_of, write_safetensors
from fourfold.checkpoint.pieces import Pieces, key_of
from fourfold.checkpoint.resume import resume
from fourfold.checkpoint.table import table_of
from fourfold.checkpoint.universal import export_universal
from fourfold.layout import Layout
from fourfold.slices import Ranges, Slice
from fourfold.zero.engine import Fragment
from tests.unit.sliced_ranks import KINDS, SHAPES, SlicedEngine, save, tensors

LAYOUTS = [
    Layout(),
    Layout(dp_shard_size=3),
    Layout(tp_size=2),
    Layout(tp_size=2, dp_shard_size=3, dp_replicate_size=2),
    Layout(tp_size=4, cp_size=2),
    Layout(tp_size=4, dp_shard_size=5),
]


@pytest.fixture(autouse=True)
def nothing_need_survive(monkeypatch: pytest.MonkeyPatch) -> None:
    """These folders are many, and a disk takes its time to sync."""
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


def edit(path: Path, change: Any) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def sign_table(checkpoint: Path) -> None:
    """Make the index agree with a changed table."""
    digest = asdict(digest_of(checkpoint / "pieces.json"))
    edit(checkpoint / "checkpoint.json", lambda index: index["files"].update({"pieces.json": digest}))


def assert_resumes(checkpoint: Path, layout: Layout) -> None:
    for rank in range(layout.world_size):
        engine = SlicedEngine(layout, rank)
        assert resume(checkpoint, engine=engine).rows == 12
        for kind in KINDS:
            for group, wanted in enumerate(engine.wanted(kind)):
                assert torch.equal(engine.held(kind)[group], wanted), (layout, rank, kind, group)
        assert float(engine.optimizer.state[engine.masters()[0]]["step"]) == 4


@pytest.mark.parametrize("writers", LAYOUTS, ids=Layout.describe)
@pytest.mark.parametrize("chunk", [7, 2**22])
def test_every_cut_is_read_by_every_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writers: Layout, chunk: int
) -> None:
    monkeypatch.setattr(pieces_module, "CHUNK", chunk)
    checkpoint = save(tmp_path, writers, dtype=torch.bfloat16)
    for readers in LAYOUTS:
        assert_resumes(checkpoint, readers)
    pieces = Pieces(checkpoint)
    assert pieces.shapes() == {name: torch.Size(shape) for name, shape in SHAPES.items()}
    for kind in (*KINDS, "weight"):
        for name, whole in tensors("master" if kind == "weight" else kind).items():
            assert torch.equal(pieces.read(name, kind=kind), whole.reshape(-1).to(pieces.dtype(kind))), (kind, name)


@pytest.mark.parametrize("layout", LAYOUTS, ids=Layout.describe)
def test_nothing_is_written_twice_and_the_table_knows_no_rows(tmp_path: Path, layout: Layout) -> None:
    checkpoint = save(tmp_path, layout)
    written = [values for file in checkpoint.glob("*.safetensors") for values in load_file(file).values()]
    numbers = sum(torch.Size(shape).numel() for shape in SHAPES.values())
    assert sum(values.numel() for values in written) == 3 * numbers
    uncut = {1: set(SHAPES), 2: {"norm", "conv", "scale"}, 4: {"norm", "conv", "scale", "odd"}}[layout.tp_size]
    for name, entry in json.loads((checkpoint / "pieces.json").read_text()).items():
        assert ("slices" not in entry) == (name in uncut), name
        assert len(entry["pieces"]) <= layout.tp_size * layout.partition_size
        assert sum(count for _, count, *_ in entry["pieces"]) == torch.Size(entry["shape"]).numel()


class Reads:
    """Sizes of all reads from files."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        read = Pieces._read_piece

        def counted(pieces: Pieces, target: Tensor, *arguments: Any, **options: Any) -> None:
            self.sizes.append(len(target))
            read(pieces, target, *arguments, **options)

        monkeypatch.setattr(Pieces, "_read_piece", counted)


@pytest.mark.parametrize("layout", LAYOUTS, ids=Layout.describe)
def test_the_same_layout_reads_each_fragment_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: Layout
) -> None:
    checkpoint, reads = save(tmp_path, layout), Reads(monkeypatch)
    wanted = []
    for rank in range(layout.world_size):
        engine = SlicedEngine(layout, rank)
        resume(checkpoint, engine=engine)
        wanted += [fragment.count for fragment in engine.fragments() for _ in KINDS]
    assert sorted(reads.sizes) == sorted(wanted)


# ---------------------------------------------------------------------------------- any slices of one tensor


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
        reports.append(
            {"file": name, "pieces": [["x", low, high - low, json.loads(json.dumps(cut))] for low, high in spans]}
        )
    (folder / "pieces.json").write_text(json.dumps(table_of({"x": whole.shape}, reports)))
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


def test_a_rank_that_did_not_write_is_missed(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, Layout(tp_size=2, dp_shard_size=3))

    def without_a_rank(table: dict[str, Any]) -> None:
        for entry in table.values():
            entry["pieces"] = [piece for piece in entry["pieces"] if piece[2] != "rank-00003.safetensors"]

    edit(checkpoint / "pieces.json", without_a_rank)
    sign_table(checkpoint)
    with pytest.raises(ValueError, match=r"has \d+ of \d+ elements of master"):
        resume(checkpoint, engine=SlicedEngine(Layout(), 0))


def test_overlapping_slices_are_refused(tmp_path: Path) -> None:
    shape = torch.Size([6, 4])
    parts = columns_of(shape, (0, 3), (2, 4))
    with pytest.raises(ValueError, match="has 30 of 24 elements of master x"):
        Pieces(write(tmp_path / "x", torch.randn(shape), [(part, []) for part in parts])).read("x")


# ------------------------------------------------------------------------------------------------ what is around


def test_format_2_is_read(tmp_path: Path) -> None:
    """It knew no slices, and pieces of three items."""
    checkpoint = save(tmp_path, Layout(dp_shard_size=3))

    def older(table: dict[str, Any]) -> None:
        for entry in table.values():
            assert "slices" not in entry
            entry["pieces"] = [piece[:3] for piece in entry["pieces"]]

    edit(checkpoint / "pieces.json", older)
    sign_table(checkpoint)
    edit(checkpoint / "checkpoint.json", lambda index: index.update(format=2))
    for layout in LAYOUTS:
        assert_resumes(checkpoint, layout)
    edit(checkpoint / "checkpoint.json", lambda index: index.update(format=1))
    with pytest.raises(ValueError, match="has format 1; this version reads 2 to 3"):
        Pieces(checkpoint)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exports_are_of_whole_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr("fourfold.checkpoint.files.CHUNK", 11)  # what the writer asks for at a time
    checkpoint = save(tmp_path, Layout(tp_size=4, dp_shard_size=2), dtype=torch.bfloat16)
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "config.json").write_text(json.dumps({"dtype": str(dtype).removeprefix("torch.")}))
    folder = export(checkpoint, source=tmp_path / "source", target=tmp_path / "export")
    exported = load_file(folder / "model.safetensors")
    assert exported.keys() == SHAPES.keys()
    assert all(torch.equal(exported[name], whole.to(dtype)) for name, whole in tensors("master").items())
    folder = export_universal(checkpoint, target=tmp_path / "universal") / "global_step4" / "zero"
    for file, kind in (("fp32", "master"), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq")):
        for name, whole in tensors(kind).items():
            assert torch.equal(torch.load(folder / name / f"{file}.pt")["param"], whole), (kind, name)


def test_a_fragment_of_padding_only_vanishes() -> None:
    """The last of four ranks holds nothing of a vocabulary of 5."""
    found: dict[int, list[Fragment]] = {}
    for rank in range(4):
        engine = SlicedEngine(Layout(tp_size=4), rank)
        assert engine.module["embed"].shape == (2, 6)
        found[rank] = [fragment for fragment in engine.fragments() if fragment.name == "embed"]
    assert [[fragment.count for fragment in found[rank]] for rank in range(4)] == [[12], [12], [6], []]
    assert all(fragment.shape == (5, 6) for fragments in found.values() for fragment in fragments)
