"""Headers of the recipes: complete, true (the launch command they give is legal), and the table in recipes/README.md."""

import re
import shlex
from argparse import Namespace
from pathlib import Path

import pytest
import yaml

from fourfold.config import to_train_config
from fourfold.context.attention import IMPLEMENTATION
from fourfold.layout import Layout
from fourfold.legality import check
from fourfold.paths import CONF, RECIPES
from fourfold.pipeline.schedules import stages_per_rank
from fourfold.pipeline.split import layers_of_stages
from fourfold.planner.fit import rank_bytes
from tests.golden.composing import REAL_TASKS, composed
from tests.golden.recipe_table import (
    FIELDS,
    PUBLISHED,
    README,
    launch_command,
    read_header,
    table,
    tier_paths,
    with_table,
)

ROOT = Path(__file__).resolve().parents[2]
TIERS = tier_paths()
LAYOUTS = {
    "hsdp": Layout(dp_shard_size=8, dp_replicate_size=32),
    "long_context": Layout(cp_size=8, dp_shard_size=4),
    "tensor": Layout(tp_size=8, dp_shard_size=4),
    "pipeline": Layout(tp_size=8, pp_size=2, dp_shard_size=2),
}
# Those of the publications: Llama 3 table 4, Narayanan et al. 2021 table 1, Megatron-Bridge; what is ours the headers say.
PUBLICATIONS = {
    "nd": Layout(tp_size=8, cp_size=2, pp_size=4, dp_shard_size=16),
    "olmo_7b_fsdp": Layout(dp_shard_size=256),
    "llama3_70b": Layout(tp_size=4, pp_size=8, dp_shard_size=2),
    "deepseek_style": Layout(tp_size=8, pp_size=4, dp_shard_size=16),
    "megatron_1t": Layout(tp_size=8, pp_size=64, dp_replicate_size=6),
    "llama3_405b_8k_8192gpus": Layout(tp_size=8, pp_size=16, dp_shard_size=64),
    "llama3_405b_8k_16384gpus": Layout(tp_size=8, pp_size=16, dp_shard_size=128),
    "llama3_405b_128k": Layout(tp_size=8, cp_size=16, pp_size=16, dp_shard_size=8),
}
TASKS = {task: RECIPES / "task" / f"{task}.yaml" for task in REAL_TASKS}


@pytest.fixture
def update(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--update", default=False))


def test_the_tiers_of_the_scaling_guide_are_there() -> None:
    assert list(TIERS)[:4] == ["dp", "zero1", "zero2", "zero3"]
    assert {"zero3_checkpointed", "hsdp", "tensor", "pipeline", "long_context", "nd", "zero3_offload"} <= set(TIERS)


@pytest.mark.parametrize("name", TIERS)
def test_a_tier_says_all_there_is_to_know(name: str) -> None:
    header = read_header(TIERS[name])
    assert set(header.fields) - set(PUBLISHED) == set(FIELDS)
    assert ("source" in header.fields) == ("MFU" in header.fields) == (name in PUBLICATIONS)
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
    assert layout == {**LAYOUTS, **PUBLICATIONS}.get(path.stem, layout)


LLAMA_70B = Namespace(
    model_type="llama",
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=8,
    hidden_size=8192,
    intermediate_size=28672,
    vocab_size=128256,
    max_position_embeddings=131072,
)
LLAMA_405B = Namespace(
    **{
        **vars(LLAMA_70B),
        "num_hidden_layers": 126,
        "num_attention_heads": 128,
        "hidden_size": 16384,
        "intermediate_size": 53248,
    }
)
GPT_1T = Namespace(
    **{
        **vars(LLAMA_70B),
        "num_hidden_layers": 128,
        "num_attention_heads": 160,
        "num_key_value_heads": 160,
        "hidden_size": 25600,
        "intermediate_size": 68264,  # SwiGLU's three matrices as large as GPT's two
        "vocab_size": 51200,
    }
)
MODELS = {
    "nd": LLAMA_70B,
    "llama3_70b": LLAMA_70B,
    "deepseek_style": LLAMA_70B,
    "megatron_1t": GPT_1T,
    "llama3_405b_8k_8192gpus": LLAMA_405B,
    "llama3_405b_8k_16384gpus": LLAMA_405B,
    "llama3_405b_128k": LLAMA_405B,
}
ANOTHER = ["zero=stage1", "attention=ring", "pipeline.schedule=zbv", "activation=none"]


@pytest.mark.parametrize(
    ("name", "more"),
    [*(pytest.param(name, [], id=name) for name in MODELS), pytest.param("llama3_405b_128k", ANOTHER, id="another")],
)
def test_the_model_of_a_publication_takes_its_layout(name: str, more: list[str]) -> None:
    """Heads, layers and length too, for which the launch command alone needs the hub. One override leads to another layout."""
    command, note = launch_command(read_header(TIERS[name]).fields["launch"])
    words = shlex.split(command)
    config = to_train_config(composed(*[word for word in words if re.match(r"[\w.]+=", word)], *more))
    world = processes(words, note)
    layout = check(config, world_size=world, model_config=MODELS[name], attn_implementation=IMPLEMENTATION)
    assert layout == PUBLICATIONS[name]


@pytest.mark.parametrize("name", MODELS)
def test_a_layout_fits_its_gpus(name: str) -> None:
    """Of 80 GB all were run on; by our own count, which the headers quote. One does not, until its hidden states are cut."""
    command, note = launch_command(read_header(TIERS[name]).fields["launch"])
    words = shlex.split(command)
    config = to_train_config(composed(*[word for word in words if re.match(r"[\w.]+=", word)]))
    layout = check(config, world_size=processes(words, note), environment={})
    found = rank_bytes(config, layout=layout, model_config=MODELS[name])
    assert found.fits(80e9) == (name != "megatron_1t")
    config.tensor.sequence_parallel = True
    assert rank_bytes(config, layout=layout, model_config=MODELS[name]).fits(80e9)
    said = re.search(r"activation=\w+[^;]*?(\d+) GB a GPU by our count", read_header(TIERS[name]).about)
    assert said is None or int(said[1]) == round(found.total / 1e9)
    assert name.startswith("llama3_") == (said is not None)


def test_a_batch_of_llama_3_is_16m_tokens() -> None:
    for name in ("llama3_405b_8k_8192gpus", "llama3_405b_8k_16384gpus", "llama3_405b_128k"):
        command, _ = launch_command(read_header(TIERS[name]).fields["launch"])
        config = to_train_config(composed(*[word for word in shlex.split(command) if re.match(r"[\w.]+=", word)]))
        assert config.seq_len * config.global_batch_size == 2**24


def test_llama_3_takes_a_layer_off_both_ends() -> None:
    config = to_train_config(composed("task=llama3_405b", "tier=llama3_405b_8k_8192gpus", "data.path=d"))
    stages = config.pp_size * stages_per_rank(config.pipeline)
    counts = [last - first for first, last in layers_of_stages(config.pipeline, model_config=LLAMA_405B, stages=stages)]
    assert counts == [3, *[4] * 30, 3]


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
        assert bodies <= {"zero", "tensor", "pipeline"}, path  # the latter two have no group
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
