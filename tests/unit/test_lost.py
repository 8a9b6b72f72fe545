"""How a rank that is gone is named, and which errors ask for it."""

import threading
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from fourfold.checkpoint import board as board_module
from fourfold.checkpoint.board import Board, RankLost
from fourfold.layout import Layout
from fourfold.lost import describe, lost_ranks_named
from fourfold.schema import PipelineConfig
from fourfold.whereabouts import whereabouts


@pytest.mark.parametrize(
    ("rank", "layout", "schedule", "says"),
    [
        (3, Layout(pp_size=2, tp_size=2), "zbv", "rank 3 (tp 1, pp 1: stages 1 and 2)"),
        (5, Layout(pp_size=4, dp_shard_size=2), "1f1b", "rank 5 (pp 1, dp_shard 1: stage 1)"),
        (2, Layout(pp_size=4), "interleaved_1f1b", "rank 2 (pp 2: stages 2 and 6)"),
        (1, Layout(dp_replicate_size=2), "1f1b", "rank 1 (dp_replicate 1)"),
    ],
)
def test_the_place_of_a_rank(rank: int, layout: Layout, schedule: str, says: str) -> None:
    assert describe(rank, layout=layout, pipeline=PipelineConfig(schedule=schedule)) == says


class Silent:
    """Of four ranks, the second is gone and the last at something else."""

    def __init__(self) -> None:
        self.asked = 0

    def missing(self) -> dict[int, str]:
        self.asked += 1
        return {1: "", 3: "loader.py:7 in rows (sleep())"}


def notes_of(error: Exception, board: Any) -> list[str]:
    with (
        pytest.raises(type(error)) as caught,
        lost_ranks_named(board, layout=Layout(tp_size=2, pp_size=2), pipeline=PipelineConfig(), rank=0),
    ):
        raise error
    return getattr(caught.value, "__notes__", [])


def test_only_errors_of_communication_ask() -> None:
    board = Silent()
    gone, busy = notes_of(RankLost("rank 1"), board)
    assert "rank 1 (tp 1, pp 0: stage 0), of the tp group of this rank 0 (0, 1), has given no sign of life" in gone
    assert "rank 3 (tp 1, pp 1: stage 1) lives, but has not come to where the others wait: it is at loader.py:7" in busy
    assert notes_of(RuntimeError("out of memory"), board) == notes_of(ValueError("yours"), board) == []
    assert board.asked == 1
    assert len(notes_of(RuntimeError("[third_party/gloo/tcp] Timed out waiting"), board)) == 2


def boards_of(count: int, monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[Board]:
    monkeypatch.setattr(board_module, "LATE", 0.5)
    monkeypatch.setattr(board_module, "BEAT", 0.1)
    store = dist.HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    return [Board(rank=rank, world_size=count, **options) for rank in range(count)]


def test_who_leaves_is_not_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four: the first two find the connection broken, the third lives and waits for others, the last is gone."""
    monkeypatch.setattr(board_module, "whereabouts", lambda: None)
    boards = boards_of(4, monkeypatch)
    boards[3].__exit__()
    found: dict[int, dict[int, str]] = {}
    threads = [
        threading.Thread(target=lambda rank=rank: found.update({rank: boards[rank].missing()})) for rank in (0, 1)
    ]
    for thread in threads:
        thread.start()
    threads[1].join()
    boards[1].__exit__()
    threads[0].join()
    assert found == {0: {3: ""}, 1: {3: ""}}
    assert boards[2].missing() == {3: ""}  # later: the others have said that they left
    for board in boards[:3:2]:
        board.__exit__()


def test_who_lives_elsewhere_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board_module, "whereabouts", lambda: "loader.py:7 in rows")
    boards = boards_of(2, monkeypatch)
    assert boards[0].missing() == {1: "loader.py:7 in rows"}
    for board in boards:
        board.__exit__()


def test_the_first_rank_tells_once_who_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board_module, "QUIET", 1.0)
    told: list[tuple[int, float]] = []
    boards = boards_of(3, monkeypatch, quiet=lambda rank, seconds: told.append((rank, seconds)))
    boards[2].__exit__()
    time.sleep(3.0)
    assert told == [(2, 1.0)]
    for board in boards[:2]:
        board.__exit__()


def wait_for_another(handle: Any) -> None:
    handle.wait()


@pytest.mark.parametrize(("at_work", "says"), [(time.sleep, "sleeps for 0.5 s"), (wait_for_another, None)])
def test_where_the_main_thread_is(at_work: Any, says: str | None) -> None:
    """A handle's wait() is a call into a library: here one that sleeps in C, as they do."""
    found: list[str | None] = []
    watcher = threading.Timer(0.2, lambda: found.append(whereabouts()))
    watcher.start()
    if says:
        at_work(0.5)  # sleeps for 0.5 s
    else:
        at_work(SimpleNamespace(wait=partial(time.sleep, 0.5)))
    watcher.join()
    (place,) = found
    assert place is None if says is None else says in str(place)
