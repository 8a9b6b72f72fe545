"""`fourfold export --to megatron|torchtitan|accelerate|deepspeed key=value ...`: a recipe for other launchers."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fourfold import legality
from fourfold.interop import accelerate, megatron, torchtitan
from fourfold.interop.settings import Recipe, Settings, unsaid_everywhere
from fourfold.layout import product
from fourfold.model.source import read_config, resolve_folder
from fourfold.schema import TrainConfig
from fourfold.zero.settings import deepspeed_json


def show_settings(config: TrainConfig, *, to: str, gpus: int | None) -> None:
    """The settings on stdout, what they leave out on stderr. ValueError for what a run would refuse."""
    sizes = (config.tp_size, config.cp_size, config.pp_size, config.dp_shard_size, config.dp_replicate_size)
    world_size = gpus or product(size for size in sizes if size > 0)
    layout = legality.check(config, world_size=world_size)
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
    """None where the model has no folder here: parallel settings can be said without it, and nothing is downloaded."""
    if config.model.create is None and not Path(config.model.path).expanduser().is_dir():
        return None
    return read_config(resolve_folder(config.model), model=config.model)
