"""Words of the command line that Hydra itself would answer with a traceback, or carry out by half. Pure but for a look at which
groups there are."""

import re
from collections.abc import Iterator, Sequence

from fourfold.paths import CONF, RECIPES

NOTHING = re.compile(r"\+{0,2}(?P<group>\w+)(@[\w.]+)?=(?P<value>null|true|false|[-+]?\d[\d_.]*|\{.*)", re.IGNORECASE)
SWEEP = ("-m", "--multirun", "hydra.mode=MULTIRUN")


def refuse(words: Sequence[str]) -> None:
    """ValueError with the first reason."""
    for problem in refusals(words):
        raise ValueError(problem)


def refusals(words: Sequence[str]) -> Iterator[str]:
    if any(word in SWEEP for word in words):
        others = " ".join(word for word in words if word not in SWEEP)
        yield (
            f"--multirun would run every job in one process group and output folder. Use a shell loop: for x in ...; do accelerate "
            f"launch ... -m fourfold {others} key=$x output_dir=runs/$x; done"
        )
    for word in words:
        found = NOTHING.fullmatch(word)
        if found and (choices := _choices(found["group"])):
            yield f"{word}: {found['group']} is a group, of which one is chosen by name: use one of {', '.join(choices)}."


def _choices(group: str) -> list[str]:
    return sorted(file.stem for root in (CONF, RECIPES) for file in (root / group).glob("*.yaml"))
