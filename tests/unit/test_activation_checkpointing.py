"""Checkpointing must change memory and time, never a number: gradients equal those of `none` bit by bit."""

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

from fourfold.activation.attention_ops import is_fused_attention
from fourfold.activation.checkpointing import apply, refusals
from fourfold.schema import ActivationConfig, Checkpointing

LAYERS = 5
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MIXED = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"]
MODES = {
    "full": ActivationConfig(Checkpointing.full),
    "every_1": ActivationConfig(Checkpointing.every_n, 1),
    "every_2": ActivationConfig(Checkpointing.every_n, 2),
    "every_3": ActivationConfig(Checkpointing.every_n, 3),
    "every_all": ActivationConfig(Checkpointing.every_n, LAYERS),
    "every_default": ActivationConfig(Checkpointing.every_n),
    "selective": ActivationConfig(Checkpointing.selective),
}


def config(kind: str, *, dropout: float = 0.0) -> PreTrainedConfig:
    sizes: dict[str, Any] = {**SIZES, "attention_dropout": dropout}
    makers: dict[str, Callable[[], PreTrainedConfig]] = {
        "llama": lambda: LlamaConfig(**sizes),
        "qwen3": lambda: Qwen3Config(**sizes, head_dim=8),
        "mistral": lambda: MistralConfig(**sizes, sliding_window=6),
        "gemma2": lambda: Gemma2Config(**sizes, head_dim=8, sliding_window=6, attn_implementation="eager"),
        "gemma3": lambda: Gemma3TextConfig(**sizes, head_dim=8, sliding_window=6, layer_types=MIXED),
        "phi3": lambda: Phi3Config(**sizes, resid_pdrop=dropout, embd_pdrop=dropout),
    }
    return makers[kind]()


def build(kind: str, *, dropout: float = 0.0) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config(kind, dropout=dropout)).train()


def with_mode(model: PreTrainedModel, mode: str) -> PreTrainedModel:
    twin = copy.deepcopy(model)
    apply(twin, MODES[mode])
    return twin


def packed_rows(seed: int = 1) -> dict[str, Any]:
    """Two rows of 20 tokens, each of two documents."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, SIZES["vocab_size"], (2, 20), generator=generator)
    positions = torch.stack([torch.cat([torch.arange(n), torch.arange(20 - n)]) for n in (9, 14)])
    return {"input_ids": ids, "position_ids": positions, "labels": ids, "use_cache": False}


def gradients(model: PreTrainedModel, **kwargs: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(2)  # of the dropout masks
    loss = model(**{**packed_rows(), **kwargs}).loss
    loss.backward()
    return {"loss": loss.detach(), **gradients_of(model)}


def gradients_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(got) == list(expected)
    different = [name for name in expected if not torch.equal(got[name], expected[name])]
    assert not different


@contextmanager
def counted_calls(model: PreTrainedModel) -> Iterator[Counter]:
    """How often the attention of each layer starts, recomputation included."""
    calls: Counter = Counter()
    handles = [
        layer.self_attn.register_forward_pre_hook(lambda *_, index=index: calls.update([index]))
        for index, layer in enumerate(model.model.layers)
    ]
    yield calls
    for handle in handles:
        handle.remove()


class OpCounter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.fused_attention = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.fused_attention += is_fused_attention(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "gemma2", "gemma3", "phi3"])
def test_gradients_are_bit_equal(kind: str, dropout: float) -> None:
    model = build(kind, dropout=dropout)
    expected = gradients(copy.deepcopy(model))
    for mode in MODES:
        if not (kind == "gemma2" and mode == "selective"):  # eager attention: refused, tested below
            assert_same(gradients(with_mode(model, mode)), expected)


def test_dropout_really_draws() -> None:
    model = build("phi3", dropout=0.1)
    assert not torch.equal(gradients(copy.deepcopy(model))["loss"], gradients(copy.deepcopy(model).eval())["loss"])


@pytest.mark.parametrize("mode", MODES)
def test_under_autocast(mode: str) -> None:
    model = build("llama")
    with torch.autocast("cpu", torch.bfloat16):
        expected = gradients(copy.deepcopy(model))
        assert_same(gradients(with_mode(model, mode)), expected)


@pytest.mark.parametrize("mode", MODES)
def test_frozen_embedding(mode: str) -> None:
    """The first stretch's input needs no gradient, its parameters do."""
    model = build("llama")
    model.model.embed_tokens.requires_grad_(False)
    assert_same(gradients(with_mode(model, mode)), gradients(model))


@pytest.mark.parametrize("mode", MODES)
def test_several_passes_in_flight(mode: str) -> None:
    def two_passes(model: PreTrainedModel) -> dict[str, torch.Tensor]:
        torch.manual_seed(2)
        losses = [model(**packed_rows(seed)).loss for seed in (1, 2)]
        for loss in losses:
            loss.backward()
        return gradients_of(model)

    model = build("phi3", dropout=0.1)
    assert_same(two_passes(with_mode(model, mode)), two_passes(model))


@pytest.mark.parametrize("mode", MODES)
def test_backward_recomputes_each_layer_once(mode: str) -> None:
    model = with_mode(build("llama"), mode)
    with counted_calls(model) as calls:
        loss = model(**packed_rows()).loss
        assert calls == dict.fromkeys(range(LAYERS), 1)
        loss.backward()
    assert calls == dict.fromkeys(range(LAYERS), 2)


@pytest.mark.parametrize(("mode", "times"), [("full", 2), ("every_2", 2), ("selective", 1)])
def test_selective_alone_runs_attention_once(mode: str, times: int) -> None:
    model = with_mode(build("llama"), mode)
    with OpCounter() as counter:
        model(**packed_rows()).loss.backward()
    assert counter.fused_attention == times * LAYERS


@pytest.mark.parametrize("mode", MODES)
def test_evaluation_runs_plainly(mode: str) -> None:
    plain, cached = build("llama").eval(), {**packed_rows(), "use_cache": True}
    model = with_mode(build("llama"), mode).eval()
    with counted_calls(model) as calls:
        out = model(**cached, output_hidden_states=True)
        out.loss.backward()
    assert calls == dict.fromkeys(range(LAYERS), 1)
    expected = plain(**cached, output_hidden_states=True).hidden_states
    assert all(torch.equal(a, b) for a, b in zip(out.hidden_states, expected, strict=True))
    with torch.no_grad():
        assert torch.equal(model.train()(**cached).loss, out.loss)


@pytest.mark.parametrize("mode", MODES)
def test_names_stay(mode: str) -> None:
    plain, model = build("gemma3"), with_mode(build("gemma3"), mode)
    assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert list(model.state_dict()) == list(plain.state_dict())


def test_a_copy_uses_its_own_weights() -> None:
    model = with_mode(build("llama"), "every_2")
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert_same(gradients(twin), gradients(build("llama")))


def test_a_pass_that_failed_midway_leaves_nothing() -> None:
    model = with_mode(build("llama"), "every_3")
    handle = model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(**packed_rows())
    handle.remove()
    assert_same(gradients(model), gradients(build("llama")))


@pytest.mark.parametrize("mode", ["full", "every_2", "selective"])
def test_cache_is_refused_in_training(mode: str) -> None:
    model = with_mode(build("llama"), mode)
    with pytest.raises(ValueError, match="use_cache=False"):
        model(**{**packed_rows(), "use_cache": True})


def test_hidden_states_inside_a_stretch_are_refused() -> None:
    with pytest.raises(ValueError, match="output_hidden_states"):
        with_mode(build("llama"), "every_2")(**packed_rows(), output_hidden_states=True)
    plain, full = build("llama"), with_mode(build("llama"), "full")
    got, expected = (model(**packed_rows(), output_hidden_states=True).hidden_states for model in (full, plain))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_two_mechanisms_at_once_are_refused() -> None:
    model = build("llama")
    model.activation_checkpointing_enable()
    with pytest.raises(ValueError, match="activation_checkpointing_enable"):
        apply(model, MODES["full"])


def test_other_models_are_refused_by_name() -> None:
    model = AutoModelForCausalLM.from_config(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=8, n_positions=8))
    with pytest.raises(ValueError, match="GPT2LMHeadModel"):
        apply(model, MODES["full"])


def test_settings_are_checked_by_apply_too() -> None:
    with pytest.raises(ValueError, match="every_n=6"):
        apply(build("llama"), ActivationConfig(Checkpointing.every_n, 6))
    with pytest.raises(ValueError, match="eager"):
        apply(build("gemma2"), MODES["selective"])


@pytest.mark.parametrize(
    ("settings", "attention", "words"),
    [
        (ActivationConfig(Checkpointing.every_n, 0), "sdpa", ["every_n=0", "12 layers"]),
        (ActivationConfig(Checkpointing.every_n, 13), "sdpa", ["every_n=13", "12 layers"]),
        (ActivationConfig(Checkpointing.full, 2), "sdpa", ["every_n=2", "checkpointing=full"]),
        (ActivationConfig(Checkpointing.none, 2), "sdpa", ["every_n=2", "checkpointing=none"]),
        (ActivationConfig(Checkpointing.selective), "eager", ["selective", "eager", "checkpointing=full"]),
    ],
)
def test_refusals(settings: ActivationConfig, attention: str, words: list[str]) -> None:
    (problem,) = refusals(settings, num_layers=12, attn_implementation=attention)
    assert all(word in problem for word in words)


def test_nothing_refused_that_works() -> None:
    for settings in [ActivationConfig(), *MODES.values()]:
        assert refusals(settings, num_layers=LAYERS, attn_implementation="sdpa") == []
