"""Which operations selective checkpointing keeps: the forward of fused attention, under any of its names.

Attention is the dear one to run again (its cost grows with S^2) and cheap to keep (its output is as large as the hidden
states), while the rest of a layer is matrix products whose inputs take most of the memory.
Checked against torch 2.15 (aten) and, by name only, flash-attn 2 and 3 and the Hugging Face hub's builds of them.
"""

from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

ATEN_NAMES = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    "_flash_attention_forward",
    "_efficient_attention_forward",
    "_cudnn_attention_forward",
)
FLASH_ATTN_NAMES = ("_flash_attn_forward", "_flash_attn_varlen_forward", "fwd", "varlen_fwd")


def keep_attention(context: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """torch's policy function: save the outputs of fused attention, recompute everything else.

    Attention with dropout is recomputed too. Skipping it would leave the random state where it stood before the
    attention, and a later dropout of the same layer (Phi-3's) would draw another mask than in the forward pass.
    """
    if is_fused_attention(op) and dropout_probability(op, args, kwargs) == 0.0:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def is_fused_attention(op: Any) -> bool:
    """`op` is what a dispatch mode sees: an OpOverload, or a higher-order operator, which has no schema."""
    schema = getattr(op, "_schema", None)
    if schema is None:
        return False
    namespace, _, name = schema.name.partition("::")
    if namespace == "aten":
        return name in ATEN_NAMES
    return "flash_attn" in namespace and name in FLASH_ATTN_NAMES


def dropout_probability(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """The value of the op's argument `dropout_p` (`p_dropout` in some builds), 0.0 where it has none."""
    for position, argument in enumerate(op._schema.arguments):
        if argument.name in ("dropout_p", "p_dropout"):
            given = args[position] if position < len(args) else kwargs.get(argument.name, argument.default_value)
            return float(given or 0.0)
    return 0.0
