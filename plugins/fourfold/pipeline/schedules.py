"""The schedules of torch.distributed.pipelining under the field's names, and what each needs. Pure: imports no torch.

A rank holds one stage, several in a loop (stage s on rank s mod p), or two in a V (s and 2p-1-s). Sources: GPipe
(arXiv:1811.06965), 1F1B (PipeDream-Flush, arXiv:2006.09503), interleaved 1F1B (arXiv:2104.04473), breadth-first
(arXiv:2211.05953), zero bubble and its V (arXiv:2401.10241), DualPipe (DeepSeek-V3, arXiv:2412.19437).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import count as count_from

from fourfold.schema import PipelineConfig


class Placement(StrEnum):
    single = "single"
    loop = "loop"
    v = "v"


@dataclass(frozen=True)
class Schedule:
    """`class_name` in torch.distributed.pipelining; `splits_backward`: weight gradients are computed on their own."""

    class_name: str
    placement: Placement
    splits_backward: bool = False


SCHEDULES = {
    "gpipe": Schedule("ScheduleGPipe", Placement.single),
    "1f1b": Schedule("Schedule1F1B", Placement.single),
    "looped_bfs": Schedule("ScheduleLoopedBFS", Placement.loop),
    "interleaved_1f1b": Schedule("ScheduleInterleaved1F1B", Placement.loop),
    "zero_bubble": Schedule("ScheduleInterleavedZeroBubble", Placement.loop, splits_backward=True),
    "zbv": Schedule("ScheduleZBVZeroBubble", Placement.v, splits_backward=True),
    "dualpipe_v": Schedule("ScheduleDualPipeV", Placement.v, splits_backward=True),
}


def stages_per_rank(settings: PipelineConfig) -> int:
    """As wanted, or what the schedule is made for: 1, or 2 in a loop or a V."""
    default = 1 if SCHEDULES[settings.schedule].placement is Placement.single else 2
    return default if settings.virtual_stages is None else settings.virtual_stages


def stages_of(rank: int, *, ranks: int, settings: PipelineConfig) -> list[int]:
    """Stages that pipeline rank `rank` holds, in order."""
    count = stages_per_rank(settings)
    if SCHEDULES[settings.schedule].placement is Placement.v:
        return [rank, 2 * ranks - 1 - rank]
    return [rank + ranks * number for number in range(count)]


def rank_of(stage: int, *, ranks: int, settings: PipelineConfig) -> int:
    if SCHEDULES[settings.schedule].placement is Placement.v:
        return min(stage, 2 * ranks - 1 - stage)
    return stage % ranks


def unknown(settings: PipelineConfig) -> Iterator[str]:
    if settings.schedule not in SCHEDULES:
        yield f"pipeline.schedule={settings.schedule}: use one of {', '.join(SCHEDULES)}."


def refusals(
    settings: PipelineConfig, *, ranks: int, micro_batches: int, zero_stage: int = 1, rows: int = 1
) -> Iterator[str]:
    """Why a known schedule cannot run with so many pipeline ranks and micro-batches, of `rows` rows over all data ranks;
    all reasons."""
    schedule = SCHEDULES[settings.schedule]
    count = stages_per_rank(settings)
    name = f"pipeline.schedule={settings.schedule}"
    if count < 1:
        yield f"pipeline.virtual_stages={count}: use 1 or more."
        return
    if schedule.placement is Placement.single and count != 1:
        yield f"{name} has one stage a rank, not pipeline.virtual_stages={count}: use 1, or interleaved_1f1b."
    if schedule.placement is Placement.v and count != 2:
        yield f"{name} has two stages a rank, not pipeline.virtual_stages={count}: use 2."
    least = {"1f1b": ranks, "dualpipe_v": 2 * ranks}.get(settings.schedule, 1)
    if micro_batches < least:
        yield (
            f"{name} over {ranks} ranks needs {least} micro-batches, and an update has {micro_batches}: use global_batch_size="
            f"{least * rows} or more, or pipeline.schedule=gpipe."
        )
    if settings.schedule in ("interleaved_1f1b", "zero_bubble") and not _fills_rounds(micro_batches, ranks):
        below = next(number for number in range(micro_batches, 0, -1) if _fills_rounds(number, ranks))
        above = next(number for number in count_from(micro_batches) if _fills_rounds(number, ranks))
        yield (
            f"{name} over {ranks} ranks goes in {micro_batches // ranks} rounds of equally many micro-batches, and an update has "
            f"{micro_batches}: use global_batch_size={below * rows} or {above * rows}."
        )
    if schedule.splits_backward and zero_stage == 3:
        yield (
            f"{name} computes weight gradients on their own, which DeepSpeed's zero.stage=3 does not see: use "
            f"zero=stage2, or pipeline.schedule=interleaved_1f1b."
        )


def _fills_rounds(micro_batches: int, ranks: int) -> bool:
    return micro_batches % max(1, micro_batches // ranks) == 0
