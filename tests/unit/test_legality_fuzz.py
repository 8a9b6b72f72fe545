"""Random settings are refused, or what each rank would hold can be built; nothing between.

5,000 are checked; of the legal ones every `BUILT`th is built, on its first or last rank (all on both with -m slow).
FOURFOLD_SEED=n looks at other ones: cases n, n+1, and so on. A failure prints the number of the case and what it is.
"""

import os
from collections import Counter

import pytest

from fourfold import legality
from fourfold.layout import AXES, resolve
from tests.fake_build import build, checked
from tests.random_configs import Case, random_case

FIRST = int(os.environ.get("FOURFOLD_SEED", "0"))
CASES, BUILT, TOLD = 5000, 6, 50


def built(case: Case, *, attention: str, ranks: list[int]) -> None:
    layout = resolve(case.world_size, **{f"{axis}_size": getattr(case.config, f"{axis}_size") for axis in AXES})
    for rank in ranks:
        try:
            build(case.config, model_config=case.model_config, attention=attention, layout=layout, rank=rank)
        except Exception as error:
            raise AssertionError(f"rank {rank} of {case}") from error


def told(case: Case, *, problems: list[str], attention: str) -> None:
    """Every reason in one error, each with a number and the knob."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        legality.check(
            case.config,
            world_size=case.world_size,
            model_config=case.model_config,
            attn_implementation=attention or None,
        )
    for problem in problems:
        assert problem in str(caught.value), str(case)
        assert "use " in problem.lower() or "start " in problem.lower(), problem


def swept(*, every: int, both_ends: bool) -> Counter[str]:
    seen: Counter[str] = Counter()
    for number in range(CASES):
        case = random_case(FIRST + number)
        try:
            problems, attention = checked(case.config, model_config=case.model_config, world_size=case.world_size)
        except Exception as error:
            raise AssertionError(f"the rules fail for {case}") from error
        seen["refused" if problems else "legal"] += 1
        if problems and seen["refused"] % TOLD == 0:
            told(case, problems=problems, attention=attention)
        if not problems and seen["legal"] % every == 0:
            last = case.world_size - 1
            built(case, attention=attention, ranks=[0, last] if both_ends else [last * (seen["built"] % 2)])
            seen["built"] += 1
    return seen


def test_random_settings_are_refused_or_built() -> None:
    seen = swept(every=BUILT, both_ends=False)
    assert min(seen["refused"], seen["legal"]) > CASES / 5
    assert seen["built"] == seen["legal"] // BUILT > 80


@pytest.mark.slow
def test_all_random_settings_are_refused_or_built() -> None:
    seen = swept(every=1, both_ends=True)
    assert seen["built"] == seen["legal"]
