"""A rank's share of the optimizer state, padding included, and the bytes of an update are those of zero/cost.py."""

from pathlib import Path

import pytest

from fourfold.layout import Layout
from fourfold.schema import OptimConfig, Precision
from fourfold.zero.cost import sent_bytes, shard_elements
from tests.families import save_family
from tests.parity.strategies import settings
from tests.parity.zero_cost_ranks import shares
from tests.pool import RankPool
from tests.reference import batches

ACCUMULATION = 2


FEW = [(2, 1, Precision.fp32), (2, 2, Precision.bf16), (2, 3, Precision.bf16)]
MANY = [(2, 1, Precision.bf16), *((4, stage, Precision.fp32) for stage in (1, 2, 3))]


@pytest.mark.parametrize(
    ("world", "stage", "precision"), [*FEW, *(pytest.param(*one, marks=pytest.mark.slow) for one in MANY)]
)
def test_shares_and_bytes(ranks: RankPool, tmp_path: Path, world: int, stage: int, precision: Precision) -> None:
    """Of a vocabulary and an MLP of odd sizes, so that little divides by the ranks."""
    config = settings(stage=stage, optim=OptimConfig(), precision=precision)
    folder = save_family("llama", tmp_path, vocab_size=97, intermediate_size=50)
    found = ranks.run(
        world,
        shares,
        folder=folder,
        config=config,
        layout=Layout(dp_shard_size=world),
        batch=batches(0, rows=2 * world),
        accumulation=ACCUMULATION,
    )
    groups = found[0]["groups"]
    expected = shard_elements(groups, stage=stage, ranks=world)
    assert [one["masters"] for one in found] == [expected] * world
    formula = sent_bytes(
        groups,
        zero=config.zero,
        precision=precision,
        ranks=world,
        replicas=1,
        micro_batches=ACCUMULATION,
        pp_size=1,
    )
    assert [dict(one["sent"]) for one in found] == [formula] * world
