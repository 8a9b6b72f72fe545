"""How many parameters a model has, from its Hugging Face config alone. Imports no torch.

Never from numel(): under ZeRO-3 and tensor parallelism a rank holds a part of each parameter, or none of it.
Covers the Llama kind: Llama, Qwen2, Qwen3, Mistral, Gemma 1-3 (text), Phi-3 and what shares their structure.
"""

from typing import Any

SANDWICH_NORMS = ("gemma2", "gemma3_text")  # a norm before and after both attention and MLP
HEAD_NORMS = ("qwen3", "gemma3_text")  # a norm over each head's query and key


def head_dim(config: Any) -> int:
    """Channels of one attention head; configs without the attribute divide the hidden size by the heads."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def query_size(config: Any) -> int:
    return config.num_attention_heads * head_dim(config)


def key_value_size(config: Any) -> int:
    """Channels of all keys (or values) of one token: fewer than the queries' under grouped-query attention."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return heads * head_dim(config)


def layer_matmul_parameters(config: Any) -> int:
    """Elements of one decoder layer's matrices: q, k, v, o and gate, up, down."""
    hidden = config.hidden_size
    attention = hidden * (2 * query_size(config) + 2 * key_value_size(config))
    return attention + 3 * hidden * config.intermediate_size


def matmul_parameters(config: Any) -> int:
    """Elements of all matrices that a token is multiplied with: the N of the 6N rule.

    The head is included and the embedding look-up is not, so tied and untied models give the same number; norms and
    biases are excluded.
    """
    return config.num_hidden_layers * layer_matmul_parameters(config) + config.vocab_size * config.hidden_size


def parameter_count(config: Any) -> int:
    """Elements of all parameters, a tied embedding once: what the optimizer holds and a checkpoint stores."""
    embedding = config.vocab_size * config.hidden_size
    tied = getattr(config, "tie_word_embeddings", False)
    per_layer = _layer_norms(config) + _layer_biases(config)
    total = matmul_parameters(config) + config.num_hidden_layers * per_layer + config.hidden_size
    return total if tied else total + embedding


def _layer_norms(config: Any) -> int:
    norms = 4 if config.model_type in SANDWICH_NORMS else 2
    return norms * config.hidden_size + (2 * head_dim(config) if config.model_type in HEAD_NORMS else 0)


def _layer_biases(config: Any) -> int:
    query, key_value, hidden = query_size(config), key_value_size(config), config.hidden_size
    if config.model_type == "qwen2":  # has no switch for it: q, k, v with a bias, o without
        return query + 2 * key_value
    biases = 0
    if getattr(config, "attention_bias", False):
        biases += query + 2 * key_value + hidden
    if getattr(config, "mlp_bias", False):
        biases += 2 * config.intermediate_size + hidden
    return biases
