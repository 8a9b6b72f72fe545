"""Every rule refuses, with both numbers and the knob, and what it recommends is accepted."""

from dataclasses import replace
from typing import Any

import pytest

from fourfold.config import to_train_config
from fourfold.layout import Layout
from fourfold.legality import check, context
from fourfold.schema import TrainConfig
from tests.golden.composing import NAMED, composed, typed

BASE = (*NAMED, "max_steps=3")


def refusal(*words: str, world: int = 1, environment: dict[str, str] | None = None) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        check(to_train_config(composed(*BASE, *words)), world_size=world, environment=environment or {})
    return str(caught.value)


def accepted(*words: str, world: int = 1, environment: dict[str, str] | None = None) -> Layout:
    return check(to_train_config(composed(*BASE, *words)), world_size=world, environment=environment or {})


def test_the_base_is_accepted() -> None:
    assert accepted() == Layout()
    assert accepted(world=8) == Layout(dp_shard_size=8)


# words that are refused, world, what the message must hold, words that mend it
RULES: list[tuple[tuple[str, ...], int, tuple[str, ...], tuple[str, ...]]] = [
    (
        ("pp_size=4", "global_batch_size=2"),
        4,
        ("pipeline.schedule=1f1b over 4 ranks needs 4 micro-batches", "has 2", "global_batch_size=4 or more"),
        ("global_batch_size=4",),
    ),
    (
        ("pp_size=2", "pipeline.schedule=zbv", "zero=stage3"),
        2,
        ("pipeline.schedule=zbv", "zero.stage=3", "zero=stage2"),
        ("zero=stage2",),
    ),
    (
        ("pp_size=4", "pipeline.schedule=interleaved_1f1b", "global_batch_size=9"),
        4,
        ("2 rounds", "has 9", "global_batch_size=8 or 10"),
        ("global_batch_size=8",),
    ),
    (
        ("pp_size=2", "pipeline.schedule=zbv", "activation=full"),
        2,
        ("pipeline.schedule=zbv", "activation.checkpointing=full", "for each of its weights"),
        ("activation=none",),
    ),
    (("pipeline.schedule=best",), 1, ("pipeline.schedule=best", "1f1b"), ("pipeline.schedule=gpipe",)),
    (("pp_size=2", "pipeline.schedule=best"), 2, ("pipeline.schedule=best", "1f1b"), ("pipeline.schedule=gpipe",)),
    (
        ("pp_size=2", "pipeline.virtual_stages=2"),
        2,
        ("pipeline.virtual_stages=2", "one stage a rank"),
        ("pipeline.virtual_stages=1",),
    ),
    (("precision=fp16",), 1, ("precision=fp16", "underflow", "bf16"), ("precision=bf16",)),
    (("global_batch_size=0",), 1, ("global_batch_size=0", "1 or more"), ("global_batch_size=1",)),
    (("micro_batch_size=-2",), 1, ("micro_batch_size=-2", "1 or more"), ("micro_batch_size=1",)),
    (("seq_len=0",), 1, ("seq_len=0", "1 or more"), ("seq_len=8",)),
    (
        ("global_batch_size=10", "micro_batch_size=2"),
        4,
        ("global_batch_size=10", "micro_batch_size=2 x 4", "= 8", "global_batch_size=8 or 16"),
        ("global_batch_size=16",),
    ),
    (
        ("global_batch_size=8", "micro_batch_size=3"),
        2,
        ("global_batch_size=6 or 12", "or micro_batch_size=2"),
        ("micro_batch_size=2",),
    ),
    (("global_batch_size=2",), 4, ("use global_batch_size=4.",), ("global_batch_size=4",)),
    (("max_steps=null",), 1, ("Neither max_steps nor num_epochs",), ("num_epochs=1",)),
    (("max_steps=0",), 1, ("max_steps=0", "1 or more"), ("max_steps=1",)),
    (("num_epochs=0",), 1, ("num_epochs=0", "more than 0"), ("num_epochs=0.5",)),
    (
        ("data.streaming=true", "max_steps=null", "num_epochs=1"),
        1,
        ("data.streaming=true", "max_steps"),
        ("max_steps=3", "num_epochs=null"),
    ),
    (
        ("data.eval_path=e", "data.eval_documents=4"),
        1,
        ("data.eval_path=e", "data.eval_documents=4", "keep one"),
        ("data.eval_path=null",),
    ),
    (("zero.stage=4",), 1, ("zero.stage=4", "0, 1, 2 or 3"), ("zero.stage=3",)),
    (
        ("zero=stage0",),
        2,
        ("zero.stage=0", "dp_shard_size=2", "dp_shard_size=1 dp_replicate_size=2", "zero=stage1"),
        ("dp_shard_size=1", "dp_replicate_size=2"),
    ),
    (
        ("zero=stage2", "zero.offload.parameters=cpu"),
        1,
        ("zero.offload.parameters=cpu", "zero.stage=2", "zero=stage3"),
        ("zero=stage3",),
    ),
    (
        ("zero=stage3", "zero.offload.optimizer=nvme"),
        1,
        ("zero.offload to nvme is not supported", "checkpoint", "Use cpu"),
        ("zero.offload.optimizer=cpu",),
    ),
    (
        ("zero=stage3", "zero.offload.optimizer=cpu", "dp_replicate_size=2"),
        4,
        ("zero.offload", "dp_replicate_size=2", "dp_replicate_size=1"),
        ("dp_replicate_size=1",),
    ),
    (
        ("zero=stage1", "zero.offload.optimizer=cpu"),
        1,
        ("zero.offload", "zero.stage=1", "zero=stage2 or zero=stage3"),
        ("zero=stage2",),
    ),
    (("optim.name=lion",), 1, ("optim.name=lion", "adamw or sgd"), ("optim.name=sgd",)),
    (
        ("optim.lr_scheduler_type=step",),
        1,
        ("optim.lr_scheduler_type=step", "linear, cosine, constant or wsd"),
        ("optim.lr_scheduler_type=wsd",),
    ),
    (("optim.learning_rate=-1",), 1, ("optim.learning_rate=-1", "0 or more"), ("optim.learning_rate=0",)),
    (("optim.max_grad_norm=-1",), 1, ("optim.max_grad_norm=-1", "0 or more"), ("optim.max_grad_norm=0",)),
    (("optim.warmup_steps=-1",), 1, ("optim.warmup_steps=-1", "0 or more"), ("optim.warmup_steps=0",)),
    (("optim.weight_decay=-1",), 1, ("optim.weight_decay=-1", "0 or more"), ("optim.weight_decay=0",)),
    (("optim.min_lr_ratio=-1",), 1, ("optim.min_lr_ratio=-1", "0 to 1"), ("optim.min_lr_ratio=0",)),
    (("log_every=0",), 1, ("log_every=0", "1 or more"), ("log_every=1",)),
    (("export_dtype=int8",), 1, ("export_dtype=int8", "bfloat16, float16, float32"), ("export_dtype=float32",)),
    (("dp_shard_size=3",), 4, ("dp_shard_size=3", "4 were started"), ("dp_shard_size=4",)),
]


@pytest.mark.parametrize(("words", "world", "parts", "remedy"), RULES, ids=[" ".join(rule[0]) for rule in RULES])
def test_a_rule(words: tuple[str, ...], world: int, parts: tuple[str, ...], remedy: tuple[str, ...]) -> None:
    message = refusal(*words, world=world)
    for part in parts:
        assert part in message
    accepted(*words, *remedy, world=world)


def test_all_problems_are_told_together() -> None:
    message = refusal(
        "tp_size=3", "save_every=-1", "precision=fp16", "optim.name=lion", "max_steps=0", world=4,
        environment={"ACCELERATE_USE_DEEPSPEED": "true"},
    )  # fmt: skip
    for part in ("4 were started", "save_every=-1", "fp16", "lion", "max_steps=0", "ACCELERATE_USE_DEEPSPEED"):
        assert part in message
    assert message.count("\n  - ") == 6


# ------------------------------------------------------------------------- G01, G02: one source for every number

CONFLICTS = [
    ({"ACCELERATE_USE_DEEPSPEED": "true"}, ("DeepSpeed settings of its own", "zero.stage=2", "tools/launch/")),
    ({"ACCELERATE_USE_FSDP": "true"}, ("FSDP settings of its own", "zero.stage=2")),
    ({"ACCELERATE_USE_FSDP": "1"}, ("ACCELERATE_USE_FSDP=1",)),
    ({"ACCELERATE_USE_MEGATRON_LM": "true"}, ("Megatron settings of its own",)),
    ({"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}, ("a parallelism config of its own",)),
    ({"ACCELERATE_MIXED_PRECISION": "fp16"}, ("mixed_precision=fp16", "precision=bf16")),
    (
        {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"},
        ("gradient_accumulation_steps=4", "global_batch_size=8", "micro_batch_size=1"),
    ),
]


@pytest.mark.parametrize(("environment", "parts"), CONFLICTS)
def test_two_sources_of_a_setting(environment: dict[str, str], parts: tuple[str, ...]) -> None:
    message = refusal(environment=environment)
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    "environment",
    [
        {"ACCELERATE_USE_DEEPSPEED": "false", "ACCELERATE_USE_FSDP": "0"},
        {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1"},
        {"ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "auto"},
        {"ACCELERATE_DYNAMO_BACKEND": "NO", "ACCELERATE_USE_CPU": "true"},
    ],
)
def test_sources_that_agree(environment: dict[str, str]) -> None:
    accepted(environment=environment)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_batch_counts_data_ranks(world: int) -> None:
    """G01: accumulation follows from the batch sizes and the data ranks, whatever the number of processes."""
    assert accepted("global_batch_size=8", "micro_batch_size=2", world=world).data_size == world
    message = refusal("global_batch_size=12", "micro_batch_size=8", world=world)
    assert f"micro_batch_size=8 x {world} data-parallel ranks = {8 * world}" in message


@pytest.mark.parametrize("key", ["train_batch_size", "gradient_accumulation_steps", "train_micro_batch_size_per_gpu"])
def test_deepspeed_batch_keys_do_not_exist(key: str) -> None:
    for word in (f"+{key}=16", f"+zero.{key}=16"):
        with pytest.raises(ValueError, match=key):
            to_train_config(composed(*BASE, word))


# ----------------------------------------------------------------------------------------- with the model's config


class Model:
    max_position_embeddings = 64
    num_hidden_layers = 4
    model_type = "llama"


def with_model(config: TrainConfig, **attributes: Any) -> None:
    check(config, world_size=1, model_config=Model(), **{"attn_implementation": "sdpa", **attributes})


def test_rows_longer_than_the_model() -> None:
    config = replace(typed(*BASE), seq_len=65)
    (message,) = context(config, longest=64)
    for part in ("seq_len=65", "64 positions", "use seq_len=64", "model.max_position_embeddings=65", "rope_scaling"):
        assert part in message
    with pytest.raises(ValueError, match="seq_len=65"):
        with_model(config)
    with_model(replace(config, seq_len=64))


@pytest.mark.parametrize("every_n", [0, -1, 5])
def test_stretches_that_do_not_exist(every_n: int) -> None:
    with pytest.raises(ValueError, match=rf"activation\.every_n={every_n}"):
        with_model(replace(typed(*BASE, "activation=every_n", f"activation.every_n={every_n}"), seq_len=8))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["seed=-1"], "seed=-1: use 0 or more"),
        (["save_every=-1"], "save_every=-1: use 0 or more"),
        (["eval_every=-2"], "eval_every=-2: use 0 or more"),
        (["keep_last=0"], "keep_last=0: use 1 or more"),
        (["save_every=5", "keep_every=7"], "keep_every=7 is no multiple of save_every=5"),
        (["keep_every=7"], "keep_every=7 is no multiple of save_every=0"),
        (["max_time=0"], "max_time=0.0: use more than 0 seconds"),
        (["loss.chunk_size=0"], "loss.chunk_size=0: use 1 or more"),
        (["zero.reduce_bucket_size=-1"], "zero.reduce_bucket_size=-1: use 1 or more"),
        (["optim.learning_rate=nan"], "optim.learning_rate=nan: use 0 or more"),
        (["optim.adam_beta1=1.5"], "optim.adam_beta1=1.5: use 0 or more and less than 1"),
        (["optim.adam_epsilon=-1"], "optim.adam_epsilon=-1.0: use 0 or more"),
        (["optim.min_lr_ratio=2"], "optim.min_lr_ratio=2.0: use 0 to 1"),
        (["num_epochs=nan"], "num_epochs=nan: use more than 0"),
        (["cluster.timeout=-1"], "cluster.timeout=-1.0: use more than 0 seconds"),
        (["cluster.timeout=1e30"], "cluster.timeout=1e+30: use more than 0 seconds, and 1e+09 at most"),
        (["cluster.timeout=nan"], "cluster.timeout=nan: use more than 0 seconds"),
    ],
)
def test_numbers_out_of_range(words: list[str], says: str) -> None:
    with pytest.raises(ValueError, match="use") as caught:
        check(typed(*NAMED, *words), world_size=1, environment={})
    assert says in str(caught.value)
