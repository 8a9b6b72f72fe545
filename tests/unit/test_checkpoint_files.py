"""Safetensors files written as a stream, digests, and the folder of checkpoints."""

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file

from fourfold.checkpoint import board as board_module
from fourfold.checkpoint import files
from fourfold.checkpoint.board import Board, RankLost
from fourfold.checkpoint.files import Entry, digest_of, write_safetensors
from fourfold.checkpoint.kept import complete_checkpoints, leftovers, newest, put_in_place, rotate, set_aside, tidy
from fourfold.checkpoint.pieces import FORMAT, KEPT


def entry(name: str, tensor: torch.Tensor, *, dtype: torch.dtype | None = None) -> Entry:
    flat = tensor.reshape(-1)
    return Entry(name, tuple(tensor.shape), dtype or tensor.dtype, lambda start, stop: flat[start:stop])


@pytest.mark.parametrize("chunk", [1, 7, 10_000])
def test_what_is_streamed_is_what_safetensors_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(files, "CHUNK", chunk)
    tensors = {
        "a": torch.randn(3, 5),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0),
        "not contiguous": torch.randn(4, 6).t(),
        "half": torch.randn(9).half(),
    }
    entries = [entry(name, tensor) for name, tensor in tensors.items()]
    entries.append(entry("rounded", tensors["a"], dtype=torch.bfloat16))
    written = write_safetensors(tmp_path / "x.safetensors", entries, metadata={"format": "pt"})
    loaded = load_file(tmp_path / "x.safetensors")
    assert loaded.keys() == {*tensors, "rounded"}
    for name, tensor in tensors.items():
        assert loaded[name].dtype is tensor.dtype
        assert torch.equal(loaded[name], tensor), name
    assert torch.equal(loaded["rounded"], tensors["a"].bfloat16())
    assert digest_of(tmp_path / "x.safetensors") == written
    with safe_open(tmp_path / "x.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_a_digest_sees_one_bit(tmp_path: Path) -> None:
    written = write_safetensors(tmp_path / "x", [entry("a", torch.zeros(1000))])
    content = bytearray((tmp_path / "x").read_bytes())
    content[-100] ^= 1
    (tmp_path / "x").write_bytes(content)
    found = digest_of(tmp_path / "x")
    assert found.bytes == written.bytes
    assert found.xxh3 != written.xxh3


# ------------------------------------------------------------------------------------------------- the folder


def checkpoints(folder: Path, *steps: int) -> None:
    for step in steps:
        path = folder / f"step-{step:08d}"
        path.mkdir()
        index = {"format": FORMAT, "progress": {}, "files": {}, "kinds": {}, "run": {}, KEPT: step in (20, 30)}
        (path / "checkpoint.json").write_text(json.dumps(index))


def numbers(folder: Path) -> list[int]:
    return [int(path.name[-8:]) for path in complete_checkpoints(folder)]


@pytest.mark.parametrize(
    ("keep_last", "left"),
    [
        (None, [10, 20, 30, 40, 50]),
        (2, [20, 30, 40, 50]),
        (1, [20, 30, 50]),
        (0, [20, 30, 50]),
        (9, [10, 20, 30, 40, 50]),
    ],
)
def test_rotation(tmp_path: Path, keep_last: int | None, left: list[int]) -> None:
    """20 and 30 say that they are kept for ever."""
    checkpoints(tmp_path, 10, 20, 30, 40, 50)
    (tmp_path / "step-00000060").mkdir()  # not complete: does not count, and is not ours to remove
    rotate(tmp_path, keep_last=keep_last, latest=tmp_path / "step-00000050")
    assert numbers(tmp_path) == left
    assert (tmp_path / "step-00000060").is_dir()
    assert not leftovers(tmp_path)


def test_rotation_keeps_what_was_just_written_and_what_is_not_ours(tmp_path: Path) -> None:
    checkpoints(tmp_path, 3, 10, 40, 50)
    copy = tmp_path / "step-00000010-good"
    copy.mkdir()
    (copy / "checkpoint.json").write_text("{}")
    rotate(tmp_path, keep_last=1, latest=tmp_path / "step-00000003")
    assert numbers(tmp_path) == [3, 50]
    assert copy.is_dir()
    assert newest(tmp_path) == tmp_path / "step-00000050"


def test_a_kill_between_two_renames_loses_nothing(tmp_path: Path) -> None:
    checkpoints(tmp_path, 3, 4, 5)
    (tmp_path / "step-00000003").rename(tmp_path / ".step-00000003.old")
    (tmp_path / "step-00000004").rename(tmp_path / ".step-00000004.partial")
    shutil.copytree(tmp_path / "step-00000005", tmp_path / ".step-00000005.old")
    (tmp_path / ".step-00000006.partial").mkdir()
    tidy(tmp_path)
    assert numbers(tmp_path) == [3, 4, 5]
    assert not leftovers(tmp_path)


def test_a_rename_that_fails_puts_the_old_one_back(tmp_path: Path) -> None:
    checkpoints(tmp_path, 3)
    with pytest.raises(FileNotFoundError):
        put_in_place(tmp_path / ".step-00000003.partial", tmp_path / "step-00000003")
    assert numbers(tmp_path) == [3]


def test_a_folder_takes_the_place_of_another(tmp_path: Path) -> None:
    checkpoints(tmp_path, 3)
    aside = tmp_path / ".step-00000003.partial"
    aside.mkdir()
    (aside / "checkpoint.json").write_text("new")
    assert leftovers(tmp_path) == [aside]
    put_in_place(aside, tmp_path / "step-00000003")
    assert (tmp_path / "step-00000003" / "checkpoint.json").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


def test_damaged_ones_are_kept_beside(tmp_path: Path) -> None:
    for name in ("broken-step-00000003", "broken-step-00000003.2"):
        checkpoints(tmp_path, 3)
        assert set_aside(tmp_path / "step-00000003").name == name
    assert newest(tmp_path) is None


# -------------------------------------------------------------------------------------------------- the board


@pytest.fixture
def boards(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Board]]:
    """Of two ranks that share a store and are impatient."""
    store = dist.HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(board_module, "SILENCE", 0.5)
    monkeypatch.setattr(board_module, "BEAT", 0.05)
    with Board(rank=0, world_size=2) as first, Board(rank=1, world_size=2) as second:
        yield [first, second]


def test_notices_reach_other_ranks(boards: list[Board]) -> None:
    first, second = boards
    found: list[object] = []
    reader = threading.Thread(target=lambda: found.append(second.gather("x", {"from": 1})))
    reader.start()
    assert first.gather("x", None) == [None, {"from": 1}]
    reader.join()
    assert found == [[None, {"from": 1}]]


def test_who_gives_no_sign_of_life_is_not_waited_for(boards: list[Board]) -> None:
    boards[1].__exit__()
    with pytest.raises(RankLost, match="rank 1 has given no sign of life"):
        boards[0].read("never", of=1)


def test_who_lives_is_waited_for(boards: list[Board]) -> None:
    first, second = boards
    late = threading.Timer(1.5, lambda: second.post("late", 7))
    late.start()
    assert first.read("late", of=1) == 7
