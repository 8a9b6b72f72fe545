"""Checkpoints of every layout resumed by others: state bit by bit, and the next update of the uninterrupted run."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fourfold.checkpoint.pieces import Pieces
from fourfold.schema import OptimConfig, Precision, TrainConfig
from tests.parity.resume_ranks import resume_from_all, save_after_two, save_many, whole_tensors
from tests.parity.strategies import STRATEGIES, settings
from tests.pool import RankPool
from tests.reference import tiny_model, worst

LAYOUTS = [
    ("zero1", 1),
    ("zero2", 1),
    ("zero3", 1),
    ("dp", 2),
    ("zero1", 2),
    ("zero2", 2),
    ("zero3", 2),
    ("dp", 4),
    ("zero1", 4),
    ("zero2", 4),
    ("zero3", 4),
    ("hsdp1", 4),
    ("hsdp2", 4),
    ("hsdp3", 4),
]
DISTANCES = (0, 3, 5, 8, 10)  # in this list, from a layout to those whose checkpoints it goes on from: itself is one
PAIRS = [(LAYOUTS[(at + far) % len(LAYOUTS)], layout) for at, layout in enumerate(LAYOUTS) for far in DISTANCES]
BF16 = [("zero1", 2), ("zero3", 4), ("hsdp2", 4), ("dp", 2)]


def config(strategy: str, *, precision: Precision = Precision.fp32) -> TrainConfig:
    return settings(stage=STRATEGIES[strategy][0], optim=OptimConfig(max_grad_norm=0.3), precision=precision)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    tiny_model(tied=True).save_pretrained(made)
    return made


Saved = tuple[dict[str, Path], dict[str, dict[str, Any]]]


def save_all(ranks: RankPool, folder: Path, output: Path, *, layouts: list[Any], precision: Precision) -> Saved:
    """({layout: checkpoint}, {layout: the third update}); half of them are saved in the background."""
    checkpoints, thirds = {}, {}
    for number, (strategy, world) in enumerate(layouts):
        name = f"{strategy} on {world}"
        third, *_ = ranks.run(
            world,
            save_after_two,
            folder=folder,
            config=config(strategy, precision=precision),
            layout=STRATEGIES[strategy][1](world),
            output=output / name,
            in_background=number % 2 == 0,
        )
        checkpoints[name], thirds[name] = output / name / "step-00000002", third
    return checkpoints, thirds


@pytest.fixture(scope="module")
def saved(ranks: RankPool, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return save_all(ranks, folder, tmp_path_factory.mktemp("fp32"), layouts=LAYOUTS, precision=Precision.fp32)


@pytest.fixture(scope="module")
def saved_bf16(ranks: RankPool, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return save_all(ranks, folder, tmp_path_factory.mktemp("bf16"), layouts=BF16, precision=Precision.bf16)


def test_pairs_cover_every_kind_of_change() -> None:
    """Each layout five times as source; every number of ranks and every stage to every other, HSDP to and from all."""
    assert all(sum(source == layout for source, _ in PAIRS) == len(DISTANCES) for layout in LAYOUTS)
    assert len({(source[1], target[1]) for source, target in PAIRS}) == 3**2

    def kind(layout: tuple[str, int]) -> tuple[int, bool]:
        return STRATEGIES[layout[0]][0], layout[0].startswith("hsdp")

    kinds = {kind(layout) for layout in LAYOUTS}
    assert len({(kind(source)[0], kind(target)[0]) for source, target in PAIRS}) == 4**2
    found = {(kind(source), kind(target)) for source, target in PAIRS}
    assert all(any((one, other) in found for other in kinds if other[1]) for one in kinds), "into HSDP"
    assert all(any((other, one) in found for other in kinds if other[1]) for one in kinds), "out of HSDP"


@pytest.mark.parametrize(("strategy", "world"), LAYOUTS)
def test_k06_k13_every_layout_goes_on_from_others(
    ranks: RankPool, folder: Path, saved: Saved, strategy: str, world: int
) -> None:
    checkpoints, thirds = saved
    names = [f"{source[0]} on {source[1]}" for source, target in PAIRS if target == (strategy, world)]
    results = ranks.run(
        world,
        resume_from_all,
        folder=folder,
        config=config(strategy),
        layout=STRATEGIES[strategy][1](world),
        checkpoints={name: checkpoints[name] for name in names},
    )
    for result in results:
        assert list(result) == names
        for name, found in result.items():
            want = thirds[name]
            assert not found["wrong"], (name, found["wrong"])
            assert found["loss"] == pytest.approx(want["loss"], rel=1e-6), name
            assert found["norm"] == pytest.approx(want["norm"], rel=1e-5), name
            distance, tensor = worst(found["state"], want["state"])
            assert distance < 1e-4, (name, tensor)
            if name == f"{strategy} on {world}":
                assert (found["loss"], found["norm"]) == (want["loss"], want["norm"])
                assert all(torch.equal(found["state"][key], want["state"][key]) for key in want["state"])


def test_bf16_checkpoints_keep_fp32_masters_and_moments(ranks: RankPool, folder: Path, saved_bf16: Saved) -> None:
    checkpoints, thirds = saved_bf16
    for strategy, world in BF16:
        results = ranks.run(
            world,
            resume_from_all,
            folder=folder,
            config=config(strategy, precision=Precision.bf16),
            layout=STRATEGIES[strategy][1](world),
            checkpoints=checkpoints,
        )
        for name, found in results[0].items():
            assert not found["wrong"], (name, found["wrong"])
            assert found["loss"] == pytest.approx(thirds[name]["loss"], rel=2e-3), name
    for checkpoint in checkpoints.values():
        pieces, masters = Pieces(checkpoint), whole_tensors(checkpoint)
        for name in pieces.shapes():
            assert torch.equal(pieces.read(name, kind="weight"), masters[f"master:{name}"].bfloat16()), name


@pytest.mark.parametrize(("strategy", "world"), BF16)
@pytest.mark.parametrize("precision", [Precision.fp32, Precision.bf16])
def test_nothing_is_written_twice(
    saved: Saved, saved_bf16: Saved, strategy: str, world: int, precision: Precision
) -> None:
    """12 bytes a parameter, and 2 for weights that are not the masters; one replica writes, each rank its own share."""
    checkpoints, _ = saved if precision is Precision.fp32 else saved_bf16
    checkpoint = checkpoints[f"{strategy} on {world}"]
    parameters = sum(tensor.numel() for tensor in tiny_model(tied=True).parameters())
    files = sorted(checkpoint.glob("*.safetensors"))
    layout = STRATEGIES[strategy][1](world)
    assert len(files) == layout.partition_size
    assert sum(data_bytes(file) for file in files) == parameters * (14 if precision is Precision.bf16 else 12)
    listed = json.loads((checkpoint / "checkpoint.json").read_text())["files"]
    assert {*listed, "checkpoint.json"} == {path.name for path in checkpoint.iterdir()}
    assert all((checkpoint / name).stat().st_size == found["bytes"] for name, found in listed.items())


def data_bytes(file: Path) -> int:
    return file.stat().st_size - 8 - int.from_bytes(file.read_bytes()[:8], "little")


@pytest.mark.parametrize("in_background", [False, True])
def test_what_is_kept(ranks: RankPool, folder: Path, tmp_path: Path, in_background: bool) -> None:
    options = {"keep_last": 2, "keep_every": 3, "in_background": in_background}
    said = ranks.run(
        2,
        save_many,
        folder=folder,
        config=config("zero2"),
        layout=STRATEGIES["zero2"][1](2),
        output=tmp_path,
        options=options,
        steps=8,
    )
    assert all("written in" in line for line in said[0])
    assert len(said[0]) == 8
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-0000000{step}" for step in (3, 6, 7, 8)]
