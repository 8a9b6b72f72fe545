"""The config of a run's model for planning: its folder's, or where it is on no disk here the shape that its name stands for."""

from pathlib import Path
from typing import Any

from fourfold.planner.shapes import SHAPES, config_of
from fourfold.schema import ModelConfig


def config_to_plan(model: ModelConfig) -> tuple[Any, str]:
    """(config, what there is to say of it). ValueError if there is neither a folder, nor a known shape, nor the hub's."""
    known = known_shape(model.path)
    if known is not None and _is_elsewhere(model):
        return _shape(known, model), f"{model.path} is not on this disk: the shape of {known}"
    from fourfold.model.source import read_config, resolve_folder

    return read_config(resolve_folder(model, weights=False), model=model), model.path


def config_at_hand(model: ModelConfig) -> Any | None:
    """What `config_to_plan` gives without anything being made or downloaded; None if there is no such."""
    known = known_shape(model.path)
    if known is not None and _is_elsewhere(model):
        return _shape(known, model)
    from fourfold.model import source

    return source.config_at_hand(model)


def known_shape(path: str) -> str | None:
    """`meta-llama/Llama-3.1-405B` -> `Llama 3.1 405B`."""
    name = f"{Path(path).name.lower()}-"
    return next((shape for shape in SHAPES if name.startswith(f"{shape.lower().replace(' ', '-')}-")), None)


def as_transformers(config: Any) -> Any:
    """What config_to_plan gives, as transformers builds models of."""
    from transformers import LlamaConfig, PreTrainedConfig

    return config if isinstance(config, PreTrainedConfig) else LlamaConfig(**vars(config))


def _shape(name: str, model: ModelConfig) -> Any:
    config = config_of(name)
    if model.max_position_embeddings is not None:
        config.max_position_embeddings = model.max_position_embeddings
    return config


def _is_elsewhere(model: ModelConfig) -> bool:
    return not Path(model.path).expanduser().is_dir() and not _is_cached(model)


def _is_cached(model: ModelConfig) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(model.path, "config.json", revision=model.revision), str)
