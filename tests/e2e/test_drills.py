"""A rank that stops, hangs, is killed or is slow, in a group of each axis: who is named, with its place and group, in bounded
time; what was saved is gone on from; and a slow rank changes nothing."""

import time
from pathlib import Path

import pytest

from tests.e2e.launching import ROOT, Result, updates, warm

FAULTY = str(ROOT / "tests" / "e2e" / "faulty_rank.py")
WORDS = [
    "task=quickstart",
    "debug=cpu",
    "overwrite=false",
    "export=false",
    "save_every=1",
    "max_steps=3",
    "output_dir=out",
]
TIMEOUT = 6.0
AXES = {
    "tp": ["tp_size=2"],
    "cp": ["cp_size=2", "attention=ring"],
    "pp": ["pp_size=2"],
    "dp_shard": ["tier=zero3"],
    "dp_replicate": ["tier=dp"],
}
SLOW = [pytest.mark.slow]


def drill(folder: Path, cache: Path, axis: str, fault: str) -> Result:
    """Rank 1 of two, in the second of three updates."""
    amid, number = ("schedule", 6) if axis == "pp" else ("update", 6 if axis in ("tp", "cp") else 3)
    ends = fault not in ("none", "slow")
    words = [*WORDS, *AXES[axis], f"cache_dir={cache}", f"cluster.timeout={TIMEOUT if ends else 60.0}"]
    what = f"{fault}-amid-{amid}" if ends else fault
    return warm(*words, folder=folder, world=2, script=FAULTY, FAULT=f"{what}:1:{number}")


@pytest.mark.parametrize(
    ("fault", "axis"),
    [
        ("stop", "pp"),
        ("hang", "dp_shard"),
        *(pytest.param("stop", axis, marks=SLOW) for axis in AXES if axis != "pp"),
        *(pytest.param("hang", axis, marks=SLOW) for axis in AXES if axis != "dp_shard"),
        *(pytest.param("kill", axis, marks=SLOW) for axis in AXES),
    ],
)
def test_who_keeps_the_others_waiting_is_named(tmp_path: Path, cache: Path, fault: str, axis: str) -> None:
    result = drill(tmp_path, cache, axis, fault)
    assert result.code not in (0, 130)
    assert time.time() - float((tmp_path / "died").read_text()) < TIMEOUT + 60  # on a crowded machine
    stage = ": stage 1" if axis == "pp" else ""
    named = f"fourfold: rank 1 ({axis} 1{stage}), of the {axis} group of this rank 0 (0, 1),"
    said = " ".join(result.err.split())
    if fault == "hang":
        assert f"{named} lives, but has not come to where the others wait: it is at " in said
        assert "no sign of life" not in said
    else:
        assert f"{named} has given no sign of life" in said
    if fault == "stop":
        early = f"rank 1 ({axis} 1{stage}) has given no sign of life for 3 s: it is stopped or gone."
        assert said.count(early) == 1
    assert set(updates(tmp_path / "out")) == {1}
    words = [*WORDS, *AXES[axis], f"cache_dir={cache}", "resume=auto"]
    went_on = warm(*words, folder=tmp_path, world=2)
    assert went_on.code == 0, went_on.err
    assert "from update 1 on" in went_on.out
    assert set(updates(tmp_path / "out")) == {1, 2, 3}


@pytest.mark.slow
@pytest.mark.parametrize("axis", AXES)
def test_a_slow_rank_changes_nothing(tmp_path: Path, cache: Path, axis: str) -> None:
    found = []
    for fault in ("none", "slow"):
        (tmp_path / fault).mkdir()
        result = drill(tmp_path / fault, cache, axis, fault)
        assert result.code == 0, result.err
        assert "no sign of life" not in result.err
        found.append(updates(tmp_path / fault / "out"))
    assert found[0] == found[1]
