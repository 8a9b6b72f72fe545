"""Who is gone, when communication breaks: the rank, its place in the layout, and what it had of the model.

Those who live meet an error that names a socket at best. Launchers name the process that died, but not its place.
"""

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch.distributed as dist

from fourfold.checkpoint.board import LATE, Board, RankLost
from fourfold.layout import AXES, Layout
from fourfold.pipeline.schedules import stages_of
from fourfold.schema import PipelineConfig, TrainConfig
from fourfold.whereabouts import COMMUNICATION


@contextmanager
def lost_ranks_named(board: Board, *, layout: Layout, pipeline: PipelineConfig, rank: int) -> Iterator[None]:
    """An error of communication inside the context gets a note for each rank that is to blame; that takes LATE seconds."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, RankLost) or _is_of_communication(error):
            with suppress(Exception):  # the store may be gone as well
                for other, where in board.missing().items():
                    error.add_note(
                        f"fourfold: {describe(other, layout=layout, pipeline=pipeline)}"
                        f"{_shared(other, rank, layout=layout)} {_did(where)}"
                    )
        raise


def quiet_rank_told(layout: Layout, config: TrainConfig) -> Callable[[int, float], None]:
    """For a Board: where libraries end a run by themselves when its timeout is over, nothing else would name the rank."""

    def tell(rank: int, seconds: float) -> None:
        print(
            f"fourfold: {describe(rank, layout=layout, pipeline=config.pipeline)} has given no sign of life for {seconds:.0f} s: "
            f"it is stopped or gone. The run ends when others have waited for cluster.timeout={config.cluster.timeout:g} s.",
            file=sys.stderr,
            flush=True,
        )

    return tell


def _did(where: str) -> str:
    if where:
        return f"lives, but has not come to where the others wait: it is at {where}."
    return (
        f"has given no sign of life for {LATE:.0f} s. It was killed or stopped, or its server is gone; the launcher's lines "
        f"about it may say why."
    )


def _shared(other: int, rank: int, *, layout: Layout) -> str:
    """`, of the tp group of this rank 0 (0, 1),` if they differ along one axis alone."""
    mine, theirs = layout.coordinate(rank), layout.coordinate(other)
    differing = [axis for axis in AXES if mine[axis] != theirs[axis]]
    if len(differing) != 1:
        return ""
    members = ", ".join(map(str, layout.group(differing, rank=rank)))
    return f", of the {differing[0]} group of this rank {rank} ({members}),"


def describe(rank: int, *, layout: Layout, pipeline: PipelineConfig) -> str:
    """`rank 3 (tp 1, pp 1: stages 1 and 2)`; axes of size 1 are left out."""
    place = layout.coordinate(rank)
    axes = ", ".join(f"{axis} {place[axis]}" for axis in AXES if layout.size(axis) > 1)
    if layout.pp_size == 1:
        return f"rank {rank} ({axes or 'alone'})"
    stages = stages_of(place["pp"], ranks=layout.pp_size, settings=pipeline)
    return f"rank {rank} ({axes}: stage{'s' * (len(stages) > 1)} {' and '.join(map(str, stages))})"


def _is_of_communication(error: BaseException) -> bool:
    """Whether it left torch.distributed or a backend of it: an error of this rank alone, memory for one, does not."""
    if isinstance(error, dist.DistError) or "/gloo/" in str(error):  # where a backend's handle ends in a library's code
        return True
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return Path(frame.filename).is_relative_to(COMMUNICATION)
