"""What is counted before an update, once over the data axes: targets (the normaliser), tokens, attention pairs."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from fourfold.planner.flops import attention_pairs

REASONS = {"bad_data": "by data that cannot be read", "asked_to_stop": "on request", "out_of_time": "before max_time"}


@dataclass(frozen=True)
class Counts:
    """Sums over all micro-batches of all data ranks."""

    targets: int  # labels that count
    tokens: int  # without padding
    padding: int
    pairs_full: int  # (query, key) pairs that causal attention within documents allows, in one layer
    pairs_windowed: int  # the same under the model's sliding window; 0 if it has none
    stop: str  # why the run has to end here, on some rank; empty if it has not


def count(
    micro_batches: list[dict[str, Tensor]],
    *,
    window: int | None,
    reasons: Mapping[str, bool],
    group: dist.ProcessGroup,
    copies: int,
    device: torch.device,
) -> Counts:
    """Collective over `group`, of which `copies` ranks each have the same micro-batches: those count once. All ranks have to
    be in it: one that saw a reason to stop, alone, would leave the others waiting."""
    lengths = [length for batch in micro_batches for length in document_lengths(batch["document_ids"])]
    mine = torch.tensor(
        [
            sum(int((batch["labels"] >= 0).sum()) for batch in micro_batches),
            sum(lengths),
            sum(batch["input_ids"].numel() for batch in micro_batches) - sum(lengths),
            attention_pairs(lengths),
            attention_pairs(lengths, window=window) if window else 0,
            *(int(reasons.get(key, False)) for key in REASONS),
        ],
        device=device,
    )
    dist.all_reduce(mine, group=group)
    *sums, bad_data, asked, out_of_time = mine.tolist()
    found = zip(REASONS.values(), (bad_data, asked, out_of_time), strict=True)
    stop = next((text for text, ranks in found if ranks), "")
    assert stop or all(one % copies == 0 for one in sums), (sums, copies)  # a rank whose data are bad has none
    targets, tokens, padding, full, windowed = (one // copies for one in sums)
    return Counts(targets, tokens, padding, full, windowed, stop)


def document_lengths(document_ids: Tensor) -> list[int]:
    """Lengths of the documents (document_ids[B, S], padding -1) of all rows."""
    lengths: list[int] = []
    for row in document_ids:
        ids, counts = torch.unique_consecutive(row, return_counts=True)
        lengths += counts[ids >= 0].tolist()
    return lengths
