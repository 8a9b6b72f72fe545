"""FLOPs from the config equal what torch counts on the real module, and recomputation never enters the model's own."""

import inspect
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from fourfold.activation.checkpointing import apply
from fourfold.planner import flops as flops_module
from fourfold.planner.flops import attention_pairs, matmul_parameters, parameter_count, step_flops, windowed_layers
from fourfold.schema import ActivationConfig, Checkpointing

LAYERS, ROWS, LENGTH = 5, 2, 12
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 64,
    "pad_token_id": 0,
}
MIXED = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"]
KINDS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SIZES, tie_word_embeddings=False),
    "llama_tied": lambda: LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama_biases": lambda: LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "qwen2": lambda: Qwen2Config(**SIZES),
    "qwen3_wide_heads": lambda: Qwen3Config(**SIZES, head_dim=16),
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=6),
    "gemma": lambda: GemmaConfig(**SIZES, head_dim=8),
    "gemma2": lambda: Gemma2Config(**SIZES, head_dim=8),
    "gemma3": lambda: Gemma3TextConfig(**SIZES, head_dim=16, layer_types=MIXED),
    "phi3": lambda: Phi3Config(**SIZES, resid_pdrop=0.0),
    "phi3_dropout": lambda: Phi3Config(**SIZES, resid_pdrop=0.1),
}
MODES = [
    ActivationConfig(),
    ActivationConfig(Checkpointing.full),
    ActivationConfig(Checkpointing.every_n, 2),
    ActivationConfig(Checkpointing.every_n),
    ActivationConfig(Checkpointing.selective),
]
LLAMA_405B = LlamaConfig(
    hidden_size=16384,
    num_hidden_layers=126,
    num_attention_heads=128,
    num_key_value_heads=8,
    intermediate_size=53248,
    vocab_size=128256,
    tie_word_embeddings=False,
)


def build(config: PreTrainedConfig, settings: ActivationConfig, attention: str) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).train()
    apply(model, settings)
    return model


def counted(model: PreTrainedModel) -> int:
    """torch's own count of forward and backward, without rotary angles, a product in some transformers versions."""
    ids = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) % SIZES["vocab_size"]
    with FlopCounterMode(display=False, depth=9) as counter:
        model(input_ids=ids, use_cache=False).logits.sum().backward()
    rotary = sum(sum(ops.values()) for name, ops in counter.get_flop_counts().items() if name.endswith("rotary_emb"))
    return counter.get_total_flops() - rotary


def planned(config: PreTrainedConfig, settings: ActivationConfig) -> flops_module.Flops:
    pairs = ROWS * LENGTH * LENGTH  # torch counts every pair, masked or not
    return step_flops(
        config,
        tokens=ROWS * LENGTH,
        pairs_full=pairs,
        pairs_windowed=pairs,
        checkpointing=settings.checkpointing,
        every_n=settings.every_n,
    )


def label(settings: ActivationConfig) -> str:
    return f"{settings.checkpointing.value}_{settings.every_n}"


@pytest.mark.parametrize("settings", [mode for mode in MODES if mode.checkpointing != "selective"], ids=label)
@pytest.mark.parametrize("kind", KINDS)
def test_hardware_equals_torchs_count(kind: str, settings: ActivationConfig) -> None:
    config = KINDS[kind]()
    assert counted(build(config, settings, "eager")) == planned(config, settings).hardware


@pytest.mark.parametrize("settings", MODES, ids=label)
@pytest.mark.parametrize("kind", ["llama", "qwen3_wide_heads", "gemma3"])
def test_recomputation_equals_torchs_count_with_fused_attention(kind: str, settings: ActivationConfig) -> None:
    """The backward of the fused op recomputes the scores by itself, in every mode: differences are compared."""
    config = KINDS[kind]()
    plan = planned(config, settings)
    again = counted(build(config, settings, "sdpa")) - counted(build(config, ActivationConfig(), "sdpa"))
    assert again == plan.hardware - plan.model


@pytest.mark.parametrize("kind", KINDS)
def test_parameter_count(kind: str) -> None:
    config = KINDS[kind]()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert parameter_count(config) == sum(parameter.numel() for parameter in model.parameters())
    matrices = {name: p.numel() for name, p in model.named_parameters(remove_duplicate=False) if p.dim() == 2}
    embedding = matrices.pop("model.embed_tokens.weight")
    head = 0 if "lm_head.weight" in matrices else embedding
    assert matmul_parameters(config) == sum(matrices.values()) + head


def test_llama_405b() -> None:
    """Llama 3 paper: 405B parameters; 6N rule: 3.8e25 FLOPs for 15.6T tokens."""
    assert parameter_count(LLAMA_405B) == 405_853_388_800
    assert matmul_parameters(LLAMA_405B) == 405_853_388_800 - 128256 * 16384 - (2 * 126 + 1) * 16384
    six_n = step_flops(LLAMA_405B, tokens=1, pairs_full=0).model
    assert six_n == 6 * matmul_parameters(LLAMA_405B)
    assert six_n * 15.6e12 == pytest.approx(3.8e25, rel=0.01)


def test_attention_pairs() -> None:
    def counted_one_by_one(length: int, window: int | None) -> int:
        return sum(k <= q and (window is None or k > q - window) for q in range(length) for k in range(length))

    for window in (None, 1, 2, 5, 7, 50):
        for lengths in ([], [1], [7], [3, 4], [1, 5, 6, 12]):
            expected = sum(counted_one_by_one(length, window) for length in lengths)
            assert attention_pairs(lengths, window=window) == expected
    with pytest.raises(ValueError, match="window=0"):
        attention_pairs([3], window=0)


def test_pairs_are_those_of_the_real_masks() -> None:
    """Packed rows and a sliding window: the masks that transformers makes, counted."""
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

    config = KINDS["mistral"]()
    config._attn_implementation = "sdpa"
    positions = torch.cat([torch.arange(9), torch.arange(3)])[None]
    kwargs = {
        "config": config,
        "inputs_embeds": torch.zeros(1, 12, 32),
        "attention_mask": None,
        "position_ids": positions,
    }
    cache = "cache" if "cache" in inspect.signature(create_causal_mask).parameters else "past_key_values"
    full = create_causal_mask(**kwargs, **{cache: None})
    windowed = create_sliding_window_causal_mask(**kwargs, **{cache: None})
    assert int(full.sum()) == attention_pairs([9, 3])
    assert int(windowed.sum()) == attention_pairs([9, 3], window=6)


def test_windowed_layers() -> None:
    counts = {kind: windowed_layers(make()) for kind, make in KINDS.items()}
    assert counts["mistral"] == LAYERS
    assert counts["gemma3"] == 3
    assert counts["gemma2"] == 3  # every other one, the first included
    assert counts["llama"] == counts["qwen2"] == counts["phi3"] == 0
    with pytest.raises(ValueError, match="pairs_windowed"):
        step_flops(KINDS["mistral"](), tokens=8, pairs_full=36)


def test_windowed_and_full_layers_are_counted_apart() -> None:
    config = KINDS["gemma3"]()
    both = step_flops(config, tokens=8, pairs_full=36, pairs_windowed=11).model
    bare = step_flops(config, tokens=8, pairs_full=0, pairs_windowed=1).model
    assert both - bare == 12 * (2 * 36 + 3 * (11 - 1)) * 4 * 16


class TestM03:
    """The number comes from the config: no strategy, tie or recomputation moves it (case M03)."""

    tokens = 128
    sizes: ClassVar[dict[str, Any]] = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "vocab_size": 64,
    }

    def per_token(self, **changes: Any) -> int:
        """All S x S pairs, as the case counts them."""
        config = LlamaConfig(**{**self.sizes, **changes})
        return step_flops(config, tokens=self.tokens, pairs_full=self.tokens**2).model // self.tokens

    def test_right_figure(self) -> None:
        assert self.per_token() == 221_184

    def test_tied_equals_untied(self) -> None:
        assert self.per_token(tie_word_embeddings=True) == self.per_token(tie_word_embeddings=False)

    def test_wrong_variants_differ(self) -> None:
        config = LlamaConfig(**self.sizes)
        all_parameters = 6 * (parameter_count(config) - matmul_parameters(config)) + self.per_token()
        assert all_parameters == 234_432
        assert self.per_token(num_key_value_heads=4) == 233_472

    def test_checkpointing_raises_hardware_only(self) -> None:
        config = LlamaConfig(**self.sizes)
        found = [
            step_flops(
                config,
                tokens=self.tokens,
                pairs_full=self.tokens**2,
                checkpointing=mode.checkpointing,
                every_n=mode.every_n,
            )
            for mode in MODES
        ]
        assert {flops.model // self.tokens for flops in found} == {221_184}
        none, full, two, default, selective = (flops.hardware // self.tokens for flops in found)
        assert none == 221_184 < selective < full == default < two  # round(sqrt(2)) is 1
        # The case's HFU of 294,912 is 4/3 of the model's: it runs the head and each layer's down_proj again too.
        assert full + 2 * (64 * 32 + 2 * 64 * 32) == 294_912

    def test_no_tensor_is_asked(self) -> None:
        """numel() of a parameter partitioned by ZeRO-3 or tensor parallelism is what goes wrong elsewhere."""
        assert "torch" not in vars(flops_module)
        assert "numel" not in inspect.getsource(flops_module)
