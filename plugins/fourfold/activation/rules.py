"""Which activation checkpointing a model cannot have. Pure: imports no torch."""

from fourfold.schema import ActivationConfig, Checkpointing


def refusals(settings: ActivationConfig, *, num_layers: int, attn_implementation: str) -> list[str]:
    """Every reason why these settings do not fit a model of `num_layers` layers, each naming the knob."""
    problems = []
    mode, every_n = Checkpointing(settings.checkpointing), settings.every_n
    if every_n is not None and mode != Checkpointing.every_n:
        problems.append(
            f"activation.every_n={every_n} is set but activation.checkpointing={mode.value} does not use it; "
            "use activation.checkpointing=every_n, or activation.every_n=null."
        )
    elif every_n is not None and not 1 <= every_n <= num_layers:
        problems.append(
            f"activation.every_n={every_n} is not between 1 and the {num_layers} layers of the model: use one that is."
        )
    if mode == Checkpointing.selective and attn_implementation in ("eager", "flex_attention"):
        problems.append(
            f"activation.checkpointing=selective keeps the outputs of the fused attention op, but "
            f"model.attn_implementation={attn_implementation} has none; "
            "use activation.checkpointing=full, or model.attn_implementation=sdpa if the model allows it."
        )
    return problems
