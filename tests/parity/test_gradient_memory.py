"""Gradient elements counted in the live tensors of every rank, against the plan; and the partition of optimizer state."""

from pathlib import Path
from typing import Any

import pytest

from fourfold.layout import Layout
from fourfold.schema import Precision, TrainConfig, ZeroConfig
from fourfold.zero import deepspeed_internals
from tests.parity.zero_ranks import build, micro_batches
from tests.pool import RankPool
from tests.reference import batches, tiny_model
from tools.bench.gradients import measure, planned

ACCUMULATION, BUCKET = 4, 4000  # above the largest parameter, below all of them
FLAT_COPY = not hasattr(deepspeed_internals, "use_flat_gradients")  # stage 3 copies the shard for the optimizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("untied")
    tiny_model().save_pretrained(path)
    return path


def held_by(rank: int, *, folder: Path, config: TrainConfig, layout: Layout) -> dict[str, Any]:
    engine, mesh = build(rank, folder=folder, config=config, layout=layout)
    batch = batches(0, rows=ACCUMULATION * layout.data_size)
    targets = int((batch["labels"] != -100).sum())
    return measure(engine, micro_batches(batch, mesh=mesh, count=ACCUMULATION), targets=targets)


LAYOUTS = {2: Layout(dp_shard_size=2), 4: Layout(dp_shard_size=4), "2x2": Layout(dp_shard_size=2, dp_replicate_size=2)}


WAYS = [  # (stage, two buckets, precision, layout): all of them on two ranks, on four with every pair of the others
    (stage, overlap, precision, layout)
    for stage in (2, 3)
    for overlap in (False, True)
    for precision in (Precision.fp32, Precision.bf16)
    for layout in LAYOUTS
    if layout == 2 or (overlap == (precision is Precision.bf16)) == ((layout == 4) == (stage == 2))
]


@pytest.mark.parametrize(("stage", "overlap", "precision", "layout"), WAYS)
def test_shard_and_bucket_as_planned(
    ranks: RankPool, folder: Path, stage: int, overlap: bool, precision: Precision, layout: int | str
) -> None:
    mesh = LAYOUTS[layout]
    zero = ZeroConfig(stage=stage, reduce_bucket_size=BUCKET, allgather_bucket_size=BUCKET, overlap_comm=overlap)
    config = TrainConfig(name="memory", precision=precision, zero=zero)
    for found in ranks.run(mesh.world_size, held_by, folder=folder, config=config, layout=mesh):
        plan = planned(
            found["groups"],
            stage=stage,
            shards=mesh.partition_size,
            bucket=BUCKET,
            buckets=2 if overlap else 1,
            accumulation=ACCUMULATION,
            flat_copy=FLAT_COPY,
        )
        assert found["held"] == plan
        assert plan.between - (BUCKET if stage == 3 else 0) < found["parameters"] / mesh.partition_size * 1.01
        moments = found["state"] / (2 * found["parameters"])
        assert moments == pytest.approx(1 / mesh.partition_size, rel=0.01)
