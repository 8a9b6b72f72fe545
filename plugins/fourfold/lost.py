"""Who is gone, when communication breaks: the rank, its place in the layout, and what it had of the model.

Those who live meet an error that names a socket at best. Launchers name the process that died, but not its place.
"""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch.distributed as dist

from fourfold.checkpoint.board import LATE, Board, RankLost
from fourfold.layout import AXES, Layout
from fourfold.pipeline.schedules import stages_of
from fourfold.schema import PipelineConfig


@contextmanager
def lost_ranks_named(board: Board, *, layout: Layout, pipeline: PipelineConfig) -> Iterator[None]:
    """An error of communication inside the context gets a note for each rank that is gone; that takes LATE seconds."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, RankLost) or _is_of_communication(error):
            with suppress(Exception):  # the store may be gone as well
                for rank in board.lost():
                    error.add_note(
                        f"fourfold: {describe(rank, layout=layout, pipeline=pipeline)} has given no sign of life for "
                        f"{LATE:.0f} s. It was killed, or its server is gone; the launcher's lines about it may say why."
                    )
        raise


def describe(rank: int, *, layout: Layout, pipeline: PipelineConfig) -> str:
    """`rank 3 (tp 1, pp 1: stages 1 and 2)`; axes of size 1 are left out."""
    place = layout.coordinate(rank)
    axes = ", ".join(f"{axis} {place[axis]}" for axis in AXES if layout.size(axis) > 1)
    if layout.pp_size == 1:
        return f"rank {rank} ({axes or 'alone'})"
    stages = stages_of(place["pp"], ranks=layout.pp_size, settings=pipeline)
    return f"rank {rank} ({axes}: stage{'s' * (len(stages) > 1)} {' and '.join(map(str, stages))})"


def _is_of_communication(error: BaseException) -> bool:
    """Whether it left torch.distributed: an error of this rank alone, memory for one, does not."""
    frames = traceback.extract_tb(error.__traceback__)
    return Path(frames[-1].filename).is_relative_to(Path(dist.__file__).parent)
