"""What each checkpointing mode keeps, recomputes and costs on a small Llama, beside the plan and the published formulas.

    uv run python tools/bench/activation.py --layers 16

Elements are counted by saved_tensors_hooks (parameters excluded, each storage once, rotary tables and everything outside
the decoder layers excluded), FLOPs by torch's FlopCounterMode, time is the best of a few steps (forward and backward).
"""

import argparse
import time
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from fourfold.activation.checkpointing import apply
from fourfold.activation.measure import Saved, saved_tensors
from fourfold.activation.stretches import default_every_n
from fourfold.planner.flops import Flops, attention_pairs, step_flops
from fourfold.planner.memory import Activations, activation_elements, layer_bytes, layer_elements, order
from fourfold.planner.parameters import layer_matmul_parameters, query_size
from fourfold.schema import ActivationConfig, Checkpointing

ROWS, LENGTH = 2, 128
DOCUMENTS = (80, 48)  # tokens of the documents packed into each row


@dataclass(frozen=True)
class Measured:
    elements: int  # kept by all decoder layers
    flops: int  # forward and backward, as torch counts them
    seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--steps", type=int, default=3, help="timed steps of each mode; the best counts")
    options = parser.parse_args()
    torch.set_num_threads(1)  # several threads fight over small products, and the ratios with them
    config = llama(options.layers)
    measured = measure_all(config, modes(options.layers), steps=options.steps)
    console = Console(width=None if Console().is_terminal else 120)
    console.print(
        f"Llama, {options.layers} layers, hidden {config.hidden_size}, {config.num_attention_heads} heads, "
        f"{ROWS} rows of {LENGTH} tokens (documents of {DOCUMENTS[0]} and {DOCUMENTS[1]}), float32, "
        f"one thread"
    )
    console.print(memory_table(config, measured))
    console.print(compute_table(config, measured))
    console.print(bytes_table(config))


def llama(layers: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=344,
        vocab_size=256,
    )


def modes(layers: int) -> list[ActivationConfig]:
    """None, full, stretches from 2 layers to all of them with the default among them, selective."""
    stretches = sorted({2, default_every_n(layers), layers // 2, layers} - {0, 1})
    every = [ActivationConfig(Checkpointing.every_n, size) for size in stretches if size <= layers]
    return [ActivationConfig(), ActivationConfig(Checkpointing.full), *every, ActivationConfig(Checkpointing.selective)]


def label(settings: ActivationConfig) -> str:
    return settings.checkpointing.value if settings.every_n is None else f"every_n, n={settings.every_n}"


def build(config: LlamaConfig, settings: ActivationConfig) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).train()
    if config.num_hidden_layers:
        apply(model, settings)
    return model


def batch() -> dict[str, Any]:
    ids = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) % 256
    positions = torch.cat([torch.arange(length) for length in DOCUMENTS]).repeat(ROWS, 1)
    return {"input_ids": ids, "position_ids": positions, "labels": ids, "use_cache": False}


# ---------------------------------------------------------------- measuring


def measure_all(
    config: LlamaConfig, wanted: list[ActivationConfig], *, steps: int
) -> list[tuple[ActivationConfig, Measured]]:
    models = [build(config, settings) for settings in wanted]
    outside = saved(build(LlamaConfig(**{**config.to_dict(), "num_hidden_layers": 0}), ActivationConfig())).elements
    seconds = [float("inf")] * len(models)
    for _ in range(steps):  # in turns, so that a busy machine slows all modes alike
        for index, model in enumerate(models):
            seconds[index] = min(seconds[index], timed_step(model))
    return [
        (settings, Measured(saved(model).elements - outside, counted_flops(model), best))
        for settings, model, best in zip(wanted, models, seconds, strict=True)
    ]


def saved(model: LlamaForCausalLM) -> Saved:
    tables: list[Tensor] = []
    handle = model.model.rotary_emb.register_forward_hook(lambda module, args, output: tables.extend(output))
    with saved_tensors(model) as found:
        model(**batch())
    handle.remove()
    found.drop(tables)
    return found


def counted_flops(model: LlamaForCausalLM) -> int:
    with FlopCounterMode(display=False) as counter:
        model(**batch()).loss.backward()
    model.zero_grad()
    return counter.get_total_flops()


def timed_step(model: LlamaForCausalLM) -> float:
    start = time.perf_counter()
    model(**batch()).loss.backward()
    seconds = time.perf_counter() - start
    model.zero_grad()
    return seconds


# ---------------------------------------------------------------- tables


def planned_memory(config: LlamaConfig, settings: ActivationConfig) -> Activations:
    return activation_elements(
        config, batch=ROWS, seq_len=LENGTH, checkpointing=settings.checkpointing, every_n=settings.every_n
    )


def planned_flops(config: LlamaConfig, settings: ActivationConfig, *, pairs: int) -> Flops:
    return step_flops(
        config,
        tokens=ROWS * LENGTH,
        pairs_full=pairs,
        checkpointing=settings.checkpointing,
        every_n=settings.every_n,
    )


def lecture(config: LlamaConfig, settings: ActivationConfig) -> tuple[str, str]:
    """The lecture's memory and compute for these settings, as numbers of layers; none for selective."""
    layers = config.num_hidden_layers
    stretch = {"none": layers, "full": 1, "every_n": settings.every_n}.get(settings.checkpointing.value)
    if stretch is None:
        return "", ""
    found = order(layers, every_n=stretch)
    return f"{found.memory:.0f}", f"{found.compute:.0f}"


def memory_table(config: LlamaConfig, measured: list[tuple[ActivationConfig, Measured]]) -> Table:
    table = Table(title="Elements kept for backward", caption=MEMORY_NOTE, title_justify="left", caption_justify="left")
    for name in (
        "mode",
        "kept a layer\nand token",
        "planned",
        "share\nof none",
        "recomputed\nat a time",
        "peak,\nin layers",
        "lecture:\nO(C)",
    ):
        table.add_column(name, justify="left" if name == "mode" else "right", no_wrap=True)
    tokens, layers = ROWS * LENGTH, config.num_hidden_layers
    one_layer = tokens * layer_elements(config, seq_len=LENGTH)
    for settings, found in measured:
        plan = planned_memory(config, settings)
        table.add_row(
            label(settings),
            f"{found.elements / tokens / layers:.1f}",
            f"{plan.kept / tokens / layers:.1f}",
            f"{found.elements / measured[0][1].elements:.1%}",
            f"{plan.recomputed / tokens:.0f}",
            f"{plan.peak / one_layer:.2f}",
            lecture(config, settings)[0],
        )
    return table


def compute_table(config: LlamaConfig, measured: list[tuple[ActivationConfig, Measured]]) -> Table:
    table = Table(title="Compute of one step", caption=COMPUTE_NOTE, title_justify="left", caption_justify="left")
    for name in (
        "mode",
        "recomputed\nMFLOP",
        "planned",
        "layer forwards,\nof all layers",
        "lecture:\nO(N²/C)",
        "HFU/MFU",
        "time\nratio",
    ):
        table.add_column(name, justify="left" if name == "mode" else "right", no_wrap=True)
    plain, layers = measured[0][1], config.num_hidden_layers
    every_pair = ROWS * LENGTH**2
    forward = layers * (2 * layer_matmul_parameters(config) * ROWS * LENGTH + 4 * every_pair * query_size(config))
    for settings, found in measured:
        again = found.flops - plain.flops
        plan = planned_flops(config, settings, pairs=every_pair)
        allowed = planned_flops(config, settings, pairs=ROWS * attention_pairs(DOCUMENTS))
        table.add_row(
            label(settings),
            f"{again / 1e6:.1f}",
            f"{(plan.hardware - plan.model) / 1e6:.1f}",
            f"{layers * (1 + again / forward):.1f}",
            lecture(config, settings)[1],
            f"{allowed.hardware / allowed.model:.3f}",
            f"{found.seconds / plain.seconds:.2f}",
        )
    return table


def bytes_table(config: LlamaConfig) -> Table:
    """Counted between a model of two layers and one of one, without checkpointing."""
    table = Table(
        title="Bytes of one layer, no checkpointing", caption=BYTES_NOTE, title_justify="left", caption_justify="left"
    )
    for name in ("what", "bytes", "bytes / sbh"):
        table.add_column(name, justify="left" if name == "what" else "right")
    unit = ROWS * LENGTH * config.hidden_size
    rows: list[tuple[str, float]] = [
        (f"counted, {name}, {attention} attention", one_layer_bytes(config, dtype=dtype, attention=attention))
        for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16))
        for attention in ("sdpa", "eager")
    ]
    rows.append(("sbh (34 + 5 a s / h)", layer_bytes(config, batch=ROWS, seq_len=LENGTH)))
    rows.append(("sbh 34, flash attention", layer_bytes(config, batch=ROWS, seq_len=LENGTH, flash=True)))
    for what, size in rows:
        table.add_row(what, f"{size:,.0f}", f"{size / unit:.1f}")
    return table


def one_layer_bytes(config: LlamaConfig, *, dtype: torch.dtype, attention: str) -> int:
    def count(layers: int) -> int:
        sizes = LlamaConfig(**{**config.to_dict(), "num_hidden_layers": layers, "attn_implementation": attention})
        return saved(build(sizes, ActivationConfig()).to(dtype)).bytes

    return count(2) - count(1)


MEMORY_NOTE = (
    "kept: counted by saved_tensors_hooks. recomputed at a time: planned, elements a token of the longest stretch. peak: "
    "kept + recomputed over what one layer saves. The lecture counts one stretch's C layers and not the N/C kept inputs."
)
COMPUTE_NOTE = (
    "recomputed: FlopCounterMode, above none; it counts attention as S x S, and so does the plan beside it. The lecture "
    "recomputes from the last checkpoint for every layer anew; here each stretch is recomputed once, and stops early. "
    "HFU/MFU: planned, with the pairs that the mask allows."
)
BYTES_NOTE = (
    "The formula (Korthikanti et al. 2022, eq. 2) is for GPT's layer: MLP of 4h, dropout, 16 bits, eager attention."
)

if __name__ == "__main__":
    main()
