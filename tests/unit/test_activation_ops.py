"""Which operations selective checkpointing keeps, and how layers are cut into stretches."""

import torch
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from fourfold.activation.attention_ops import dropout_probability, is_fused_attention, keep_attention
from fourfold.activation.stretches import default_every_n, stretch_sizes
from fourfold.schema import Checkpointing


def test_stretches() -> None:
    assert [default_every_n(layers) for layers in (1, 2, 12, 30, 126)] == [1, 1, 3, 5, 11]
    assert stretch_sizes(5, checkpointing=Checkpointing.every_n, every_n=2) == [2, 2, 1]
    assert stretch_sizes(16, checkpointing=Checkpointing.every_n) == [4, 4, 4, 4]
    assert stretch_sizes(3, checkpointing=Checkpointing.full) == [1, 1, 1]
    assert stretch_sizes(3, checkpointing=Checkpointing.none) == []


def test_which_ops_are_kept() -> None:
    aten = torch.ops.aten
    kept = [
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._flash_attention_forward.default,
    ]
    others = [aten.mm.default, aten._softmax.default, aten._scaled_dot_product_flash_attention_for_cpu_backward.default]
    assert all(is_fused_attention(op) for op in kept)
    assert not any(is_fused_attention(op) for op in others)


def test_attention_with_dropout_is_recomputed() -> None:
    """Skipping it would leave the random state behind, and the next dropout of the layer would differ."""
    op = torch.ops.aten._scaled_dot_product_flash_attention.default
    query = torch.empty(1)
    assert dropout_probability(op, (query, query, query), {}) == 0.0
    assert dropout_probability(op, (query, query, query, 0.1), {}) == 0.1
    assert dropout_probability(op, (query, query, query), {"dropout_p": 0.2}) == 0.2
    context = SelectiveCheckpointContext(is_recompute=False)
    assert keep_attention(context, op, query, query, query) == CheckpointPolicy.MUST_SAVE
    assert keep_attention(context, op, query, query, query, 0.1) == CheckpointPolicy.PREFER_RECOMPUTE
