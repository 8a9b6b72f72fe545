"""A tiny model of every supported family."""

from pathlib import Path
from typing import Any

import torch

from tests.reference import VOCABULARY, WIDTH

SHARED = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}
MIXED = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 10000.0,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 5.0, 8.0],
    "factor": 8.0,
    "original_max_position_embeddings": 8,
    "rope_theta": 10000.0,
}
DYNAMIC_ROPE = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama_tied": ("llama", {"tie_word_embeddings": True}),
    "llama3_rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "mistral": ("mistral", {"sliding_window": 4}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", MIXED),
    "gemma3_text": ("gemma3_text", MIXED),
    "phi3": ("phi3", {"sliding_window": 4}),
}
STRETCHED: dict[str, tuple[str, dict[str, Any]]] = {  # their rotary embedding depends on the longest document beside
    "phi3_longrope": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 8}),
    "llama_dynamic_rope": ("llama", {"rope_parameters": DYNAMIC_ROPE, "max_position_embeddings": 8}),
}


def family_config(name: str, **changes: Any) -> Any:
    from transformers import AutoConfig

    kind, more = {**FAMILIES, **STRETCHED}[name]
    return AutoConfig.for_model(kind, **{**SHARED, **more, **changes})


def family_model(name: str, *, seed: int = 0, **changes: Any) -> Any:
    """Random float32 model in training mode, with eager attention: the reference has nothing fused."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(family_config(name, **changes), attn_implementation="eager").float().train()


def save_family(name: str, folder: Path, **changes: Any) -> Path:
    family_model(name, **changes).save_pretrained(folder)
    return folder
