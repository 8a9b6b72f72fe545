"""`fourfold export --to megatron|torchtitan|accelerate|deepspeed key=value ...`: a recipe for other launchers."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fourfold import legality
from fourfold.interop import accelerate, megatron, torchtitan
from fourfold.interop.settings import Recipe, Settings, unsaid_everywhere
from fourfold.planner.known import config_at_hand, config_to_plan
from fourfold.schema import TrainConfig
from fourfold.zero.settings import deepspeed_json


def show_settings(config: TrainConfig, *, to: str, gpus: int | None) -> None:
    """The settings on stdout, what they leave out on stderr. ValueError for what a run would refuse."""
    if gpus is not None and gpus < 1:
        raise ValueError(f"--gpus {gpus}: use 1 or more.")
    world_size = gpus or legality.least_world(config)
    layout = legality.check(config, world_size=world_size, model_config=config_at_hand(config.model))
    model, attention = _model_config(config), config.attention.name
    if model is not None:
        from fourfold.context.select import strategy_class

        legality.check(config, world_size=world_size, model_config=model, attn_implementation="fourfold")
        attention = strategy_class(config, model_config=model).name
    found = LAUNCHERS[to](Recipe(config=config, layout=layout, model=model, attention=attention))
    print(found.text, flush=True)
    for sentence in [*found.unsaid, *unsaid_everywhere(config)]:
        print(f"not said: {sentence}", file=sys.stderr)


def deepspeed(recipe: Recipe) -> Settings:
    """The JSON that a run itself hands to DeepSpeed, whose engine is told of one micro-batch a step."""
    axes = [axis for axis in ("tp", "cp", "pp") if recipe.layout.size(axis) > 1]
    unsaid = [f"{axis}_size={recipe.layout.size(axis)}: its engine gets groups from an mpu" for axis in axes]
    if recipe.micro_batches > 1:
        unsaid.append(
            f"{recipe.micro_batches} micro-batches an update: set gradient_accumulation_steps={recipe.micro_batches}"
        )
    document = json.dumps(deepspeed_json(recipe.config, layout=recipe.layout), indent=2)
    return Settings(document, unsaid)


LAUNCHERS: dict[str, Callable[[Recipe], Settings]] = {
    "megatron": megatron.settings,
    "torchtitan": torchtitan.settings,
    "accelerate": accelerate.settings,
    "deepspeed": deepspeed,
}


def _model_config(config: TrainConfig) -> Any | None:
    """None where the model is not within reach: parallel settings can be said without it."""
    try:
        return config_to_plan(config.model)[0]
    except ValueError:
        if config.model.create is not None or Path(config.model.path).expanduser().is_dir():
            raise
        return None
