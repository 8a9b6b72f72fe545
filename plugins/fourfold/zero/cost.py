"""What ZeRO holds and sends, as formulas of the parameters a rank has. Pure: imports no torch.

Legend: P elements of the parameters of a rank, s ranks of the shard group (dp_shard x cp), r replicas of it.
"""

from collections.abc import Sequence

from fourfold.schema import Precision, ZeroConfig

ALIGNMENT = 2  # DeepSpeed 0.19.8's nccl_start_alignment_factor: elements that a rank's part of a group is a multiple of


def shard_elements(groups: Sequence[Sequence[int]], *, stage: int, ranks: int) -> int:
    """Master weights that one rank keeps of parameter `groups` (elements of each parameter), padding included; equal on all.

    Stages 0 to 2 lay a group out flat and fill it up to a multiple of 2 s; stage 3 fills every parameter up to one of s.
    """
    if stage == 3:
        return sum(-(-elements // ranks) for group in groups for elements in group)
    return sum(-(-sum(group) // (ALIGNMENT * ranks)) * ALIGNMENT for group in groups if group)


def reductions(zero: ZeroConfig, *, pp_size: int, micro_batches: int) -> int:
    """Of the gradients in an update: once, or where shards alone are kept once a micro-batch (zero/engine.py)."""
    return 1 if zero.stage < 2 or pp_size > 1 else micro_batches


def sent_bytes(
    groups: Sequence[Sequence[int]],
    *,
    zero: ZeroConfig,
    precision: Precision,
    ranks: int,
    replicas: int,
    micro_batches: int,
    pp_size: int,
    embedding: int = 0,
) -> dict[str, int]:
    """Bytes that a rank sends in an update, by purpose, to its shard group and, `replicas`, to those that have the same shard.

    Stages 0 to 2 all-reduce the gradients (2 (s-1)/s P, whole buckets: DeepSpeed's reduce_scatter option is no cheaper there) and
    gather the new weights once, (s-1)/s P. Stage 3 scatters the sums of the gradients, (s-1)/s P, and gathers the weights
    (`gathered_elements`; `embedding` are the elements of its table on a rank of a pipeline). Replicas all-reduce the averaged
    shard, 2 (r-1)/r P/s.
    """
    weight = 4 if precision is Precision.fp32 else 2
    wide = 4 if precision is Precision.fp32 or zero.fp32_reduction else 2
    summed = 4 if precision is Precision.fp32 or zero.fp32_accumulation else 2
    share = shard_elements(groups, stage=zero.stage, ranks=ranks)
    elements = sum(map(sum, groups))
    times = reductions(zero, pp_size=pp_size, micro_batches=micro_batches)
    found = {"replicas": 2 * share * summed * (replicas - 1) // replicas}
    if zero.stage == 3:
        found["gradients"] = times * share * (ranks - 1) * wide
        gathered = gathered_elements(
            groups, zero=zero, ranks=ranks, micro_batches=micro_batches, pp_size=pp_size, embedding=embedding
        )
        found["weights"] = gathered * (ranks - 1) * weight
    else:
        found["gradients"] = times * 2 * elements * wide * (ranks - 1) // ranks
        found["weights"] = share * (ranks - 1) * weight
    return {purpose: sent for purpose, sent in found.items() if sent}


def gathered_elements(
    groups: Sequence[Sequence[int]], *, zero: ZeroConfig, ranks: int, micro_batches: int, pp_size: int, embedding: int
) -> int:
    """Of its shard, that a rank sends to each other one in an update at stage 3, from the third micro-batch of a run on: before,
    DeepSpeed has not seen the order of the modules.

    Once a micro-batch if all is kept for its next use (`keeps_all`); what stays whole (zero.stage3_param_persistence_threshold)
    once an update. A larger model's twice, forward and backward, at most, and with recomputation three times. In a pipeline, of
    which DeepSpeed never sees the order, each pass gathers, but for the embedding, which stays from a backward pass to the next
    pass; without recomputation that is exact.
    """
    share = shard_elements(groups, stage=3, ranks=ranks)
    if pp_size > 1:
        return 2 * micro_batches * share - (micro_batches - 1) * -(-embedding // ranks)
    if not keeps_all(groups, zero=zero):
        return 2 * micro_batches * share
    whole = [[n for n in group if n <= zero.stage3_param_persistence_threshold] for group in groups]
    return micro_batches * share - (micro_batches - 1) * shard_elements(whole, stage=3, ranks=ranks)


def keeps_all(groups: Sequence[Sequence[int]], *, zero: ZeroConfig) -> bool:
    """Between two uses of a parameter lie all others, forward, again and backward, at most."""
    return 3 * sum(map(sum, groups)) <= zero.stage3_max_reuse_distance
