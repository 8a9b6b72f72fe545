"""Random models, layouts and settings: what a run is told, legal or not."""

import random
from dataclasses import dataclass, fields, is_dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fourfold.context.balance import BALANCES
from fourfold.pipeline.schedules import SCHEDULES
from fourfold.schema import (
    ActivationConfig,
    AttentionConfig,
    Checkpointing,
    LossConfig,
    ModelConfig,
    Offload,
    OffloadConfig,
    OptimConfig,
    PipelineConfig,
    Precision,
    TensorConfig,
    TrainConfig,
    ZeroConfig,
)
from tests.families import FAMILIES, STRETCHED, family_config
from tests.parity.strategies import SPREAD

STRATEGIES: dict[str, str | None] = {**SPREAD, "auto": None}
SIZES = (1, 1, 1, 1, 2, 2, 2, 3, 4)
MIXED = ("gemma2", "gemma3_text")


@dataclass(frozen=True)
class Case:
    """`seed` makes it again."""

    seed: int
    family: str
    changes: dict[str, Any]  # of the model
    config: TrainConfig
    world_size: int

    @property
    def model_config(self) -> Any:
        return family_config(self.family, **self.changes)

    def __str__(self) -> str:
        return f"case {self.seed}: {self.world_size} ranks of {self.family} {self.changes}, {_other(self.config)}"


def _other(config: Any, *, than: Any = None, prefix: str = "") -> str:
    """What is other than the default, as words of the command line."""
    words = []
    for one in fields(config):
        value, usual = getattr(config, one.name), getattr(than or TrainConfig(name=""), one.name)
        if is_dataclass(value):
            words.append(_other(value, than=usual, prefix=f"{prefix}{one.name}."))
        elif value != usual:
            words.append(f"{prefix}{one.name}={value}")
    return " ".join(filter(None, words))


def random_case(seed: int) -> Case:
    some = random.Random(seed)
    family, changes = random_model(some)
    tp, cp, pp, replicate = (some.choice(SIZES) for _ in range(4))
    shard = some.choice((-1, -1, 1, 2, 3))
    fixed = tp * cp * pp * replicate * max(shard, 1)
    world = fixed * (some.choice((1, 1, 2)) if shard == -1 else 1) + (some.random() < 0.05)
    data = max(1, world // (tp * cp * pp))
    micro = some.choice((1, 1, 2, 3))
    config = TrainConfig(
        name="random",
        max_steps=1,
        precision=some.choice((Precision.fp32, Precision.fp32, Precision.bf16)),
        tp_size=tp,
        cp_size=cp,
        pp_size=pp,
        dp_shard_size=shard,
        dp_replicate_size=replicate,
        seq_len=some.choice((3, 8, 8, 13, 13, 16, 31)),
        micro_batch_size=micro,
        global_batch_size=data * micro * some.choice((1, 2, 4, 4, 8, 8)) + (some.random() < 0.05),
        loss=LossConfig(chunk_size=some.choice((None, 1, 7))),
        model=ModelConfig(path="m", attn_implementation=some.choice(("auto",) * 40 + ("eager", "sdpa"))),
        optim=OptimConfig(name="sgd", learning_rate=0.5, weight_decay=0.0, max_grad_norm=0.3),
        zero=random_zero(some),
        tensor=TensorConfig(
            sequence_parallel=some.random() < 0.7, overlap=some.random() < 0.7, regather=some.random() < 0.2
        ),
        pipeline=PipelineConfig(
            schedule=some.choice([*SCHEDULES]),
            virtual_stages=some.choice((None,) * 9 + (1, 2, 3)),
            split=random_split(some, layers=changes["num_hidden_layers"]),
        ),
        attention=random_attention(some, cp_size=cp),
        activation=random_activation(some),
    )
    config.data.path = "d"
    if some.random() < 0.03:
        _spoil(some, config)
    return Case(seed, family, changes, config, world)


def _spoil(some: random.Random, config: TrainConfig) -> None:
    """Set a number to what it can never be."""
    room, key = some.choice(
        [
            *((config, f"{axis}_size") for axis in ("tp", "cp", "pp", "dp_shard", "dp_replicate")),
            *((config, key) for key in ("seq_len", "global_batch_size", "micro_batch_size")),
            (config.pipeline, "virtual_stages"),
            (config.activation, "every_n"),
            (config.zero, "stage"),
        ]
    )
    setattr(room, key, some.choice((0, -1, -2, 10**6)))


def random_model(some: random.Random) -> tuple[str, dict[str, Any]]:
    family = some.choice([*FAMILIES, *STRETCHED])
    heads = some.choice((1, 2, 3, 4, 4, 4, 6, 8, 8, 12))
    layers = some.choice((1, 2, 3, 4, 5, 6, 8))
    changes: dict[str, Any] = {
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": some.choice([number for number in range(1, heads + 1) if heads % number == 0]),
        "hidden_size": heads * (8 if family == "phi3_longrope" else some.choice((4, 6))),
        "intermediate_size": some.choice((24, 36, 48, 48, 50)),
        "vocab_size": some.choice((96, 97, 101, 128)),
        "tie_word_embeddings": some.random() < 0.5,
    }
    if family in MIXED:
        changes["layer_types"] = some.choices(("sliding_attention", "full_attention"), k=layers)
    return family, changes


def random_zero(some: random.Random) -> ZeroConfig:
    where = (Offload.none,) * 25 + (Offload.cpu,)
    return ZeroConfig(
        stage=some.choice((0, 1, 1, 1, 2, 2, 2, 3, 3, 3)),
        reduce_bucket_size=some.choice((100, 4000, 10**6)),
        allgather_bucket_size=some.choice((100, 4000, 10**6)),
        stage3_param_persistence_threshold=some.choice((0, 0, 50, 10**6)),
        offload=OffloadConfig(optimizer=some.choice(where), parameters=some.choice(where)),
    )


def random_split(some: random.Random, *, layers: int) -> list[int] | None:
    """Now and then; of so many layers mostly."""
    if some.random() < 0.9:
        return None
    count = some.randint(1, max(1, layers))
    borders = [0, *sorted(some.sample(range(1, layers), count - 1)), layers + (some.random() < 0.1)]
    return [last - first for first, last in pairwise(borders)]


def random_attention(some: random.Random, *, cp_size: int) -> AttentionConfig:
    name = some.choice([*STRATEGIES, *STRATEGIES, "auto"]) if cp_size > 1 else "auto"
    if some.random() < 0.02:
        name = "local" if cp_size > 1 else "ring"
    return AttentionConfig(
        name=name,
        _target_={**STRATEGIES, "local": "fourfold.context.local.Local"}[name],
        balance=some.choice(("auto",) * 8 + tuple(BALANCES)),
        ulysses_size=some.choice(("auto", "auto", "1", "2", "3")),
        outer=some.choice(("ring", "allgather")),
    )


def random_activation(some: random.Random) -> ActivationConfig:
    mode = some.choice((Checkpointing.none,) * 3 + tuple(Checkpointing))
    every_n = some.choice((None, 1, 2, 4)) if mode is Checkpointing.every_n or some.random() < 0.02 else None
    return ActivationConfig(checkpointing=mode, every_n=every_n)


def random_rows(seed: int, *, rows: int, length: int, vocabulary: int, whole: bool = False) -> dict[str, Tensor]:
    """Rows of documents of any length, or of one; some of their targets masked, padding behind some; one target at least."""
    some = random.Random(seed)
    ids = torch.tensor([[some.randrange(vocabulary) for _ in range(length)] for _ in range(rows)])
    labels, positions, documents = torch.full_like(ids, -100), torch.zeros_like(ids), torch.full_like(ids, -1)
    for row in range(rows):
        start = number = 0
        while start < length and (number == 0 or some.random() < 0.9):
            end = length if whole or row == 0 else some.randint(start + 1, length)
            learned = 0 if row == 0 else some.randint(start, end)  # what is before it is a prompt
            labels[row, learned : end - 1] = ids[row, learned + 1 : end]
            positions[row, start:end] = torch.arange(end - start)
            documents[row, start:end] = number
            start, number = end, number + 1
    return {"input_ids": ids, "position_ids": positions, "labels": labels, "document_ids": documents}
