"""Every file under conf/ and recipes/ composes; what each tier and task comes out as is kept in tests/golden."""

from argparse import Namespace

import pytest
from omegaconf import OmegaConf

from fourfold.config import to_plain, to_train_config
from fourfold.context.attention import IMPLEMENTATION
from fourfold.layout import AXES
from fourfold.legality import check
from fourfold.paths import CONF, RECIPES
from tests.golden.composing import (
    GOLDEN,
    GROUPS,
    LARGE_TIERS,
    NAMED,
    TASKS,
    TIERS,
    changes,
    composed,
    differences,
    flat,
    options,
    tasks_of,
    typed,
)

OPTIONS = [(group, option) for group in GROUPS for option in options(CONF, group)]
DEBUG_WORLDS = {"none": 8, "cpu": 2, "cpu_hsdp": 4}
TINY = Namespace(  # model/tiny.py
    model_type="llama",
    num_hidden_layers=4,
    num_attention_heads=6,
    num_key_value_heads=2,
    hidden_size=192,
    intermediate_size=512,
    vocab_size=2048,
    max_position_embeddings=2048,
)
# Tiers that need another number of processes: (as they are, debug=cpu). None of these has a cpu_hsdp form.
WORLDS = {
    "pipeline": (16, 2),
    "nd": (64, 8),
    "llama3_70b": (64, 4),
    "deepseek_style": (32, 4),
    "megatron_1t": (3072, 4),
    "llama3_405b_8k_8192gpus": (8192, 4),
    "llama3_405b_8k_16384gpus": (16384, 4),
    "llama3_405b_128k": (16384, 8),
}


@pytest.fixture
def update(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--update", default=False))


def test_the_globs_see_all_files() -> None:
    assert set(GROUPS) >= {"activation", "cluster", "data", "debug", "model", "optim", "tracker", "zero"}
    assert len(OPTIONS) >= 28
    assert {
        "dp",
        "zero1",
        "zero2",
        "zero3",
        "zero3_checkpointed",
        "hsdp",
        "long_context",
        "nd",
        "zero3_offload",
        "none",
    } <= set(TIERS)
    assert {"quickstart", "smollm2", "llama3_8b", "llama3_70b", "llama3_405b", "none"} <= set(TASKS)
    assert set(LARGE_TIERS) == {tier for tier in WORLDS if tier != "pipeline"}
    seen = {(RECIPES if group in ("tier", "task") else CONF) / group for group in (*GROUPS, "tier", "task")}
    strays = [path for root in (CONF, RECIPES) for path in root.rglob("*.y*ml") if not set(path.parents) & seen]
    assert strays == [CONF / "train.yaml"]
    assert not list(CONF.rglob("*.yml")) + list(RECIPES.rglob("*.yml")), "Hydra reads .yaml only"


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_group_option_composes(group: str, option: str) -> None:
    named = [value for value in NAMED if not value.startswith(f"{group}.") or option in ("none", "hf")]
    wanted = (f"{group}={option}", *named, *(["data.path=d"] if group == "data" else []))
    config = to_train_config(composed(*wanted))
    assert to_plain(composed(*wanted))["name"] == config.name == "golden"


def world_of(tier: str, debug: str) -> int:
    whole, small = WORLDS.get(tier, (DEBUG_WORLDS["none"], DEBUG_WORLDS["cpu"]))
    return {"none": whole, "cpu": small}.get(debug, DEBUG_WORLDS[debug])


def small_enough(tier: str, debug: str) -> bool:
    """cpu_hsdp is made for replicas of a server of two."""
    return debug != "cpu_hsdp" or WORLDS.get(tier, (0, 0))[1] <= 2


@pytest.mark.parametrize(
    ("tier", "debug"),
    [
        pytest.param(tier, debug, marks=[pytest.mark.slow] * (debug == "cpu_hsdp" and tier != "hsdp"))
        for tier in TIERS
        for debug in DEBUG_WORLDS
        if small_enough(tier, debug)
    ],
)
def test_tiers_take_tasks(tier: str, debug: str) -> None:
    """As it is and shrunken. Runs of the shrunken forms: tests/parity/test_tiers.py."""
    world = world_of(tier, debug)
    for task in tasks_of(tier):
        rows = f"global_batch_size={max(16, 2 * world)}"  # two for each GPU
        plain = typed(f"tier={tier}", f"task={task}", "data.path=d", rows)
        config = plain if debug == "none" else typed(f"tier={tier}", f"task={task}", f"debug={debug}")
        layout = check(config, world_size=world, environment={})
        assert layout.world_size == world
        if debug != "none":
            assert config.model.create == "tiny_llama"
            assert config.seq_len * config.global_batch_size * (config.max_steps or 10**9) < 10_000
            assert config.zero.stage == plain.zero.stage
        if tier in WORLDS and debug == "cpu":
            check(config, world_size=world, model_config=TINY, attn_implementation=IMPLEMENTATION)
            assert all((getattr(config, name) > 1) == (getattr(plain, name) > 1) for name in ("cp_size", "pp_size"))
            assert max(layout.size(axis) for axis in AXES) == 2
        if (tier, debug) == ("hsdp", "cpu_hsdp"):
            assert (layout.dp_shard_size, layout.dp_replicate_size) == (2, 2)
        if tier == "long_context":
            assert layout.cp_size == {"none": 8, "cpu": 2, "cpu_hsdp": 2}[debug]


@pytest.mark.parametrize("tier", TIERS)
def test_a_tier_without_a_task_says_what_is_missing(tier: str) -> None:
    with pytest.raises(ValueError, match=r"no value yet, nor have .*name\. A task sets it \(task=quickstart\)"):
        to_train_config(composed(f"tier={tier}"))


def test_golden_base(update: bool) -> None:
    assert not differences(GOLDEN / "base.yaml", flat(*NAMED), update=update)


@pytest.mark.parametrize("tier", TIERS)
def test_golden_tier_with_its_tasks(tier: str, update: bool) -> None:
    """What differs from base.yaml, by task."""
    base = flat(*NAMED)
    found = {task: changes(flat(f"tier={tier}", f"task={task}", "data.path=d"), base=base) for task in tasks_of(tier)}
    assert not differences(GOLDEN / "tier" / f"{tier}.yaml", found, update=update)


@pytest.mark.parametrize("debug", [name for name in DEBUG_WORLDS if name != "none"])
def test_golden_debug(debug: str, update: bool) -> None:
    base = flat(*NAMED)
    pairs = [("zero3_checkpointed", "llama3_8b"), ("hsdp", "smollm2"), ("dp", "quickstart")]
    found = {
        f"{tier} {task}": changes(flat(f"tier={tier}", f"task={task}", f"debug={debug}"), base=base)
        for tier, task in pairs
    }
    assert not differences(GOLDEN / "debug" / f"{debug}.yaml", found, update=update)


def test_no_golden_file_without_its_recipe() -> None:
    kept = {str(path.relative_to(GOLDEN).with_suffix("")) for path in GOLDEN.rglob("*.yaml")}
    assert kept == {"base", *(f"tier/{tier}" for tier in TIERS), "debug/cpu", "debug/cpu_hsdp"}


def test_no_absolute_path_in_what_is_shipped() -> None:
    for path in [*CONF.rglob("*.yaml"), *RECIPES.rglob("*")]:
        if path.is_file():
            assert str(CONF.parent) not in path.read_text(), path


def test_the_composed_tree_is_the_saved_tree() -> None:
    """config.yaml of a run, read back, gives the same typed settings."""
    tree = composed("task=smollm2", "tier=hsdp")
    saved = OmegaConf.create(OmegaConf.to_yaml(OmegaConf.create(to_plain(tree))))
    again = OmegaConf.merge(OmegaConf.structured(type(to_train_config(tree))), saved)
    assert OmegaConf.to_object(again) == to_train_config(tree)
