"""From Hydra's composed tree to the typed TrainConfig: schema, precedence, unknown keys, secrets."""

from dataclasses import fields, is_dataclass
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fourfold import schema

GROUPS = {
    "model": schema.ModelConfig,
    "data": schema.DataConfig,
    "optim": schema.OptimConfig,
    "zero": schema.ZeroConfig,
    "activation": schema.ActivationConfig,
    "tracker": schema.TrackerConfig,
    "cluster": schema.ClusterConfig,
}
SECRET = ("token", "key", "secret", "password")


def register_schema() -> None:
    """Make `schema/train` known to Hydra; conf/train.yaml starts from it."""
    ConfigStore.instance().store(group="schema", name="train", node=schema.TrainConfig)


def to_train_config(composed: DictConfig) -> schema.TrainConfig:
    """Raises ValueError naming the key for a value that is missing or unknown (also if it was added by `+`)."""
    unknown = sorted(_unknown_keys(composed, schema.TrainConfig, prefix=""))
    if unknown:
        raise ValueError(f"Unknown keys: {', '.join(unknown)}. `fourfold train --cfg job` shows all keys there are.")
    missing = sorted(OmegaConf.missing_keys(composed))
    if missing:
        raise ValueError(
            f"{missing[0]} has no value yet{', nor have ' + ', '.join(missing[1:]) if missing[1:] else ''}. "
            f"A task sets it (task=quickstart), or the command line ({missing[0]}=...)."
        )
    try:
        config = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        raise ValueError(str(error).splitlines()[0]) from None
    assert isinstance(config, schema.TrainConfig)
    return config


def to_plain(composed: DictConfig) -> dict[str, Any]:
    """Resolved, without secrets: what is written to the output folder and sent to trackers."""
    tree = OmegaConf.to_container(composed, resolve=True, enum_to_str=True)
    assert isinstance(tree, dict)
    return _redact(tree)


def _redact(tree: dict[Any, Any]) -> dict[Any, Any]:
    hidden: dict[Any, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            hidden[name] = _redact(value)
        elif isinstance(value, str) and any(str(name).lower().endswith(word) for word in SECRET):
            hidden[name] = "***"
        else:
            hidden[name] = value
    return hidden


def _unknown_keys(node: Any, kind: Any, *, prefix: str) -> list[str]:
    known = {field.name: field.type for field in fields(kind)}
    found = [f"{prefix}{key}" for key in node if key not in known]
    for name, type_ in known.items():
        if is_dataclass(type_) and name in node and not OmegaConf.is_missing(node, name):
            found += _unknown_keys(node[name], type_, prefix=f"{prefix}{name}.")
    return found
