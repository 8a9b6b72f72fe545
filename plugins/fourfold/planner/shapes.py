"""Shapes of models that are known by their size alone ("8B"), for advice before there is any folder. Imports no torch."""

import re
from types import SimpleNamespace
from typing import Any

from fourfold.planner.parameters import parameter_count

# layers, hidden, MLP, heads, key heads, head size, vocabulary, tied. Sources: config.json of the model named.
SHAPES = {
    "SmolLM2 135M": (30, 576, 1536, 9, 3, 64, 49152, True),
    "Llama 3.2 1B": (16, 2048, 8192, 32, 8, 64, 128256, True),
    "Llama 3.2 3B": (28, 3072, 8192, 24, 8, 128, 128256, True),
    "Llama 3.1 8B": (32, 4096, 14336, 32, 8, 128, 128256, False),
    "Llama 3.1 70B": (80, 8192, 28672, 64, 8, 128, 128256, False),
    "Llama 3.1 405B": (126, 16384, 53248, 128, 8, 128, 128256, False),
}
LONGEST = 131072  # positions of Llama 3.1 and 3.2
UNITS = {"M": 1e6, "B": 1e9, "T": 1e12}
EXACT = 0.1  # relative: 8B means Llama 3.1 8B, of 8.03 billion


def of_size(size: str) -> tuple[Any, str] | None:
    """(config, its name) for "8B", "1.2B", "1T"; None for what is no size.

    The nearest shape; with more or fewer layers, as many as make the size, where it is off by more than a tenth.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([MBT])", size.upper())
    if match is None or not float(match[1]):
        return None
    wanted = float(match[1]) * UNITS[match[2]]
    name = min(SHAPES, key=lambda one: abs(_ratio(parameter_count(config_of(one)), wanted) - 1))
    config = config_of(name)
    total = parameter_count(config)
    if abs(total / wanted - 1) <= EXACT:
        return config, name
    layer = (total - parameter_count(config_of(name, layers=0))) / config.num_hidden_layers
    layers = max(1, round((wanted - parameter_count(config_of(name, layers=0))) / layer))
    return config_of(name, layers=layers), f"{layers} layers as wide as {name}'s"


def config_of(name: str, *, layers: int | None = None) -> Any:
    """What transformers' config of the model says, as far as the planner asks."""
    depth, hidden, inner, heads, kv_heads, head_dim, vocabulary, tied = SHAPES[name]
    return SimpleNamespace(
        model_type="llama",
        num_hidden_layers=depth if layers is None else layers,
        hidden_size=hidden,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
        max_position_embeddings=8192 if name.startswith("SmolLM2") else LONGEST,
    )


def _ratio(one: float, other: float) -> float:
    return max(one, other) / min(one, other)
