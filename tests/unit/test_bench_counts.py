"""The arithmetic of tools/bench: plans of gradient memory, paired ratios, targets handed to both sides."""

import pytest
import torch

from tools.bench.common import median_ratio, packed_rows, unshifted
from tools.bench.gradients import Held, planned, shard_elements

GROUPS = [[96 * 32, 32 * 32, 48 * 32], [32, 32, 7]]


def test_stages_0_to_2_cut_a_padded_group_and_stage_3_every_parameter() -> None:
    assert shard_elements(GROUPS, stage=2, shards=4) == 5632 // 4 + 18  # 71 elements, padded to 72
    assert shard_elements(GROUPS, stage=3, shards=4) == 5632 // 4 + 8 + 8 + 2
    assert shard_elements(GROUPS, stage=2, shards=1) == 5632 + 72


def test_stages_2_and_3_hold_their_shard_and_buckets() -> None:
    common = {"shards": 4, "bucket": 4000, "accumulation": 4}
    shard = 1408 + 18
    two = planned(GROUPS, stage=2, buckets=2, flat_copy=False, **common)
    assert two == Held(between=shard, peak=shard + 8000 + 3072, update=shard)
    three = planned(GROUPS, stage=3, buckets=2, flat_copy=True, **common)
    assert three == Held(between=shard + 4000, peak=shard + 4000 + 3072, update=shard + 4000 + 1408)
    assert planned(GROUPS, stage=3, buckets=1, flat_copy=False, **common).update == shard + 4000


def test_stages_0_and_1_hold_whole_gradients_until_the_update() -> None:
    whole = 5632 + 71
    for stage in (0, 1):
        held = planned(GROUPS, stage=stage, shards=2, bucket=4000, buckets=1, accumulation=4, flat_copy=False)
        assert held == Held(between=whole, peak=whole + 3072, update=5632 // 2 + 36)


def test_ratios_are_of_neighbouring_runs() -> None:
    assert median_ratio([2.0, 20.0, 4.0], [1.0, 10.0, 4.0]) == (2.0, 1.0, 2.0)
    middle, low, high = median_ratio([1.0, 1.0, 1.0, 1.0], [1.0, 2.0, 4.0, 8.0])
    assert (middle, low < middle < high) == (0.375, True)


def test_both_sides_get_the_same_targets() -> None:
    batch = packed_rows(3, 16, vocab=50, seed=1)
    theirs = unshifted(batch)["labels"][:, 1:]  # transformers predicts token t + 1 at position t
    assert torch.equal(theirs, batch["labels"][:, :-1])
    assert (batch["labels"][:, -1] == -100).all()
    starts = (batch["position_ids"] == 0).sum(dim=1)
    assert starts.tolist() == [2, 2, 2]
    assert (batch["labels"] >= 0).sum() == pytest.approx(3 * (16 - 2))
