"""What is refused before Hydra reads the command line."""

import pytest

from fourfold.words import refusals


@pytest.mark.parametrize("word", ["tier=null", "tier=NULL", "+zero=3", "model=true", "data={a: b}", "activation=1.5"])
def test_a_group_is_chosen_by_name(word: str) -> None:
    (told,) = refusals(["task=quickstart", word])
    assert told.startswith(f"{word}: ")
    assert "use one of " in told


@pytest.mark.parametrize("word", ["-m", "--multirun", "hydra.mode=MULTIRUN"])
def test_several_runs_of_one_process(word: str) -> None:
    (told,) = refusals(["task=quickstart", word, "seed=1,2"])
    assert "-m fourfold task=quickstart seed=1,2 key=$x output_dir=runs/$x" in told


def test_other_words_are_for_hydra() -> None:
    words = [
        "tier=none",
        "~tier",
        "tier=[dp]",
        "zero=stage3",
        "seed=3",
        "max_steps=null",
        "data.sources=null",
        "--cfg",
        "job",
    ]
    assert list(refusals(words)) == []
