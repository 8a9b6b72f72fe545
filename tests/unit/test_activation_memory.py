"""Elements kept for backward: the plan equals what autograd really saves, and the published formulas come out."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fourfold.activation.checkpointing import apply
from fourfold.activation.measure import Saved, saved_tensors
from fourfold.planner.memory import Cut, activation_elements, layer_bytes, layer_elements, order, zero_state_bytes
from fourfold.schema import ActivationConfig, Checkpointing, Precision

ROWS, LENGTH = 2, 24
MODES = {
    "none": ActivationConfig(),
    "full": ActivationConfig(Checkpointing.full),
    "every_2": ActivationConfig(Checkpointing.every_n, 2),
    "every_default": ActivationConfig(Checkpointing.every_n),
    "selective": ActivationConfig(Checkpointing.selective),
}


def config(layers: int, *, attention: str = "sdpa") -> LlamaConfig:
    return LlamaConfig(
        hidden_size=32,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=6,
        intermediate_size=80,
        vocab_size=64,
        attn_implementation=attention,
    )


def saved(settings: ActivationConfig, *, layers: int, attention: str, dtype: torch.dtype = torch.float32) -> Saved:
    model = LlamaForCausalLM(config(layers, attention=attention)).to(dtype).train()
    apply(model, settings)
    ids = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) % 64
    positions = torch.cat([torch.arange(10), torch.arange(14)]).repeat(ROWS, 1)
    with saved_tensors(model) as found:
        model(input_ids=ids, position_ids=positions, use_cache=False)
    return found


def planned(settings: ActivationConfig, *, layers: int, attention: str) -> int:
    return activation_elements(
        config(layers),
        batch=ROWS,
        seq_len=LENGTH,
        checkpointing=settings.checkpointing,
        every_n=settings.every_n,
        attention=attention,
    ).kept


@pytest.mark.parametrize(
    ("mode", "attention"), [*((mode, "sdpa") for mode in MODES), ("none", "eager"), ("full", "eager")]
)
def test_kept_elements_are_exact(mode: str, attention: str) -> None:
    """Between 9 and 4 layers (stretches of 3 and 2), so that everything outside the layers drops out."""
    settings = MODES[mode]
    many, few = (saved(settings, layers=layers, attention=attention).elements for layers in (9, 4))
    plan = [planned(settings, layers=layers, attention=attention) for layers in (9, 4)]
    assert many - few == plan[0] - plan[1]


def test_bf16_keeps_as_many_elements() -> None:
    settings = MODES["none"]
    many, few = (saved(settings, layers=n, attention="sdpa", dtype=torch.bfloat16).elements for n in (4, 2))
    assert many - few == planned(settings, layers=2, attention="sdpa")


def test_modes_are_ordered() -> None:
    kept = {mode: saved(settings, layers=9, attention="sdpa").elements for mode, settings in MODES.items()}
    assert kept["every_default"] < kept["every_2"] < kept["full"] < kept["selective"] < kept["none"]


def test_peak_by_stretch() -> None:
    """L/n inputs + n layers: lowest at n = sqrt(L x input / layer), well below sqrt(L) as a layer saves over 10 inputs."""

    def peak(every_n: int) -> int:
        found = activation_elements(
            config(64), batch=1, seq_len=64, checkpointing=Checkpointing.every_n, every_n=every_n
        )
        return found.peak

    ratio = layer_elements(config(64), seq_len=64) / 32
    best = min(range(1, 65), key=peak)
    assert ratio > 10
    assert best == round((64 / ratio) ** 0.5) == 2
    none = activation_elements(config(64), batch=1, seq_len=64)
    assert peak(64) == none.peak


def test_a_layer_in_parts() -> None:
    """6H + 2 + 4Q + A + S + 4I per token; grouped keys are repeated but for flash_attention_2."""
    assert layer_elements(config(1), seq_len=24) == 6 * 32 + 2 + 4 * 48 + 8 + 24 + 4 * 80
    assert (
        layer_elements(config(1), seq_len=24, attention="flash_attention_2")
        == 6 * 32 + 2 + 2 * 48 + 2 * 12 + 8 + 4 * 80
    )
    with pytest.raises(ValueError, match="ring"):
        layer_elements(config(1), seq_len=24, attention="ring")


def test_a_layer_on_tensor_ranks() -> None:
    """Inputs of the blocks 2H, /t with regather; norms 4H + 2, /t with parts of the sequence; 2Q + A + 4I over t; each rank
    at least one of the two key heads of 6."""

    def elements(size: int, **more: bool) -> int:
        return layer_elements(config(1), seq_len=24, attention="fourfold", tokens=24, cut=Cut(size, **more))

    def inside(size: int) -> int:
        return 24 * ((2 * 48 + 8 + 4 * 80) // size + 2 * max(6, 12 // size))

    assert elements(1) == 24 * layer_elements(config(1), seq_len=24, attention="flash_attention_2")
    for size in (2, 4):
        assert elements(size) == inside(size) + 24 * 130 // size + 24 * 64
        assert elements(size, regather=True) == inside(size) + 24 * (130 + 64) // size
        assert elements(size, sequence_parallel=False) == inside(size) + 24 * (130 + 64)
    with pytest.raises(ValueError, match="tp_size=2"):
        layer_elements(config(1), seq_len=24, cut=Cut(2))


def test_korthikanti_equation_2() -> None:
    """Their GPT-3 layer (table 3): s=2048, b=1, h=12288, a=96; the second term is 2.35 times the first."""
    gpt3 = LlamaConfig(hidden_size=12288, num_attention_heads=96)
    whole, flash = (layer_bytes(gpt3, batch=1, seq_len=2048, flash=flash) for flash in (False, True))
    assert flash == 34 * 2048 * 12288
    assert whole - flash == 5 * 96 * 2048**2
    assert (whole - flash) / flash == pytest.approx(80 / 34)


def test_orders_of_the_lecture() -> None:
    assert (order(64, every_n=1).memory, order(64, every_n=1).compute) == (1, 64**2)
    assert (order(64, every_n=16).memory, order(64, every_n=16).compute) == (16, 64**2 / 16)
    assert (order(64, every_n=None).memory, order(64, every_n=None).compute) == (8, 64 * 8)
    assert (order(64, every_n=64).memory, order(64, every_n=64).compute) == (64, 64)
    with pytest.raises(ValueError, match="every_n=65"):
        order(64, every_n=65)


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_zero_paper_table_1(stage: int, gigabytes: float) -> None:
    found = zero_state_bytes(7_500_000_000, stage=stage, shard_size=64, precision=Precision.bf16)
    assert round(found.total / 1e9, 1) == gigabytes


def test_zero_state_in_float32() -> None:
    found = zero_state_bytes(1000, stage=3, shard_size=4, precision=Precision.fp32)
    assert (found.weights, found.gradients, found.master, found.moments) == (1000, 1000, 0, 2000)
    bad: dict[str, Any] = {"stage": 4, "shard_size": 4, "precision": Precision.fp32}
    with pytest.raises(ValueError, match=r"zero\.stage=4"):
        zero_state_bytes(1000, **bad)
