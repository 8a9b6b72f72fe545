"""`fourfold dry-run`: what ranks of a run hold, send and compute, counted on what training would build."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from fourfold.dryrun.places import crosses_servers, wrong_places
from fourfold.dryrun.rank import Builder, Built
from fourfold.layout import AXES, Layout
from fourfold.log import print_table, short
from fourfold.model.load import stored_shapes
from fourfold.planner.fit import TERMS, Rank, RankBytes, bytes_of, fullest_cp_rank, planned, work_of
from fourfold.planner.known import as_transformers
from fourfold.planner.nearest import nearest_that_fits
from fourfold.planner.parameters import parameter_count
from fourfold.planner.passes import micro_batches
from fourfold.planner.report import Rows, bytes_rows, columns, flops_rows, verdict
from fourfold.planner.show import about, checked
from fourfold.planner.traffic import sent_in_update
from fourfold.schema import TrainConfig
from fourfold.tensor.cuts import Heads

HEADS = {"gradients": "grads", "optimizer": "optim", "activations": "activ."}
WIDE = 9


class DryRun:
    """All that is counted of one config."""

    def __init__(self, config: TrainConfig, *, layout: Layout, model_config: Any) -> None:
        self.config, self.layout, self.model_config = config, layout, as_transformers(model_config)
        self._builder = Builder(config, layout=layout, model_config=self.model_config)

    @property
    def differs_over_tp(self) -> bool:
        """Whether tp ranks hold different shards: a vocabulary that is filled up, key heads with copies."""
        heads = Heads.of(self.model_config, size=self.layout.tp_size)
        return bool(self.model_config.vocab_size % self.layout.tp_size) or heads.copies > 1

    def kinds(self) -> list[int]:
        """Ranks that stand for all: of each pipeline rank the fullest cp rank and the first tp rank, or all where those differ."""
        tp_ranks = range(self.layout.tp_size if self.differs_over_tp else 1)
        cp = fullest_cp_rank(self.config, layout=self.layout, model_config=self.model_config)
        return [
            self.layout.rank({"pp": pp, "cp": cp, "tp": tp}) for pp in range(self.layout.pp_size) for tp in tp_ranks
        ]

    def build(self, rank: int) -> Built:
        return self._builder.build(rank)

    def parameters(self, built: list[Built]) -> int:
        """The sum over the ranks of the tp and pp groups, each parameter once; `built` are of all kinds."""
        times = 1 if self.differs_over_tp else self.layout.tp_size
        return sum((one.counted - one.copied) * times + one.copied for one in built)

    def parameters_of_model(self) -> int:
        """Before it is cut; on the meta device what is tied is not one tensor yet."""
        return sum(shape.numel() for shape in stored_shapes(self._builder.model).values())

    def rank(self, built: Built) -> Rank:
        """What was counted, in the place of what the plan computes; the stretch that is recomputed is the plan's."""
        place = self.layout.coordinate(built.rank)
        work = work_of(self.config, layout=self.layout, model_config=self.model_config, cp_rank=place["cp"])
        made = planned(
            self.config,
            layout=self.layout,
            model_config=self.model_config,
            pp_rank=place["pp"],
            tp_rank=place["tp"],
            work=work,
        )
        passes = [
            replace(one, held=traced.held, head=traced.head, flops=traced.flops)
            for one, traced in zip(made.passes, built.traced, strict=True)
        ]
        return Rank(stages=built.stages, groups=built.groups, passes=passes)

    def memory(self, built: Built) -> RankBytes:
        place = self.layout.coordinate(built.rank)
        return bytes_of(
            self.rank(built),
            self.config,
            layout=self.layout,
            model_config=self.model_config,
            pp_rank=place["pp"],
            work=work_of(self.config, layout=self.layout, model_config=self.model_config, cp_rank=place["cp"]),
        )

    def sent(self, built: Built) -> dict[str, int]:
        return sent_in_update(
            [one.sent for one in built.traced],
            built.groups,
            self.config,
            layout=self.layout,
            model_config=self.model_config,
            pp_rank=self.layout.coordinate(built.rank)["pp"],
        )


def show_dry_run(config: TrainConfig, *, gpus: int | None, rank: int | None, gpu_gb: float) -> None:
    """ValueError for what a run would refuse; RuntimeError where what is built is not what the layout says."""
    layout, model_config, source = checked(config, gpus=gpus, gpu_gb=gpu_gb)
    if rank is not None and not 0 <= rank < layout.world_size:
        raise ValueError(f"--rank {rank}: this layout has ranks 0 to {layout.world_size - 1}.")
    dry = DryRun(config, layout=layout, model_config=model_config)
    wrong = wrong_places(layout)
    if wrong:
        raise RuntimeError("; ".join(wrong))
    rows = about(config, layout=layout, model_config=dry.model_config, source=source)
    print_table(f"dry run: {config.name}", [*rows, ("groups", _groups(config, layout))])
    if rank is not None:
        print_table(f"rank {rank}", list(_place(layout, rank)))
    built = list(_building(dry, [rank] if rank is not None else dry.kinds()))
    memory = [dry.memory(one) for one in built]
    print_table("ranks hold, GB; no: more than fits", _ranks(dry, built, memory, gpu_gb=gpu_gb))
    if rank is None:
        print(_sum(dry, built))
    fullest = max(memory, key=lambda one: one.total)
    if not fullest.fits(gpu_gb * 1e9):
        nearest = nearest_that_fits(config, layout=layout, model_config=dry.model_config, gpu_bytes=gpu_gb * 1e9)
        print(verdict(fullest, gpu_gb=gpu_gb, nearest=nearest))
    print_table("sent in an update", bytes_rows([dry.sent(one) for one in built]))
    count = micro_batches(config, layout=layout)
    counted = [dry.rank(one).passes for one in built]
    print_table(
        "computed in an update",
        flops_rows(
            [count * sum(one.model_flops for one in passes) for passes in counted],
            [count * sum(one.flops for one in passes) for passes in counted],
        ),
    )


def _building(dry: DryRun, ranks: list[int]) -> Iterator[Built]:
    for number, rank in enumerate(ranks, start=1):
        if sys.stderr.isatty():
            print(f"\rbuilding rank {rank}, {number} of {len(ranks)}", end="", file=sys.stderr, flush=True)
        yield dry.build(rank)
    if sys.stderr.isatty():
        print(file=sys.stderr)


def _groups(config: TrainConfig, layout: Layout) -> str:
    """Checked by now."""
    servers = config.cluster.gpus_per_node
    across = crosses_servers(layout, gpus_per_node=servers)
    where = f"tp groups {'cross' if across else 'lie inside of'} servers of {servers} GPUs (cluster.gpus_per_node)"
    return f"every rank once along each axis, fastest first: {', '.join(AXES)}; {where}"


def _place(layout: Layout, rank: int) -> Iterator[tuple[str, str]]:
    yield "coordinate", ", ".join(f"{axis} {at}" for axis, at in layout.coordinate(rank).items())
    for axis in AXES:
        ranks = layout.group([axis], rank=rank)
        if len(ranks) > 1:
            shown = ranks if len(ranks) <= 8 else (*ranks[:3], "...", ranks[-1])
            yield f"{axis} group", f"{len(ranks)} ranks: {', '.join(map(str, shown))}"


def _ranks(dry: DryRun, built: list[Built], memory: list[RankBytes], *, gpu_gb: float) -> Rows:
    """A line each, in GB of 1e9."""
    heads = ["layers", "elements", *(HEADS.get(term, term) for term in TERMS), "total"]
    rows = [("", columns(heads, width=WIDE))]
    axes = ["pp", "cp", "tp"] if dry.layout.cp_size > 1 else ["pp", "tp"]
    for one, held in zip(built, memory, strict=True):
        place = dry.layout.coordinate(one.rank)
        layers = "+".join(str(stage.layers) for stage in one.stages)
        figures = [f"{getattr(held, term) / 1e9:.2f}" for term in (*TERMS, "total")]
        line = columns([layers, short(sum(map(sum, one.groups))), *figures], width=WIDE)
        rows.append(
            (" ".join(f"{axis} {place[axis]}" for axis in axes), line + ("" if held.fits(gpu_gb * 1e9) else "  no"))
        )
    return rows


def _sum(dry: DryRun, built: list[Built]) -> str:
    """RuntimeError if a parameter is on no rank, or on two that count it."""
    found, whole = dry.parameters(built), dry.parameters_of_model()
    if found != whole:
        raise RuntimeError(f"the ranks hold {found:,} parameters, and the model has {whole:,}")
    planned_count = parameter_count(dry.model_config)
    agrees = "" if planned_count == whole else f" (the planner counts {planned_count:,})"
    return f"parameters of all tp x pp ranks: {found:,}, those of the model{agrees}"
