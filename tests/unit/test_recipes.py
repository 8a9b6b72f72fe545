"""Headers of the recipes: complete, true (the launch command they give is legal), and the table in recipes/README.md."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from fourfold.config import to_train_config
from fourfold.layout import Layout
from fourfold.legality import check
from fourfold.paths import CONF, RECIPES
from tests.golden.composing import REAL_TASKS, composed
from tests.golden.recipe_table import FIELDS, README, launch_command, read_header, table, tier_paths, with_table

ROOT = Path(__file__).resolve().parents[2]
TIERS = tier_paths()
TASKS = {task: RECIPES / "task" / f"{task}.yaml" for task in REAL_TASKS}


@pytest.fixture
def update(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--update", default=False))


def test_the_tiers_of_the_scaling_guide_are_there() -> None:
    assert list(TIERS)[:4] == ["dp", "zero1", "zero2", "zero3"]
    assert {"zero3_checkpointed", "hsdp", "tensor", "pipeline", "long_context", "zero3_offload"} <= set(TIERS)


@pytest.mark.parametrize("name", TIERS)
def test_a_tier_says_all_there_is_to_know(name: str) -> None:
    header = read_header(TIERS[name])
    assert set(header.fields) == set(FIELDS)
    assert len(header.about) > 20
    assert re.search(r"\d", header.fields["GPUs"])
    command = launch_command(header.fields["launch"])[0]
    assert f"tier={name}" in command.split()
    others = set(TIERS) - {name}
    assert any(re.search(rf"\b{other}\b", header.fields["next"]) for other in others)


@pytest.mark.parametrize("path", [*TIERS.values(), *TASKS.values()], ids=lambda path: path.stem)
def test_the_launch_command_is_legal(path: Path) -> None:
    """It composes, and on the GPUs that it starts the layout and the batch fit."""
    command, note = launch_command(read_header(path).fields["launch"])
    words = shlex.split(command)
    overrides = [word for word in words if re.match(r"[\w.]+=", word)]
    layout = check(to_train_config(composed(*overrides)), world_size=processes(words, note), environment={})
    assert layout.world_size > 1
    if path.stem == "hsdp":
        assert layout == Layout(dp_shard_size=8, dp_replicate_size=32)
    if path.stem == "long_context":
        assert layout == Layout(cp_size=8, dp_shard_size=4)
    if path.stem == "tensor":
        assert layout == Layout(tp_size=8, dp_shard_size=4)
    if path.stem == "pipeline":
        assert layout == Layout(tp_size=8, pp_size=2, dp_shard_size=2)


def processes(words: list[str], note: str) -> int:
    if words[0] == "sbatch":
        assert (ROOT / next(word for word in words if word.endswith(".sh"))).is_file()
        servers, gpus = re.findall(r"\d+", note)
        assert f"--nodes={servers}" in words
        return int(servers) * int(gpus)
    settings = yaml.safe_load((ROOT / words[words.index("--config_file") + 1]).read_text())
    return int(settings["num_processes"])


def test_recipes_hold_choices_and_sizes_only() -> None:
    """No body of a group that an option of the same group would not replace: those belong into conf/."""
    for path in TIERS.values():
        tree = yaml.safe_load(path.read_text())
        bodies = {key for key, value in tree.items() if isinstance(value, dict)}
        assert bodies <= {"zero"}, path
        assert set(tree.get("zero", {})) <= {"offload"}, path


def test_the_table_is_that_of_the_headers(update: bool) -> None:
    text = README.read_text()
    if update:
        README.write_text(with_table(text))
    assert README.read_text() == with_table(README.read_text()), "recipes/README.md is behind: pytest --update"
    assert table().count("\n") == len(TIERS) + 1


def test_the_readme_names_every_task_as_its_header_does() -> None:
    text = README.read_text()
    for name, path in TASKS.items():
        assert f"| `{name}` |" in text
        assert f"`{launch_command(read_header(path).fields['launch'])[0]}`" in text


def test_commands_in_the_readme_compose() -> None:
    for line in README.read_text().splitlines():
        if line.startswith("    ") and "task=" in line and "--config-dir" not in line:
            words = shlex.split(line, comments=True)
            to_train_config(composed(*[word for word in words if re.match(r"[\w.]+=", word)]))
    assert CONF.is_dir()
