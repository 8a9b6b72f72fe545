"""Compose configurations as a run does, and keep what they come out as beside the tests."""

from functools import cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from fourfold.config import register_schema, to_train_config
from fourfold.paths import CONF, RECIPES
from fourfold.schema import TrainConfig

GOLDEN = Path(__file__).parent
NAMED = ("name=golden", "model.path=m", "data.path=d")  # the least that a run without a task must be told


def options(root: Path, group: str) -> list[str]:
    """Names of the files of a group, at any depth below it."""
    return sorted(str(path.relative_to(root / group).with_suffix("")) for path in (root / group).rglob("*.yaml"))


GROUPS = sorted(path.name for path in CONF.iterdir() if path.is_dir())
TIERS, TASKS = options(RECIPES, "tier"), options(RECIPES, "task")
REAL_TASKS = [task for task in TASKS if task != "none"]
LARGE_TASKS = [task for task in REAL_TASKS if task.endswith(("70b", "405b"))]
LARGE_TIERS = [tier for tier in TIERS if tier.endswith(("nd", "70b", "405b_128k", "gpus", "1t", "deepseek_style"))]


def tasks_of(tier: str) -> list[str]:
    """Tasks with which a tier is tested: any goes with any, but all pairs would take minutes."""
    if tier in LARGE_TIERS:
        return [*LARGE_TASKS, "quickstart"]
    return [task for task in REAL_TASKS if task not in LARGE_TASKS]


def composed(*overrides: str, conf: Path = CONF) -> DictConfig:
    """The tree that Hydra makes of the overrides."""
    register_schema()
    GlobalHydra.instance().clear()
    with initialize_config_dir(version_base="1.3", config_dir=str(conf)):
        return compose("train", overrides=list(overrides))


@cache
def typed(*overrides: str) -> TrainConfig:
    """What the run itself reads. Do not change it: it is kept for the next who asks."""
    return to_train_config(composed(*overrides))


def flat(*overrides: str) -> dict[str, Any]:
    """{"zero.stage": 2, ...}, resolved."""
    tree = OmegaConf.to_container(composed(*overrides), resolve=True, enum_to_str=True)
    assert isinstance(tree, dict)
    return dict(_leaves(tree, prefix=""))


def changes(values: dict[str, Any], *, base: dict[str, Any]) -> dict[str, Any]:
    """Entries of `values` that `base` has not or has otherwise; a key that is gone is an error of the test's author."""
    assert set(base) - set(values) <= {key for key in base if isinstance(base[key], dict)}
    return {key: value for key, value in values.items() if key not in base or base[key] != value}


def differences(path: Path, found: dict[str, Any], *, update: bool) -> str:
    """Why `found` is not what the golden file holds; empty if it is. `update` makes it so."""
    text = OmegaConf.to_yaml(OmegaConf.create(found))
    if update:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    kept = path.read_text() if path.is_file() else ""
    if kept == text:
        return ""
    new, old = text.splitlines(), kept.splitlines()
    lines = [f"- {line}" for line in old if line not in new] + [f"+ {line}" for line in new if line not in old]
    return "\n".join([f"{path.name} differs; if that is meant: pytest --update", *lines])


def _leaves(tree: dict[Any, Any], *, prefix: str) -> list[tuple[str, Any]]:
    leaves: list[tuple[str, Any]] = []
    for name, value in tree.items():
        deeper = isinstance(value, dict) and value
        leaves += _leaves(value, prefix=f"{prefix}{name}.") if deeper else [(f"{prefix}{name}", value)]
    return leaves
