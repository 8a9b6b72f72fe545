"""`fourfold plan`: layout, memory, bytes, FLOPs and schedule of a run, before there is any GPU. No process group, no weights."""

from copy import deepcopy
from pathlib import Path
from typing import Any

from fourfold import legality
from fourfold.layout import Layout
from fourfold.log import print_table
from fourfold.pipeline.schedules import SCHEDULES, stages_per_rank
from fourfold.pipeline.split import EMBEDDING, head_weight, layers_of_stages
from fourfold.planner.fit import RankBytes, fullest_cp_rank, planned, rank_bytes, work_of
from fourfold.planner.known import config_at_hand, config_to_plan
from fourfold.planner.nearest import nearest_that_fits
from fourfold.planner.parameters import parameter_count
from fourfold.planner.passes import micro_batches
from fourfold.planner.report import Rows, bytes_rows, flops_rows, memory_rows, verdict
from fourfold.planner.schedule import Simulation, simulate, table
from fourfold.planner.timeline import as_svg, in_terminal
from fourfold.planner.traffic import sent_in_pass, sent_in_update
from fourfold.schema import Checkpointing, TrainConfig

MOST = 200_000  # micro-batches times ranks that are simulated: some twenty seconds


def show_plan(config: TrainConfig, *, gpus: int | None, timeline: Path | None, gpu_gb: float) -> None:
    """`timeline` is an SVG file to write. ValueError for what a run would refuse."""
    layout, model_config, source = checked(config, gpus=gpus, gpu_gb=gpu_gb)
    if timeline is not None and (timeline.suffix != ".svg" or not timeline.absolute().parent.is_dir()):
        raise ValueError(f"--timeline {timeline}: give a file NAME.svg in a folder that there is.")
    if timeline is not None and layout.pp_size == 1:
        raise ValueError(
            "--timeline with pp_size=1: there is no pipeline to draw. Give pp_size=2 or more, or tier=pipeline."
        )
    print_table(f"plan: {config.name}", about(config, layout=layout, model_config=model_config, source=source))
    found = memory_by_mode(config, layout=layout, model_config=model_config)
    print_table("memory of the fullest rank, by activation.checkpointing", memory_rows(found, gpu_gb=gpu_gb))
    memory = found[f"*{config.activation.checkpointing.value}"]
    if not memory.fits(gpu_gb * 1e9):
        nearest = nearest_that_fits(config, layout=layout, model_config=model_config, gpu_bytes=gpu_gb * 1e9)
        print(verdict(memory, gpu_gb=gpu_gb, nearest=nearest))
    _show_work(config, layout=layout, model_config=model_config)
    if layout.pp_size > 1:
        _show_schedule(config, layout=layout, model_config=model_config, timeline=timeline)


def checked(config: TrainConfig, *, gpus: int | None, gpu_gb: float) -> tuple[Layout, Any, str]:
    """(layout of `gpus`, by default as many as one data rank needs; config of the model; where that is from). ValueError for
    what a run would refuse."""
    if gpus is not None and gpus < 1:
        raise ValueError(f"--gpus {gpus}: use 1 or more.")
    if not 0 < gpu_gb < float("inf"):
        raise ValueError(f"--gpu-memory {gpu_gb}: use more than 0.")
    world_size = gpus or legality.least_world(config)
    legality.check(config, world_size=world_size, model_config=config_at_hand(config.model))
    model_config, source = config_to_plan(config.model)
    layout = legality.check(config, world_size=world_size, model_config=model_config, attn_implementation="fourfold")
    return layout, model_config, source


def about(config: TrainConfig, *, layout: Layout, model_config: Any, source: str) -> Rows:
    count = micro_batches(config, layout=layout)
    return [
        ("model", f"{source}, {parameter_count(model_config):,} parameters"),
        ("layout", f"{layout.world_size} processes: {layout.describe()}"),
        (
            "batch",
            f"{config.global_batch_size} rows x {config.seq_len} tokens = {layout.data_size} data ranks x "
            f"{config.micro_batch_size} rows x {count} micro-batches",
        ),
        ("zero", f"stage {config.zero.stage}, over {layout.partition_size} ranks (dp_shard x cp)"),
    ]


def memory_by_mode(config: TrainConfig, *, layout: Layout, model_config: Any) -> dict[str, RankBytes]:
    """Without and with recomputation; a star at what is set."""
    now = config.activation.checkpointing
    modes = {Checkpointing.none: False, now: True, Checkpointing.full: now is Checkpointing.full}
    if layout.pp_size > 1 and SCHEDULES[config.pipeline.schedule].splits_backward:
        modes = {now: True}  # whose backward passes cannot be recomputed
    found = {}
    for mode, is_set in modes.items():
        other = deepcopy(config)
        other.activation.checkpointing = mode
        name = f"*{mode.value}" if is_set or mode is now else mode.value
        found[name] = rank_bytes(other, layout=layout, model_config=model_config)
    return found


def _show_work(config: TrainConfig, *, layout: Layout, model_config: Any) -> None:
    count = micro_batches(config, layout=layout)
    cp_rank = fullest_cp_rank(config, layout=layout, model_config=model_config)
    work = work_of(config, layout=layout, model_config=model_config, cp_rank=cp_rank)
    sent, model, hardware = [], [], []
    for rank in range(layout.pp_size):
        made = planned(config, layout=layout, model_config=model_config, pp_rank=rank, work=work)
        passes = [sent_in_pass(config, stage, layout=layout, model_config=model_config) for stage in made.stages]
        sent.append(sent_in_update(passes, made.groups, config, layout=layout, model_config=model_config, pp_rank=rank))
        model.append(count * sum(one.model_flops for one in made.passes))
        hardware.append(count * sum(one.flops for one in made.passes))
    print_table("sent in an update", bytes_rows(sent))
    print_table("computed in an update", flops_rows(model, hardware))


def _show_schedule(config: TrainConfig, *, layout: Layout, model_config: Any, timeline: Path | None) -> None:
    stages, count = layout.pp_size * stages_per_rank(config.pipeline), micro_batches(config, layout=layout)
    layers = [
        last - first for first, last in layers_of_stages(config.pipeline, model_config=model_config, stages=stages)
    ]
    if layout.pp_size * count > MOST:
        print(
            f"\npipeline: {count} micro-batches an update are too many to simulate (at most {MOST // layout.pp_size})"
        )
        return
    costs = [float(number) for number in layers]
    costs[0] += EMBEDDING
    costs[-1] += head_weight(model_config)
    found = _simulated(config, layout=layout, costs=costs)
    rows = [
        (
            "stages",
            f"{stages} of {', '.join(map(str, layers))} layers; the head weighs {costs[-1] - layers[-1]:.2f} layers",
        ),
        ("micro-batches", f"{count} an update"),
        ("idle", f"{found.idle:.1%} of the ranks' time"),
        ("in flight", f"activations of {', '.join(map(str, found.peaks))} passes through a stage, by rank"),
    ]
    print_table(f"pipeline: {config.pipeline.schedule}", rows)
    print("\n" + "\n".join(in_terminal(found)), flush=True)
    if timeline is not None:
        title = f"{config.pipeline.schedule}, {layout.pp_size} ranks, {count} micro-batches"
        timeline.write_text(as_svg(found, title=f"{title}: {found.idle:.1%} idle"))
        print(f"\nwritten to {timeline.absolute()}", flush=True)


def _simulated(config: TrainConfig, *, layout: Layout, costs: list[float]) -> Simulation:
    """A backward pass is two forward passes, three where activations are recomputed."""
    what = table(config.pipeline, ranks=layout.pp_size, micro_batches=micro_batches(config, layout=layout))
    recomputes = config.activation.checkpointing is not Checkpointing.none
    return simulate(what, costs=costs, backward=3.0 if recomputes else 2.0)
