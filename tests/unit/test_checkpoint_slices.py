"""Checkpoints of tensors that tensor parallelism cuts: any ranks' slices from any other ranks' slices, bit by bit."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fourfold.checkpoint import pieces as pieces_module
from fourfold.checkpoint.export import export
from fourfold.checkpoint.files import digest_of
from fourfold.checkpoint.pieces import Pieces
from fourfold.checkpoint.resume import resume
from fourfold.checkpoint.universal import export_universal
from fourfold.layout import Layout
from fourfold.zero.engine import Fragment
from tests.unit.sliced_ranks import KINDS, SHAPES, Reads, SlicedEngine, save, tensors

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


def test_a_rank_that_did_not_write_is_missed(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, Layout(tp_size=2, dp_shard_size=3))

    def without_a_rank(table: dict[str, Any]) -> None:
        for entry in table.values():
            entry["pieces"] = [piece for piece in entry["pieces"] if piece[2] != "rank-00003.safetensors"]

    edit(checkpoint / "pieces.json", without_a_rank)
    sign_table(checkpoint)
    with pytest.raises(ValueError, match=r"has \d+ of \d+ elements of master"):
        resume(checkpoint, engine=SlicedEngine(Layout(), 0))


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
