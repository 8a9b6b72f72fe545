"""A small model of the same kind: the user's transformers config with fewer and smaller layers, and random weights.

Kept: the family, query heads for each key head, whether key heads are split or repeated over tensor ranks, whether these
divide the vocabulary, tied embeddings, biases, soft-caps, kinds of layers and their order, rotary scaling and on which side of
its threshold the rows lie. Sizes and lengths are made small.
"""

import copy
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fourfold.planner.parameters import head_dim
from fourfold.tensor.cuts import refused_sizes

HEAD_DIM = 8
VOCABULARY = 512
WINDOW = 8  # a sliding window is this part of a row
TOKEN_IDS = ("pad_token_id", "bos_token_id", "eos_token_id")
FACTORS = ("short_factor", "long_factor")  # of longrope: one for each pair of channels


@dataclass(frozen=True, kw_only=True)
class Target:
    """What the small model has to serve."""

    seq_len: int  # of the rows that are verified
    of_seq_len: int  # of the recipe's
    stages: int  # of a pipeline
    tp_size: int
    of_tp_size: int
    cp_size: int  # ranks that heads are spread over; 1 where attention spreads none


def shrunken(config: Any, target: Target) -> Any:
    """A new config; `config` is left as it is."""
    small = copy.deepcopy(config)
    _heads(small, config, target)
    small.intermediate_size = _wide(small.hidden_size * min(4.0, config.intermediate_size / config.hidden_size), target)
    small.vocab_size = _vocabulary(config.vocab_size, target)
    for name in TOKEN_IDS:
        setattr(small, name, _folded(getattr(config, name, None), small.vocab_size))
    _layers(small, config, target)
    _lengths(small, config, target)
    return small


def _heads(small: Any, config: Any, target: Target) -> None:
    each, size = head_dim(config), HEAD_DIM
    groups = config.num_attention_heads // config.num_key_value_heads
    small.num_key_value_heads = next(
        (count for count in _key_heads(config, target) if _serves(small, count, groups, target)),
        config.num_key_value_heads,
    )
    small.num_attention_heads = groups * small.num_key_value_heads
    beside = config.hidden_size == config.num_attention_heads * each  # else the two have nothing to do with each other
    small.hidden_size = small.num_attention_heads * size if beside else 4 * size * max(1, target.tp_size // 2)
    if getattr(config, "head_dim", None):
        small.head_dim = size
    if getattr(config, "query_pre_attn_scalar", None):  # Gemma: 1/scale^2, as large as a head
        small.query_pre_attn_scalar = max(1, round(config.query_pre_attn_scalar * size / each))


def _key_heads(config: Any, target: Target) -> list[int]:
    """How many of them, best first: fewer than tensor ranks where a run has fewer, else as many or a multiple."""
    if target.of_tp_size == 1:
        return [count for count in range(1, 9) if count > 1 or config.num_key_value_heads == 1]
    split = [target.tp_size * count for count in range(1, 9)]
    return [*range(1, target.tp_size), *split] if config.num_key_value_heads < target.of_tp_size else split


def _serves(small: Any, kv_heads: int, groups: int, target: Target) -> bool:
    small.num_key_value_heads, small.num_attention_heads = kv_heads, groups * kv_heads
    small.intermediate_size = _wide(64, target)
    small.head_dim, before = HEAD_DIM, getattr(small, "head_dim", None)
    legal = not list(refused_sizes(small, size=target.tp_size))
    small.head_dim = before
    return legal and small.num_attention_heads >= max(2, target.tp_size * target.cp_size)


def _wide(width: float, target: Target) -> int:
    unit = math.lcm(8, target.tp_size)
    return max(1, round(width / unit)) * unit


def _vocabulary(size: int, target: Target) -> int:
    """Small, and divided by the ranks where the user's is, so that padding is there where it is in a run."""
    if size <= VOCABULARY:
        return size
    even = VOCABULARY // target.tp_size * target.tp_size
    return even if size % target.of_tp_size == 0 else even - 1


def _folded(token: Any, vocabulary: int) -> Any:
    if isinstance(token, list):
        return [one % vocabulary for one in token]
    return None if token is None else token % vocabulary


def _layers(small: Any, config: Any, target: Target) -> None:
    """One more than stages, so that one stage has two; every kind of layer is there."""
    kinds: list[str] = list(getattr(config, "layer_types", None) or [])
    count = max(target.stages, min(config.num_hidden_layers, max(2, len(set(kinds)), target.stages + 1)))
    small.num_hidden_layers = count
    if not kinds:
        return
    kept = [kinds[number % len(kinds)] for number in range(count)]
    missing = [kind for kind in dict.fromkeys(kinds) if kind not in kept]
    small.layer_types = kept[: count - len(missing)] + missing
    if getattr(config, "max_window_layers", None) is not None:
        small.max_window_layers = min(config.max_window_layers, count)


def _lengths(small: Any, config: Any, target: Target) -> None:
    """All thresholds by one factor."""
    ratio = target.seq_len / target.of_seq_len
    small.max_position_embeddings = max(target.seq_len, round(config.max_position_embeddings * ratio))
    if getattr(config, "sliding_window", None) is not None:
        small.sliding_window = max(2, target.seq_len // WINDOW)
    _set_original(small, ratio)
    rope = getattr(small, "rope_parameters", None) or {}
    for one in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        if one.get("original_max_position_embeddings"):
            one["original_max_position_embeddings"] = max(8, round(one["original_max_position_embeddings"] * ratio))
        for name in FACTORS:
            if one.get(name):
                one[name] = _thinned(one[name], _rotated(small, one) // 2)


def _set_original(small: Any, ratio: float) -> None:
    original = getattr(small, "original_max_position_embeddings", None)  # Phi-3 has it beside its rotary parameters
    if original:
        small.original_max_position_embeddings = max(8, round(original * ratio))


def _rotated(small: Any, rope: dict[str, Any]) -> int:
    part = rope.get("partial_rotary_factor") or getattr(small, "partial_rotary_factor", None) or 1.0
    return int(head_dim(small) * part)


def _thinned(factors: list[float], count: int) -> list[float]:
    return [factors[number * len(factors) // count] for number in range(count)]


def write_model(folder: Path, config: Any, *, seed: int) -> int:
    """A Hugging Face folder without a tokenizer; every parameter is random, norms and biases too, so that each shows in the
    loss. Returns the number of parameters."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    folder.mkdir(parents=True)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    draw = torch.Generator().manual_seed(seed)
    weights = {}
    for name, parameter in model.named_parameters():  # tied ones once
        spread = 0.1 if parameter.ndim < 2 else parameter.shape[-1] ** -0.5
        noise = torch.empty(parameter.shape).normal_(0.0, spread, generator=draw)
        weights[name] = parameter.detach() + noise if parameter.ndim < 2 else noise
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "dtype": "float32"}))
    return sum(weight.numel() for weight in weights.values())
