"""What a pipeline refuses of the rest of a run. Pure."""

from collections.abc import Iterator

from fourfold.layout import Layout
from fourfold.pipeline import schedules
from fourfold.pipeline.schedules import SCHEDULES
from fourfold.schema import Checkpointing, TrainConfig


def refusals(config: TrainConfig, *, layout: Layout) -> Iterator[str]:
    """Of a known schedule, and a batch that the data ranks divide; all reasons."""
    rows = config.micro_batch_size * layout.data_size
    yield from schedules.refusals(
        config.pipeline,
        ranks=layout.pp_size,
        micro_batches=config.global_batch_size // rows,
        zero_stage=config.zero.stage,
        rows=rows,
    )
    if not SCHEDULES[config.pipeline.schedule].splits_backward:
        return
    name = f"pipeline.schedule={config.pipeline.schedule} computes weight gradients on their own"
    if layout.tp_size > 1 and config.tensor.regather:
        yield (
            f"{name}, and tensor.regather=true would gather for both halves of the backward pass: use tensor.regather=false, "
            f"or pipeline.schedule=interleaved_1f1b."
        )
    mode = config.activation.checkpointing
    if mode is not Checkpointing.none:
        yield (
            f"{name}, and activation.checkpointing={mode.value} would compute a layer again for each of its weights: use "
            f"activation.checkpointing=none, or pipeline.schedule=interleaved_1f1b."
        )
