"""What can be combined in a run, and the runs that prove it: one list for the tests and for README's table.

A feature belongs to a group, of which a run has one at most. A run proves every pair of the features that it has.
"""

from collections.abc import Iterator
from functools import cache
from itertools import combinations, product
from typing import Any

from fourfold import legality
from fourfold.context.attention import IMPLEMENTATION
from fourfold.layout import Layout, resolve
from fourfold.pipeline.schedules import SCHEDULES
from fourfold.schema import (
    ActivationConfig,
    AttentionConfig,
    Checkpointing,
    LossConfig,
    Offload,
    OffloadConfig,
    OptimConfig,
    PipelineConfig,
    Precision,
    TensorConfig,
    TrainConfig,
    ZeroConfig,
)
from tests.families import family_config
from tests.parity.strategies import SPREAD

GROUPS: dict[str, list[str]] = {
    "zero": ["zero0", "zero1", "zero2", "zero3"],
    "replicas": ["hsdp"],
    "tensor": ["tp", "tp whole"],
    "regather": ["regather"],
    "context": list(SPREAD),
    "pipeline": list(SCHEDULES),
    "checkpointing": ["full", "every_n", "selective"],
    "offload": ["offload"],
    "rows": ["packed"],
    "embeddings": ["tied"],
}
FEATURES = [feature for features in GROUPS.values() for feature in features]
SHARDED = GROUPS["zero"][1:]
MODEL = {"num_hidden_layers": 4, "num_key_value_heads": 1, "vocab_size": 97}  # fewer key heads than tp ranks
SGD = OptimConfig(name="sgd", learning_rate=0.5, weight_decay=0.0, max_grad_norm=0.3)
ROWS, TOKENS = 8, 13
Run = frozenset[str]


def layout_sizes(run: Run) -> dict[str, int]:
    """Two ranks for each axis that the run names. Replicas are of a shard group of two, where no axis of the model is cut."""
    axes = {
        "tp": {"tp", "tp whole", "regather"},
        "cp": set(GROUPS["context"]),
        "pp": set(GROUPS["pipeline"]),
        "dp_shard": set(SHARDED),
        "dp_replicate": {"hsdp", "zero0"},
    }
    sizes = {f"{axis}_size": 2 if run & names else 1 for axis, names in axes.items()}
    alone = max(sizes["tp_size"], sizes["cp_size"], sizes["pp_size"], sizes["dp_shard_size"]) == 1
    if alone and ("hsdp" in run or not sizes["dp_replicate_size"] > 1):
        sizes["dp_shard_size"] = 2
    if run >= {"zero0", "hsdp"}:
        sizes["dp_shard_size"] = 2
    return sizes


def config_of(run: Run) -> TrainConfig:
    stage = next((int(name[-1]) for name in GROUPS["zero"] if name in run), 2 if "offload" in run else 1)
    where = Offload.cpu if "offload" in run else Offload.none
    offload = OffloadConfig(optimizer=where, parameters=where if stage == 3 else Offload.none)
    way = next((name for name in SPREAD if name in run), "auto")
    schedule = next((name for name in SCHEDULES if name in run), "1f1b")
    mode = next((name for name in GROUPS["checkpointing"] if name in run), "none")
    sizes: dict[str, Any] = layout_sizes(run)
    micro_batches = 4 if sizes["pp_size"] > 1 else 2  # a V of two ranks needs four
    config = TrainConfig(
        name="matrix",
        max_steps=1,
        precision=Precision.fp32,
        seq_len=TOKENS,
        global_batch_size=ROWS,
        micro_batch_size=max(1, ROWS // micro_batches // (sizes["dp_shard_size"] * sizes["dp_replicate_size"])),
        loss=LossConfig(chunk_size=7),
        optim=SGD,
        zero=ZeroConfig(stage=stage, reduce_bucket_size=4000, allgather_bucket_size=4000, offload=offload),
        tensor=TensorConfig(sequence_parallel="tp whole" not in run, regather="regather" in run),
        attention=AttentionConfig(name=way, _target_=SPREAD.get(way)),
        pipeline=PipelineConfig(schedule=schedule),
        activation=ActivationConfig(checkpointing=Checkpointing(mode)),
        **sizes,
    )
    config.data.path = "documents"
    return config


def layout_of(run: Run) -> Layout:
    sizes = layout_sizes(run)
    return resolve(world_size_of(run), **sizes)


def world_size_of(run: Run) -> int:
    sizes = layout_sizes(run)
    return sizes["tp_size"] * sizes["cp_size"] * sizes["pp_size"] * sizes["dp_shard_size"] * sizes["dp_replicate_size"]


def model_of(run: Run) -> tuple[str, dict[str, Any]]:
    return ("llama_tied" if "tied" in run else "llama"), MODEL


@cache
def refusals(run: Run) -> tuple[str, ...]:
    """Those of the rules, for the run's own small model."""
    family, _ = model_of(run)
    found = legality.refusals(
        config_of(run),
        world_size=world_size_of(run),
        model_config=_model_config(family),
        attn_implementation=IMPLEMENTATION,
    )
    return tuple(found)


@cache
def _model_config(family: str) -> Any:
    return family_config(family, **MODEL)


def excluded(one: str, other: str) -> bool:
    """Two of a group: a run has one."""
    return any(one in group and other in group for group in GROUPS.values())


def pairs() -> list[tuple[str, str]]:
    return [(one, other) for one, other in combinations(FEATURES, 2) if not excluded(one, other)]


@cache
def runs() -> tuple[Run, ...]:
    """So many that each pair that is not refused is in one, on four ranks at most. Every run has packed rows, every second one
    tied embeddings, and a mode of checkpointing where that proves more."""
    left = {frozenset(pair) for pair in pairs() if not refusals(frozenset(pair))}
    found = []
    for pair in pairs():
        if frozenset(pair) not in left:
            continue
        run = _widened(frozenset({*pair, "packed", *(["tied"] if len(found) % 2 else [])}), left=left)
        found.append(run)
        left -= set(map(frozenset, combinations(run, 2)))
    return tuple(found)


def _widened(run: Run, *, left: set[Run]) -> Run:
    for group in ("rows", "embeddings", "checkpointing", "regather"):
        choices = [run | {name} for name in GROUPS[group] if not any(excluded(name, has) for has in run)]
        choices = [one for one in choices if not refusals(one) and world_size_of(one) <= 4]
        run = max([run, *choices], key=lambda one: len(left & set(map(frozenset, combinations(one, 2)))))
    return run


def triples() -> Iterator[Run]:
    """With packed rows and tied embeddings, those that are not refused and fit eight ranks; beside `hsdp` and a stage, replicas of
    a shard group of two."""
    schedules = ["1f1b", "interleaved_1f1b", "zbv"]
    kinds = [[*SHARDED, "hsdp"], ["tp"], list(SPREAD), schedules]
    threes = [three for some in combinations(kinds, 3) for three in product(*some)]
    threes += product(SHARDED, ["hsdp"], ["tp", *SPREAD, *schedules])
    for three in threes:
        run = frozenset({*three, "packed", "tied"})
        if not refusals(run) and world_size_of(run) <= 8:
            yield run


def proven(one: str, other: str) -> bool:
    return any({one, other} <= run for run in runs())
