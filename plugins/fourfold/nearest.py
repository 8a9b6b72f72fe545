"""The legal layouts nearest to one that is refused. Pure.

Distance: one for each doubling or halving of an axis, and one for each other setting that changes. Candidates are looked at
in its order, and where a rule refuses one, its variants in the settings that the rule names join them (Dijkstra's search).
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, product
from math import log2
from typing import Any

from fourfold.layout import AXES, Layout
from fourfold.pipeline.schedules import SCHEDULES
from fourfold.schema import Checkpointing, Offload, OffloadConfig, TrainConfig

FEW, MOST = 3, 1000  # told; looked at
WORLD = 1_000_000  # processes above which there is nothing to look for
Reason = Callable[[TrainConfig, Layout], str | None]  # the first one against it


@dataclass(frozen=True, kw_only=True)
class Candidate:
    sizes: tuple[int, ...]  # of the axes
    parts: dict[str, Any] = field(default_factory=dict)  # of the config, that are other than asked for
    changed: dict[str, str] = field(default_factory=dict)  # {knob: words of the command line}

    @property
    def named(self) -> dict[str, Any]:
        return {f"{axis}_size": size for axis, size in zip(AXES, self.sizes, strict=True)}

    @property
    def layout(self) -> Layout:
        return Layout(**self.named)

    def of(self, config: TrainConfig) -> TrainConfig:
        return replace(config, **self.named, **self.parts)


def nearest(config: TrainConfig, *, world_size: int, reason: Reason) -> str:
    """A sentence with the nearest that have no reason against them; empty if none is found."""
    if world_size > WORLD:
        return ""
    found: dict[tuple[Any, ...], str] = {}  # of those that change the same settings of a layout the first
    for one in _legal(config, world_size=world_size, reason=reason):
        found.setdefault((one.sizes, *one.changed), _words(one, of=config))
        if len(found) == FEW:
            break
    return f"Nearest legal layouts for {world_size} processes: {'; '.join(found.values())}." if found else ""


def distance(wanted: Sequence[int], *, sizes: Sequence[int]) -> float:
    """Of sizes of the axes from those that are asked for; a size that is left open, or is none, may be any."""
    pairs = zip(sizes, wanted, strict=True)
    return round(sum(abs(log2(size / asked)) for size, asked in pairs if asked > 0), 6)


def _sizes(world_size: int, *, rows: int) -> Iterator[tuple[int, ...]]:
    """In the order of AXES. rows=0 is a multiple of everything."""
    divisors = [size for size in range(1, world_size + 1) if world_size % size == 0]
    below = {size: [one for one in divisors if size % one == 0] for size in divisors}
    for data in divisors:
        if rows % data:
            continue
        model = world_size // data
        for tp, shard in product(below[model], below[data]):
            for cp in below[model // tp]:
                yield tp, cp, model // tp // cp, shard, data // shard


def _asked(config: TrainConfig) -> tuple[int, ...]:
    return tuple(getattr(config, f"{axis}_size") for axis in AXES)


def _legal(config: TrainConfig, *, world_size: int, reason: Reason) -> Iterator[Candidate]:
    wanted, order = _asked(config), count()
    queue: list[tuple[float, int, int, Candidate]] = []
    for sizes in _sizes(world_size, rows=_rows(config)):
        moved = sum(
            size != asked for size, asked in zip(sizes[:3], wanted[:3], strict=True)
        )  # fewest of equally near ones
        queue.append((distance(wanted, sizes=sizes), moved, next(order), Candidate(sizes=sizes)))
    heapq.heapify(queue)
    seen: set[tuple[Any, ...]] = set()
    for _ in range(MOST):
        if not queue:
            return
        far, moved, _, one = heapq.heappop(queue)
        changed = one.of(config)
        against = reason(changed, one.layout)
        if against is None:
            yield one
            continue
        for other in _variants(one, config=changed, against=against):
            key = (other.sizes, *sorted(other.changed.items()))
            if key not in seen:
                seen.add(key)
                heapq.heappush(queue, (far + 1, moved, next(order), other))


def _rows(config: TrainConfig) -> int:
    """That data ranks can share: a micro-batch is the least of one."""
    return config.global_batch_size // config.micro_batch_size if config.micro_batch_size > 0 else 0


def _variants(one: Candidate, *, config: TrainConfig, against: str) -> Iterator[Candidate]:
    """With another choice for one setting that the reason names and that is as it was asked for."""
    for knob, words, parts in _choices(config):
        if knob in against and knob not in one.changed:
            yield replace(one, parts={**one.parts, **parts}, changed={**one.changed, knob: words})


def _choices(config: TrainConfig) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(knob, words that set it, what they change)"""
    for stage in (2, 1, 3):
        if stage != config.zero.stage:
            yield "zero.stage", f"zero.stage={stage}", {"zero": replace(config.zero, stage=stage)}
    words = "zero.offload.optimizer=none zero.offload.parameters=none"
    if config.zero.offload != OffloadConfig(Offload.none, Offload.none):
        yield "zero.offload", words, {"zero": replace(config.zero, offload=OffloadConfig())}
    pipeline = config.pipeline
    for schedule in ("1f1b", "interleaved_1f1b", *SCHEDULES):
        if schedule != pipeline.schedule:
            words = f"pipeline.schedule={schedule}"
            yield "pipeline.schedule", words, {"pipeline": replace(pipeline, schedule=schedule)}
    for virtual in (None, 1):
        if virtual != pipeline.virtual_stages:
            words = f"pipeline.virtual_stages={virtual or 'null'}"
            yield "pipeline.virtual_stages", words, {"pipeline": replace(pipeline, virtual_stages=virtual)}
    if pipeline.split is not None:
        yield "pipeline.split", "pipeline.split=null", {"pipeline": replace(pipeline, split=None)}
    if config.attention.balance != "auto":
        parts = {"attention": replace(config.attention, balance="auto")}
        yield "attention.balance", "attention.balance=auto", parts
    if config.attention.name != "auto" or config.attention._target_ is not None:
        yield "attention=", "attention=auto", {"attention": replace(config.attention, name="auto", _target_=None)}
    if config.attention.ulysses_size != "auto":
        parts = {"attention": replace(config.attention, ulysses_size="auto")}
        yield "attention.ulysses_size", "attention.ulysses_size=auto", parts
    if config.attention.outer != "ring":
        yield "attention.outer", "attention.outer=ring", {"attention": replace(config.attention, outer="ring")}
    if config.tensor.regather:
        yield "tensor.regather", "tensor.regather=false", {"tensor": replace(config.tensor, regather=False)}
    if config.activation.checkpointing is not Checkpointing.none:
        none = replace(config.activation, checkpointing=Checkpointing.none, every_n=None)
        words = "activation.checkpointing=none" + (" activation.every_n=null" if config.activation.every_n else "")
        yield "activation.checkpointing", words, {"activation": none}


def _words(one: Candidate, *, of: TrainConfig) -> str:
    """For the command line: the sizes that are more than one or other than asked for, and the settings that change."""
    sizes = zip(one.named.items(), _asked(of), strict=True)
    told = [f"{name}={size}" for (name, size), wanted in sizes if size > 1 or size != wanted != -1]
    return " ".join([*told, *one.changed.values()]) or "all sizes 1"
