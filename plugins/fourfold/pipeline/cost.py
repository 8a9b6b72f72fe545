"""Bytes that a pipeline sends, as formulas of its schedule. Pure: imports no torch."""

from collections import Counter

from fourfold.pipeline.schedules import rank_of, stages_per_rank
from fourfold.schema import PipelineConfig


def bytes_to_send(
    settings: PipelineConfig, *, rank: int, ranks: int, micro_batches: int, hidden_bytes: int
) -> dict[int, int]:
    """By rank: hidden[B, s, D] of each micro-batch over each border once, and as much gradient back."""
    total = ranks * stages_per_rank(settings)
    owner = [rank_of(stage, ranks=ranks, settings=settings) for stage in range(total)]
    borders = [
        pair for stage in range(total - 1) for pair in (owner[stage : stage + 2], owner[stage : stage + 2][::-1])
    ]
    found = Counter(to for of, to in borders if of == rank and to != rank)
    return {to: count * micro_batches * hidden_bytes for to, count in found.items()}
