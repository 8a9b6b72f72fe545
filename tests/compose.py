"""Composed configs for tests, by the same search path and schema as the command line."""

from typing import Any

from hydra import compose, initialize_config_dir

from fourfold.config import register_schema, to_plain, to_train_config
from fourfold.paths import CONF
from fourfold.schema import TrainConfig


def composed(*overrides: str) -> tuple[TrainConfig, dict[str, Any]]:
    """(typed config, plain resolved tree) of `fourfold train <overrides>`."""
    register_schema()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        tree = compose("train", overrides=list(overrides))
    return to_train_config(tree), to_plain(tree)
