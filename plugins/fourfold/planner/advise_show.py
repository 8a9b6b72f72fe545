"""`fourfold advise`: the recipe command for a model and a cluster, its reasons, and its memory. Imports no torch."""

import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from fourfold.log import print_table
from fourfold.planner import advise as guide
from fourfold.planner.advise import Advice, Question, advise
from fourfold.planner.fit import RESERVE, TERMS
from fourfold.planner.shapes import of_size
from fourfold.schema import Checkpointing, ModelConfig

TASKS = {"Llama 3.1 8B": "llama3_8b", "Llama 3.1 70B": "llama3_70b", "Llama 3.1 405B": "llama3_405b"}
HUB = {
    "SmolLM2 135M": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "Llama 3.2 1B": "meta-llama/Llama-3.2-1B",
    "Llama 3.2 3B": "meta-llama/Llama-3.2-3B",
}


def show_advice(model: str, *, gpus: int, seq_len: int, batch_tokens: int | None, gpu_gb: float) -> None:
    """ValueError for a model that is neither a folder nor a size, or numbers that mean nothing."""
    config, name = read_model(model)
    question = Question(model=config, gpus=gpus, seq_len=seq_len, batch_tokens=batch_tokens, gpu_gb=gpu_gb)
    advice = advise(question)
    print_table(
        f"{name}, {question.parameters / 1e9:.3g}B parameters, on {gpus} GPUs at {seq_len:,} tokens", rows(advice)
    )
    print("\nbecause")
    for reason in reasons(advice):
        print(f"  - {reason}")
    print("\nwith other GPUs")
    for other in (gpus // 2, 2 * gpus):
        if other:
            print(f"  - {other}: {in_short(advise(replace(question, gpus=other)))}")
    print(f"\n{command(advice, model=model, name=name)}", flush=True)


def read_model(model: str) -> tuple[Any, str]:
    """(config, its name) of a Hugging Face folder, or of a size such as 8B. Nothing is downloaded."""
    sized = of_size(model)
    if sized is not None:
        return sized
    folder = Path(model).expanduser()
    if not folder.is_dir():
        raise ValueError(
            f"--model {model}: there is no folder {folder.absolute()}, and it is no size such as 8B or 1.2B."
        )
    from fourfold.model.source import read_config

    return read_config(folder, model=ModelConfig(path=model)), folder.name


def rows(advice: Advice) -> list[tuple[str, str]]:
    config, memory, limit = advice.config, advice.memory, advice.question.gpu_gb
    tokens = config.global_batch_size * config.seq_len
    verdict = "fits" if advice.fits else "does not fit"
    return [
        ("layout", advice.layout.describe()),
        ("zero", f"stage {config.zero.stage}"),
        ("activation", config.activation.checkpointing.value),
        (
            "batch",
            f"{config.global_batch_size} rows, {tokens / 1e6:.3g}M tokens; {config.micro_batch_size} a micro-batch",
        ),
        *(
            [("idle", f"{guide.idle(advice.config, advice.layout):.1%} of the time, in the pipeline")]
            if advice.layout.pp_size > 1
            else []
        ),
        *((f"{term} GB", f"{getattr(memory, term) / 1e9:.1f}") for term in TERMS),
        (
            "total GB",
            f"{memory.total / 1e9:.1f} a GPU: {verdict} into {limit:g} less {RESERVE:.0%} for what is not counted",
        ),
    ]


def reasons(advice: Advice) -> Iterator[str]:
    """One sentence each, in the guide's order."""
    question, config, layout = advice.question, advice.config, advice.layout
    billions = f"{question.parameters / 1e9:.3g}B parameters"
    if question.is_large:
        limit = (
            f"{billions} are above 50B"
            if question.parameters > guide.ND_PARAMETERS
            else f"{question.gpus} GPUs are above 1K"
        )
        yield f"{limit}: beyond ZeRO alone, to tensor, context and pipeline parallelism"
    elif config.zero.stage == 3 and question.parameters > guide.DP_PARAMETERS:
        yield f"{billions} are above 1B: ZeRO-3 (FSDP)"
    elif config.zero.stage == 3:
        yield f"{question.gpus} GPUs are above {guide.DP_GPUS}: ZeRO-3 (FSDP)"
    elif layout.tp_size == 1:
        yield f"{billions} and {question.gpus} GPUs: data parallelism, with no more ZeRO than the memory asks for"
    if question.is_long:
        each = question.seq_len // layout.cp_size
        yield f"{question.seq_len:,} tokens are above 16K: cp_size={layout.cp_size}, {each:,} tokens of a row on each rank"
    elif layout.cp_size > 1:
        yield f"cp_size={layout.cp_size}: context ranks spend no rows of the batch, of which there are too few for data ranks alone"
    if layout.tp_size > 1:
        yield f"tp_size={layout.tp_size}: inside a server of {question.node}, and it spends no rows of the batch"
    if layout.pp_size > 1:
        fewest = "the fewest pipeline ranks whose states and activations fit" if advice.fits else "layers over servers"
        yield f"pp_size={layout.pp_size}: {fewest}"
        idle = guide.idle(advice.config, advice.layout)
        if idle > guide.IDLE:
            yield f"{idle:.0%} of the time idle: more rows an update or pipeline.schedule=zbv would leave less"
    elif question.is_large:
        yield "pp_size=1: it fits without a pipeline, which would be idle at both ends"
    if config.zero.stage == 3 and layout.dp_replicate_size > 1:
        yield (
            f"{question.gpus} GPUs are above {guide.HSDP_GPUS}: HSDP, shards over {layout.dp_shard_size} data ranks and "
            f"{layout.dp_replicate_size} replicas"
        )
    if config.activation.checkpointing is not Checkpointing.none:
        yield "activation=full: one more forward pass, as activations do not fit without"
    yield _batch(advice)
    for passed in advice.passed:
        yield f"not {passed}"
    if not advice.fits:
        yield "nothing fits: more GPUs, shorter rows, or tier=zero3_offload; this is the nearest"


def _batch(advice: Advice) -> str:
    layout, config = advice.layout, advice.config
    pipeline = f" x {layout.pp_size} pipeline ranks" if layout.pp_size > 1 else ""
    spent = f"{layout.data_size} data ranks{pipeline} spend {layout.data_size * layout.pp_size} rows"
    if advice.in_budget:
        return f"the batch is a budget of {advice.question.rows} rows (--global-batch-tokens): {spent} at least"
    return (
        f"{spent}, more than the budget of {advice.question.rows}: the batch is {config.global_batch_size} rows instead"
    )


def in_short(advice: Advice) -> str:
    config = advice.config
    fits = "" if advice.fits else ", does not fit"
    over = "" if advice.in_budget else f", {config.global_batch_size} rows instead of {advice.question.rows}"
    return (
        f"{advice.layout.describe()}, zero=stage{config.zero.stage} activation={config.activation.checkpointing.value}, "
        f"{advice.memory.total / 1e9:.0f} GB a GPU{fits}{over}"
    )


def tier(advice: Advice) -> str:
    """The recipe that the layout is one of."""
    layout, config = advice.layout, advice.config
    if layout.pp_size > 1 or layout.tp_size > 1:
        if layout.cp_size > 1:
            return "nd"
        return "pipeline" if layout.pp_size > 1 else "tensor"
    if layout.cp_size > 1:
        return "long_context"
    if config.zero.stage < 3:
        return ("dp", "zero1", "zero2")[config.zero.stage]
    if layout.dp_replicate_size > 1:
        return "hsdp"
    return "zero3_checkpointed" if config.activation.checkpointing is Checkpointing.full else "zero3"


def overrides(advice: Advice, *, model: str, name: str) -> list[str]:
    """Hydra's part of the command: all sizes are said, whatever the tier's own."""
    config, question = advice.config, advice.question
    words = [f"task={TASKS.get(name, 'llama3_8b')}", f"tier={tier(advice)}"]
    if name not in TASKS:  # another model's task, for its settings; MODEL: a folder that a size alone does not name
        words.append(f"model.path={HUB.get(name, 'MODEL') if of_size(model) else model}")
    words += [f"{axis}_size={advice.layout.size(axis)}" for axis in ("tp", "cp", "pp", "dp_shard", "dp_replicate")]
    words += [f"zero=stage{config.zero.stage}", f"activation={config.activation.checkpointing.value}"]
    words.append(f"pipeline.schedule={config.pipeline.schedule}")
    words += [f"{key}={getattr(config, key)}" for key in ("seq_len", "global_batch_size", "micro_batch_size")]
    longest = question.model.max_position_embeddings
    if question.seq_len > longest:
        words += [f"model.max_position_embeddings={question.seq_len}", "model.rope_scaling.rope_type=yarn"]
        words.append(f"model.rope_scaling.factor={question.seq_len / longest:g}")
    return [*words, "data.path=docs.jsonl"]


def command(advice: Advice, *, model: str, name: str) -> str:
    gpus, node = advice.question.gpus, advice.question.node
    words = shlex.join(overrides(advice, model=model, name=name))
    if gpus <= guide.SERVER:
        return f"accelerate launch --config_file tools/launch/node8.yaml --num_processes {gpus} -m fourfold {words}"
    servers = f"--nodes={gpus // node}" + (f" --gpus-per-node={node}" if node != guide.SERVER else "")
    return f"sbatch {servers} tools/launch/slurm.sh {words}"
