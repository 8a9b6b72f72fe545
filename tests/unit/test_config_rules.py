"""What the configuration refuses, which level wins, and what it never shows."""

import re
import shutil
from pathlib import Path

import pytest
from hydra.errors import ConfigCompositionException, HydraException
from omegaconf import DictConfig, OmegaConf

from fourfold.config import to_plain, to_train_config
from fourfold.paths import CONF, RECIPES
from tests.golden.composing import NAMED, composed, typed

LEVELS = ("schema", "group file", "train.yaml", "tier", "task", "debug", "command line")


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def laboratory(folder: Path, *, levels: tuple[str, ...]) -> DictConfig:
    """A copy of conf/ and recipes/ in which each of `levels` sets optim.weight_decay to its place in LEVELS."""
    conf, recipes = folder / "conf", folder / "recipes"
    shutil.copytree(CONF, conf)
    shutil.copytree(RECIPES, recipes)

    def body(level: str) -> str:
        return f"optim: {{weight_decay: {LEVELS.index(level)}}}\n" if level in levels else ""

    for level, path in {"tier": recipes / "tier", "task": recipes / "task", "debug": conf / "debug"}.items():
        write(path / "lab.yaml", f"# @package _global_\n{body(level)}")
    write(
        conf / "optim" / "lab.yaml", f"weight_decay: {LEVELS.index('group file')}\n" if "group file" in levels else "{}"
    )
    main = conf / "train.yaml"
    main.write_text(main.read_text() + "\n" + body("train.yaml"))
    words = [f"optim.weight_decay={LEVELS.index('command line')}"] if "command line" in levels else []
    return composed(
        *NAMED, "optim=lab", "tier=lab", "task=lab", "debug=lab", *words, f"hydra.searchpath=[{recipes}]", conf=conf
    )


@pytest.mark.parametrize("top", range(len(LEVELS)))
def test_precedence_level_by_level(top: int, tmp_path: Path) -> None:
    config = to_train_config(laboratory(tmp_path, levels=LEVELS[: top + 1]))
    assert config.optim.weight_decay == (0.1 if top == 0 else top), f"{LEVELS[top]} should win"


@pytest.mark.parametrize("words", [("zero=stage3", "tier=zero1"), ("tier=zero1", "zero=stage3")])
def test_a_group_on_the_command_line_beats_the_recipe_in_either_order(words: tuple[str, str]) -> None:
    assert typed(*NAMED, *words).zero.stage == 3


def test_debug_beats_task_beats_tier_for_groups() -> None:
    assert typed("task=smollm2").model.create is None
    assert typed("debug=cpu", "task=smollm2").model.create == "tiny_llama"
    assert typed("debug=cpu", "task=smollm2", "model=hf", "model.path=m").model.create is None


# ---------------------------------------------------------------------------------------------- unknown keys, options


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("+zero.stag=2", "zero.stag"),
        ("+optim.lr=1e-3", "optim.lr"),
        ("+learning_rate=1e-3", "learning_rate"),
        ("++train_batch_size=16", "train_batch_size"),
        ("+zero.offload.optimiser=cpu", "zero.offload.optimiser"),
        ("+newgroup={a: 1}", "newgroup"),
    ],
)
def test_unknown_keys_are_refused_also_with_plus(word: str, key: str) -> None:
    with pytest.raises((ValueError, HydraException), match=key.rpartition(".")[2]) as caught:
        to_train_config(composed(*NAMED, word))
    if isinstance(caught.value, ValueError):
        assert "fourfold train --cfg job" in str(caught.value)


@pytest.mark.parametrize("word", ["zero.stag=2", "learning_rate=1", "optim.lr=1e-3"])
def test_unknown_keys_are_refused_without_plus(word: str) -> None:
    with pytest.raises(HydraException, match=word.partition("=")[0].rpartition(".")[2]):
        composed(*NAMED, word)


def test_all_unknown_keys_are_told_together() -> None:
    tree = composed(*NAMED, "+a=1")
    OmegaConf.update(tree, "zero.b", 2, force_add=True)
    with pytest.raises(ValueError, match=r"Unknown keys: a, zero\.b\. "):
        to_train_config(tree)


def test_an_unknown_key_in_a_recipe_names_the_file(tmp_path: Path) -> None:
    write(tmp_path / "task" / "mine.yaml", "# @package _global_\nname: mine\nzero: {bucket: 5}\n")
    with pytest.raises(ConfigCompositionException, match=r"(?s)task/mine.*bucket"):
        composed("task=mine", f"hydra.searchpath=[{tmp_path}]")


@pytest.mark.parametrize(
    ("word", "there_are"),
    [
        ("zero=stage9", "stage3"),
        ("tier=zero33", "zero3_checkpointed"),
        ("task=quick", "quickstart"),
        ("debug=gpu", "cpu"),
    ],
)
def test_an_unknown_option_lists_what_there_is(word: str, there_are: str) -> None:
    with pytest.raises(HydraException, match=rf"(?s)Available options in '{word.partition('=')[0]}'.*{there_are}"):
        composed(*NAMED, word)


# --------------------------------------------------------------------------------------------------------- typed values


def test_scientific_notation_is_a_number_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """G04: `1e-5` is text for PyYAML; here it never is."""
    write(tmp_path / "task" / "mine.yaml", "# @package _global_\nname: mine\noptim: {learning_rate: 1e-5}\n")
    monkeypatch.setenv("RATE", "1e-5")
    search = f"hydra.searchpath=[{tmp_path}]"
    ways = [
        (*NAMED, "optim.learning_rate=1e-5"),
        (*NAMED, "optim.learning_rate='1e-5'"),
        (*NAMED, "optim.learning_rate=${oc.env:RATE}"),
        (*NAMED[1:], "task=mine", search),
    ]
    for words in ways:
        rate = to_train_config(composed(*words)).optim.learning_rate
        assert isinstance(rate, float), words
        assert rate == 1e-5, words


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("optim.learning_rate=fast", "'fast' of type 'str' could not be converted to Float"),
        ("global_batch_size=1e1", "could not be converted to Integer"),
        ("global_batch_size=two", "could not be converted to Integer"),
        ("zero.offload.optimizer=disk", r"expected one of \[none, cpu, nvme\]"),
        ("precision=fp8", r"expected one of \[fp32, bf16, fp16\]"),
        ("overwrite=perhaps", "is not a valid bool"),
        ("seed=null", "is not Optional"),
        ("tracker.report_to=wandb", "str is not a ListConfig"),
    ],
)
def test_values_of_another_type_are_refused(word: str, message: str) -> None:
    with pytest.raises(HydraException, match=word.partition("=")[0]) as caught:
        composed(*NAMED, word)
    assert re.search(message, str(caught.value.__cause__))


def test_text_that_an_interpolation_brings_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATE", "fast")
    with pytest.raises(ValueError, match=r"^optim\.learning_rate: .*'fast'.*Float") as caught:
        to_train_config(composed(*NAMED, "optim.learning_rate=${oc.env:RATE}"))
    assert type(caught.value) is ValueError


def test_a_variable_that_is_not_set_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_VARIABLE", raising=False)
    with pytest.raises(ValueError, match=r"^output_dir: .*NO_SUCH_VARIABLE") as caught:
        to_train_config(composed(*NAMED, "output_dir=${oc.env:NO_SUCH_VARIABLE}"))
    assert type(caught.value) is ValueError


def test_missing_values_say_who_sets_them() -> None:
    with pytest.raises(ValueError, match=r"data\.path has no value yet, nor have model\.path, name\. A task sets it"):
        to_train_config(composed())
    with pytest.raises(ValueError, match=r"data\.path has no value yet\. .*command line \(data\.path=\.\.\.\)"):
        to_train_config(composed("task=llama3_8b"))


# ----------------------------------------------------------------------------------------------------------- user files


def test_own_folder_extends_a_shipped_recipe(tmp_path: Path) -> None:
    write(
        tmp_path / "tier" / "mine.yaml",
        "# @package _global_\ndefaults: [zero3, override /activation: mine]\nsave_every: 4\nmicro_batch_size: 4\n",
    )
    write(tmp_path / "activation" / "mine.yaml", "checkpointing: every_n\nevery_n: 3\n")
    config = to_train_config(composed("task=smollm2", "tier=mine", f"hydra.searchpath=[{tmp_path}]"))
    assert config.zero.stage == 3
    assert (config.activation.checkpointing.value, config.activation.every_n) == ("every_n", 3)
    assert config.save_every == 4
    assert config.micro_batch_size == 1, "the task sets it, and a task beats a tier"


# -------------------------------------------------------------------------------------------------------------- secrets


@pytest.mark.parametrize(
    "word",
    [
        "+tracker.init_kwargs.wandb.api_key=hunter2",
        "+tracker.init_kwargs.wandb.API_KEY=hunter2",
        "+tracker.init_kwargs.mlflow.deep.token=hunter2",
        "+tracker.init_kwargs.mlflow.password=7234567",
        "+tracker.init_kwargs.mlflow.servers=[{secret: hunter2}]",
        "+tracker.init_kwargs.mlflow.tokens=[hunter2]",
    ],
)
def test_secrets_are_not_written(word: str) -> None:
    plain = to_plain(composed(*NAMED, word))
    text = OmegaConf.to_yaml(OmegaConf.create(plain))
    assert "***" in text
    assert "hunter2" not in text
    assert "7234567" not in text


def test_what_is_no_secret_is_written() -> None:
    plain = to_plain(composed(*NAMED, "tracker.project=hunter2"))
    assert plain["tracker"]["project"] == "hunter2"
    assert plain["data"]["text_column"] == "text"
