"""How a rank that is gone is named, and which errors ask for it."""

import threading
from typing import Any

import pytest
import torch.distributed as dist

from fourfold.checkpoint import board as board_module
from fourfold.checkpoint.board import Board, RankLost
from fourfold.layout import Layout
from fourfold.lost import describe, lost_ranks_named
from fourfold.schema import PipelineConfig


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
    """Of two ranks, the second is gone."""

    def __init__(self) -> None:
        self.asked = 0

    def lost(self) -> list[int]:
        self.asked += 1
        return [1]


def notes_of(error: Exception, board: Any) -> list[str]:
    with (
        pytest.raises(type(error)) as caught,
        lost_ranks_named(board, layout=Layout(pp_size=2), pipeline=PipelineConfig()),
    ):
        raise error
    return getattr(caught.value, "__notes__", [])


def test_only_errors_of_communication_ask() -> None:
    board = Silent()
    (note,) = notes_of(RankLost("rank 1"), board)
    assert "rank 1 (pp 1: stage 1) has given no sign of life" in note
    assert notes_of(RuntimeError("out of memory"), board) == notes_of(ValueError("yours"), board) == []
    assert board.asked == 1


def test_who_leaves_is_not_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four: the first two find the connection broken, the third is busy and alive, the last is gone."""
    monkeypatch.setattr(board_module, "LATE", 0.5)
    monkeypatch.setattr(board_module, "BEAT", 0.1)
    store = dist.HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    boards = [Board(rank=rank, world_size=4) for rank in range(4)]
    boards[3].__exit__()
    found: dict[int, list[int]] = {}
    threads = [threading.Thread(target=lambda rank=rank: found.update({rank: boards[rank].lost()})) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    threads[1].join()
    boards[1].__exit__()
    threads[0].join()
    assert found == {0: [3], 1: [3]}
    assert boards[2].lost() == [3]  # later: the others have said that they left
    for board in boards[:3:2]:
        board.__exit__()
