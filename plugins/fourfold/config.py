"""From Hydra's composed tree to the typed TrainConfig: schema, precedence, unknown keys, secrets."""

from dataclasses import fields, is_dataclass
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fourfold import schema

GROUPS = {
    "model": schema.ModelConfig,
    "data": schema.DataConfig,
    "optim": schema.OptimConfig,
    "zero": schema.ZeroConfig,
    "attention": schema.AttentionConfig,
    "activation": schema.ActivationConfig,
    "tracker": schema.TrackerConfig,
    "cluster": schema.ClusterConfig,
}
SECRET = ("token", "key", "secret", "password")


def register_schema() -> None:
    """Make `schema/train` known to Hydra, from which conf/train.yaml starts, and `${ranks:...}` to recipes."""
    ConfigStore.instance().store(group="schema", name="train", node=schema.TrainConfig)
    OmegaConf.register_new_resolver("ranks", _ranks, replace=True)


def _ranks(size: int, small: int = 2, *, _root_: DictConfig) -> int:
    """`${ranks:16}` of a recipe: 16, or `small` where cluster.shrunken asks for the least that has the same axes."""
    return small if _root_.cluster.shrunken else size


def to_train_config(composed: DictConfig, *, needs_data: bool = True) -> schema.TrainConfig:
    """Raises ValueError naming the key for a value that is missing or unknown (also if it was added by `+`). Without
    `needs_data` a missing data.path is none: no file is looked at."""
    unknown = sorted(_unknown_keys(composed, schema.TrainConfig, prefix=""))
    if unknown:
        raise ValueError(f"Unknown keys: {', '.join(unknown)}. `fourfold train --cfg job` shows all keys there are.")
    if composed.data.sources is not None and OmegaConf.is_missing(composed.data, "path"):
        composed.data.path = None  # the file of a group asks for a path, and a mixture has those of its sources
    if not needs_data and OmegaConf.is_missing(composed.data, "path"):
        composed.data.path = "not-needed"
    missing = sorted(_missing_keys(composed, prefix=""))
    if missing:
        raise ValueError(
            f"{missing[0]} has no value yet{', nor have ' + ', '.join(missing[1:]) if missing[1:] else ''}. "
            f"A task sets it (task=quickstart), or the command line ({missing[0]}=...)."
        )
    try:
        config = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        raise ValueError(f"{error.full_key}: {str(error).splitlines()[0]}") from None
    assert isinstance(config, schema.TrainConfig)
    return config


def to_plain(composed: DictConfig) -> dict[str, Any]:
    """Resolved, without secrets: what is written to the output folder and sent to trackers."""
    tree = OmegaConf.to_container(composed, resolve=True, enum_to_str=True)
    redacted = _redact(tree)
    assert isinstance(redacted, dict)
    return redacted


def is_secret(name: str) -> bool:
    """Whether a key of this name holds what nobody may see: api_key, HF_TOKEN, passwords."""
    return name.lower().rstrip("s").endswith(SECRET)


def _redact(value: Any, *, secret: bool = False) -> Any:
    if isinstance(value, dict):
        return {name: _redact(inner, secret=secret or is_secret(str(name))) for name, inner in value.items()}
    if isinstance(value, list):
        return [_redact(inner, secret=secret) for inner in value]
    return "***" if secret and value is not None else value


def _missing_keys(node: DictConfig, *, prefix: str) -> list[str]:
    """As OmegaConf.missing_keys, which fails if another key is made of one that is missing."""
    found = []
    for name in map(str, node):
        if OmegaConf.is_interpolation(node, name):
            continue
        if OmegaConf.is_missing(node, name):
            found.append(f"{prefix}{name}")
        elif isinstance(node[name], DictConfig):
            found += _missing_keys(node[name], prefix=f"{prefix}{name}.")
        elif isinstance(node[name], ListConfig):
            for number, entry in enumerate(node[name]):
                if isinstance(entry, DictConfig):
                    found += _missing_keys(entry, prefix=f"{prefix}{name}[{number}].")
    return found


def _unknown_keys(node: Any, kind: Any, *, prefix: str) -> list[str]:
    known = {field.name: field.type for field in fields(kind)}
    found = [f"{prefix}{key}" for key in node if key not in known]
    for name, type_ in known.items():
        if is_dataclass(type_) and name in node and not OmegaConf.is_missing(node, name):
            found += _unknown_keys(node[name], type_, prefix=f"{prefix}{name}.")
    return found
