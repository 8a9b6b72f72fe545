"""The ways to spread over n ranks that the parity tests go through."""

from fourfold.layout import Layout
from fourfold.schema import LossConfig, OffloadConfig, OptimConfig, Precision, TrainConfig, ZeroConfig

STRATEGIES = {  # name: (ZeRO stage, layout of n ranks)
    "dp": (0, lambda n: Layout(dp_replicate_size=n)),
    "zero1": (1, lambda n: Layout(dp_shard_size=n)),
    "zero2": (2, lambda n: Layout(dp_shard_size=n)),
    "zero3": (3, lambda n: Layout(dp_shard_size=n)),
    "hsdp1": (1, lambda n: Layout(dp_shard_size=2, dp_replicate_size=n // 2)),
    "hsdp2": (2, lambda n: Layout(dp_shard_size=2, dp_replicate_size=n // 2)),
    "hsdp3": (3, lambda n: Layout(dp_shard_size=2, dp_replicate_size=n // 2)),
}

SPREAD = {  # every way to spread attention over ranks
    "ulysses": "fourfold.context.ulysses.Ulysses",
    "ring": "fourfold.context.ring.Ring",
    "allgather": "fourfold.context.allgather.AllGather",
    "hybrid": "fourfold.context.hybrid.Hybrid",
    "needed_only": "fourfold.context.needed_only.NeededOnly",
}


def settings(
    *,
    stage: int,
    optim: OptimConfig,
    precision: Precision = Precision.fp32,
    offload: OffloadConfig | None = None,
) -> TrainConfig:
    zero = ZeroConfig(
        stage=stage, reduce_bucket_size=4000, allgather_bucket_size=4000, offload=offload or OffloadConfig()
    )
    return TrainConfig(name="parity", precision=precision, zero=zero, optim=optim, loss=LossConfig(chunk_size=7))
