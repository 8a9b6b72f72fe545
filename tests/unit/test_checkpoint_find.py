"""Whether a run may go on from a checkpoint, decided from the index alone: what differs is named."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from fourfold.checkpoint.find import ToResume, checkpoint_to_resume, data_identity, settings_that_must_not_change
from fourfold.checkpoint.pieces import FORMAT
from fourfold.schema import DataConfig, SourceKind, TrainConfig

SHAPES = {"embed": [96, 32], "norm": [32]}


def config(tmp_path: Path, **changes: Any) -> TrainConfig:
    data = DataConfig(kind=SourceKind.jsonl, path="a.jsonl")
    return TrainConfig(**{"name": "x", "output_dir": str(tmp_path), "resume": "auto", "data": data, **changes})


def identity(run: TrainConfig, **changes: Any) -> dict[str, Any]:
    known = {"digest": "d1", "rows": 100, "tokens": 900, "vocabulary": 96, "tokenizer": "t1"}
    return data_identity(run.data, **{**known, **changes})


def checkpoint(folder: Path, run: TrainConfig, *, step: int, **data: Any) -> Path:
    path = folder / "checkpoints" / f"step-{step:08d}"
    path.mkdir(parents=True)
    about = {"settings": settings_that_must_not_change(run), "data": identity(run, **data)}
    index = {"format": FORMAT, "progress": {"step": step}, "files": {}, "kinds": {}, "run": about}
    (path / "checkpoint.json").write_text(json.dumps(index))
    (path / "pieces.json").write_text(json.dumps({name: {"shape": shape} for name, shape in SHAPES.items()}))
    return path


def found(run: TrainConfig, *, shapes: dict[str, Any] | None = None, total: int = 10, **data: Any) -> ToResume | None:
    return checkpoint_to_resume(run, total_steps=total, shapes=shapes or SHAPES, identity=identity(run, **data))


def test_nothing_to_go_on_from(tmp_path: Path) -> None:
    assert found(config(tmp_path)) is None
    checkpoint(tmp_path, config(tmp_path), step=2)
    assert found(config(tmp_path, resume="none")) is None


def test_auto_takes_the_newest_and_knows_the_others(tmp_path: Path) -> None:
    run = config(tmp_path)
    paths = [checkpoint(tmp_path, run, step=step) for step in (2, 4, 6)]
    (paths[2] / "checkpoint.json").write_text("{")
    (tmp_path / "checkpoints" / ".step-00000008.partial").mkdir()
    wanted = found(run)
    assert wanted is not None
    assert wanted.candidates == [paths[1], paths[0]]
    ((path, why),) = wanted.passed_over
    assert path == paths[2]
    assert "checkpoint.json is damaged" in why


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"global_batch_size": 16}, "global_batch_size=16 (there 8)"),
        ({"seq_len": 4096}, "seq_len=4096 (there 2048)"),
        ({"seed": 1}, "seed=1 (there 0)"),
    ],
)
def test_settings(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    checkpoint(tmp_path, config(tmp_path), step=2)
    with pytest.raises(ValueError, match="is of a run with other settings") as refused:
        found(config(tmp_path, **changes))
    assert says in str(refused.value)


@pytest.mark.parametrize("sizes", [{"tp_size": 2}, {"tp_size": 4, "cp_size": 2}, {"dp_replicate_size": 2}])
def test_another_layout_goes_on(tmp_path: Path, sizes: dict[str, int]) -> None:
    """In either direction; shapes are compared as the whole tensors have them."""
    path = checkpoint(tmp_path, config(tmp_path, **sizes), step=2)
    for run in (config(tmp_path), config(tmp_path, **sizes), config(tmp_path, tp_size=8)):
        assert found(run) == ToResume([path])


def test_the_same_rows_from_elsewhere_are_the_same_data(tmp_path: Path) -> None:
    checkpoint(tmp_path, config(tmp_path), step=2)
    moved = config(tmp_path, data=DataConfig(kind=SourceKind.jsonl, path="/other/place.jsonl", num_proc=4))
    assert found(moved) is not None


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"digest": "d2", "rows": 101}, "changed data (101 rows of 900 tokens in all, there 100 of 900)"),
        ({"digest": "d2", "vocabulary": 97, "tokenizer": "t2"}, "a vocabulary of 97 tokens (there 96)"),
        ({"digest": "d2", "tokenizer": "t2"}, "another tokenizer"),
        ({"digest": None}, None),
        ({"digest": None, "tokenizer": "t2"}, "another tokenizer"),
        ({"digest": None, "state": "s2"}, "changed files of the stream"),
    ],
)
def test_changed_data(tmp_path: Path, data: dict[str, Any], says: str | None) -> None:
    checkpoint(tmp_path, config(tmp_path), step=2)
    if says is None:
        assert found(config(tmp_path), **data) is not None
        return
    with pytest.raises(ValueError, match="position in the data") as refused:
        found(config(tmp_path), **data)
    assert says in str(refused.value)


def test_a_changed_setting_of_the_data_is_named(tmp_path: Path) -> None:
    checkpoint(tmp_path, config(tmp_path), step=2)
    other = config(tmp_path, data=DataConfig(kind=SourceKind.jsonl, path="a.jsonl", max_documents=3))
    with pytest.raises(ValueError, match=r"data\.max_documents=3 \(there None\)"):
        found(other, digest="d2")


def test_a_new_place_is_not_blamed_for_new_content(tmp_path: Path) -> None:
    checkpoint(tmp_path, config(tmp_path), step=2)
    with pytest.raises(ValueError, match="changed data") as refused:
        found(config(tmp_path, data=DataConfig(kind=SourceKind.jsonl, path="b.jsonl")), digest="d2")
    assert "data.path" not in str(refused.value)


def test_another_model(tmp_path: Path) -> None:
    checkpoint(tmp_path, config(tmp_path), step=2)
    with pytest.raises(ValueError, match=r"its embed has shape \[96, 32\], this model's \[97, 32\]"):
        found(config(tmp_path), shapes={**SHAPES, "embed": [97, 32]})
    with pytest.raises(ValueError, match=r"its bias has shape none, this model's \[4\]"):
        found(config(tmp_path), shapes={**SHAPES, "bias": [4]})


def test_nothing_left_to_do(tmp_path: Path) -> None:
    checkpoint(tmp_path, config(tmp_path), step=10)
    with pytest.raises(ValueError, match="is at update 10 and the run ends at 10: nothing is left to do"):
        found(config(tmp_path))


def test_an_older_one_needs_a_folder_of_its_own(tmp_path: Path) -> None:
    run = config(tmp_path)
    old, _ = (checkpoint(tmp_path, run, step=step) for step in (2, 4))
    with pytest.raises(ValueError, match=r"holds later checkpoints \(step-00000004\)"):
        found(config(tmp_path, resume=str(old)))
    assert found(config(tmp_path / "new", resume=str(old))) == ToResume([old])
    newest = found(config(tmp_path / "new", resume=str(tmp_path)))
    assert newest is not None
    assert newest.candidates[0].name == "step-00000004"


@pytest.mark.parametrize(
    ("name", "step", "refused"), [("best", 2, True), ("step-00000009", 2, True), ("best", 6, False)]
)
def test_what_a_copy_is_called_does_not_matter(tmp_path: Path, name: str, step: int, refused: bool) -> None:
    run = config(tmp_path)
    checkpoint(tmp_path, run, step=4)
    copy = checkpoint(tmp_path / "elsewhere", run, step=step).rename(tmp_path / name)
    if refused:
        with pytest.raises(ValueError, match=r"holds later checkpoints \(step-00000004\)"):
            found(config(tmp_path, resume=str(copy)))
    else:
        assert found(config(tmp_path, resume=str(copy))) == ToResume([copy])


def test_own_copies_are_no_checkpoints(tmp_path: Path) -> None:
    run = config(tmp_path)
    path = checkpoint(tmp_path, run, step=4)
    shutil.copytree(path, path.with_name("step-00000008-backup"))
    assert found(run) == ToResume([path])


def test_a_newer_format_is_refused_and_not_called_damaged(tmp_path: Path) -> None:
    run = config(tmp_path)
    checkpoint(tmp_path, run, step=2)
    path = checkpoint(tmp_path, run, step=4) / "checkpoint.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": FORMAT + 1}))
    with pytest.raises(ValueError, match=rf"has format {FORMAT + 1}; this version reads 2 to {FORMAT}"):
        found(run)


def test_every_one_is_damaged(tmp_path: Path) -> None:
    for step in (2, 4):
        (checkpoint(tmp_path, config(tmp_path), step=step) / "pieces.json").unlink()
    with pytest.raises(ValueError, match=r"No checkpoint in .* can be read") as refused:
        found(config(tmp_path))
    assert "step-00000002" in str(refused.value)
    assert "step-00000004" in str(refused.value)
