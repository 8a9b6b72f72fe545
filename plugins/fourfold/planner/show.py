"""`fourfold plan`: what a run's pipeline will do, before there is any GPU. No process group, and no weights are read."""

from pathlib import Path

from fourfold import legality
from fourfold.layout import Layout, product
from fourfold.log import print_table
from fourfold.model.source import read_config, resolve_folder
from fourfold.pipeline.schedules import stages_per_rank
from fourfold.pipeline.split import EMBEDDING, head_weight, layers_of_stages
from fourfold.planner.schedule import Simulation, simulate, table
from fourfold.planner.timeline import as_svg, in_terminal
from fourfold.schema import Checkpointing, TrainConfig


def show_plan(config: TrainConfig, *, gpus: int | None, timeline: Path | None) -> None:
    """Print the schedule of one update; `timeline` is an SVG file to write. ValueError for what a run would refuse."""
    if gpus is not None and gpus < 1:
        raise ValueError(f"--gpus {gpus}: use 1 or more.")
    if timeline is not None and (timeline.suffix != ".svg" or not timeline.absolute().parent.is_dir()):
        raise ValueError(f"--timeline {timeline}: give a file NAME.svg in a folder that there is.")
    sizes = (config.tp_size, config.cp_size, config.pp_size, config.dp_shard_size, config.dp_replicate_size)
    world_size = gpus or product(size for size in sizes if size > 0)
    layout = legality.check(config, world_size=world_size)
    if layout.pp_size == 1:
        raise ValueError("pp_size=1: there is no pipeline to plan. Give pp_size=2 or more, or tier=pipeline.")
    model_config = read_config(resolve_folder(config.model), model=config.model)
    legality.check(config, world_size=world_size, model_config=model_config, attn_implementation="fourfold")
    stages = layout.pp_size * stages_per_rank(config.pipeline)
    layers = [
        last - first for first, last in layers_of_stages(config.pipeline, model_config=model_config, stages=stages)
    ]
    costs = [float(count) for count in layers]
    costs[0] += EMBEDDING
    costs[-1] += head_weight(model_config)
    found = _simulated(config, layout=layout, costs=costs)
    title = f"{config.pipeline.schedule}, {layout.pp_size} ranks, {_micro_batches(config, layout)} micro-batches"
    rows = [
        ("layout", f"{layout.world_size} processes: {layout.describe()}"),
        (
            "stages",
            f"{stages} of {', '.join(map(str, layers))} layers; the head weighs {costs[-1] - layers[-1]:.2f} layers",
        ),
        ("micro-batches", f"{_micro_batches(config, layout)} an update"),
        ("idle", f"{found.idle:.1%} of the ranks' time"),
        ("in flight", f"activations of {', '.join(map(str, found.peaks))} passes through a stage, by rank"),
    ]
    print_table(f"pipeline: {config.pipeline.schedule}", rows)
    print("\n" + "\n".join(in_terminal(found)), flush=True)
    if timeline is not None:
        timeline.write_text(as_svg(found, title=f"{title}: {found.idle:.1%} idle"))
        print(f"\nwritten to {timeline.absolute()}", flush=True)


def _simulated(config: TrainConfig, *, layout: Layout, costs: list[float]) -> Simulation:
    """A backward pass is two forward passes, three where activations are recomputed."""
    what = table(config.pipeline, ranks=layout.pp_size, micro_batches=_micro_batches(config, layout))
    recomputes = config.activation.checkpointing is not Checkpointing.none
    return simulate(what, costs=costs, backward=3.0 if recomputes else 2.0)


def _micro_batches(config: TrainConfig, layout: Layout) -> int:
    return config.global_batch_size // (config.micro_batch_size * layout.data_size)
