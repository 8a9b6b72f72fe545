"""Every shipped tier, run whole in its debug=cpu form, gives one process's losses, norms, evaluation and export."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fourfold.paths import RECIPES
from tests.golden.composing import LARGE_TIERS
from tests.parity.run_ranks import metrics, whole_run
from tests.pool import RankPool

# Composed, found legal and of the same axes as `nd` in shrunken form, but not run whole: eight ranks of one are enough here
# (tests/unit/test_config_compose.py). olmo_7b_fsdp is zero3.
LIKE_ND = set(LARGE_TIERS) - {"nd"}
RUN = {path.stem for path in (RECIPES / "tier").glob("*.yaml")} - {"none", "olmo_7b_fsdp"} - LIKE_ND
TIERS = sorted(RUN)
PLAIN = {"dp", "zero1", "zero2"}  # shorter recipes of what the others do too, and the matrix
WORLDS = {"nd": 8, "hsdp": 4}  # of those that need more than 2 ranks

# Steps are SGD's: Adam divides a gradient near 0 by its own size, so that of 2M elements a few differ by a hundredth of a step
# when one process merely takes another attention kernel. AdamW under every way to shard is in test_zero.py.
SGD = ["optim=sgd", "optim.learning_rate=0.3", "optim.max_grad_norm=1.0"]


def overrides(cache: Path, output: Path, *more: str) -> list[str]:
    return ["task=quickstart", "debug=cpu", f"cache_dir={cache}", f"output_dir={output}", "max_steps=4", *SGD, *more]


@pytest.fixture(scope="module")
def one_process(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(cache, output) of the run that all others are compared with."""
    cache, output = tmp_path_factory.mktemp("cache"), tmp_path_factory.mktemp("one")
    assert ranks.run(1, whole_run, overrides=overrides(cache, output, "tier=zero2")) == [0]
    return cache, output


@pytest.mark.parametrize("tier", [pytest.param(tier, marks=[pytest.mark.slow] * (tier in PLAIN)) for tier in TIERS])
def test_tier_equals_one_process(ranks: RankPool, one_process: tuple[Path, Path], tmp_path: Path, tier: str) -> None:
    cache, truth = one_process
    world, debug = WORLDS.get(tier, 2), ["debug=cpu_hsdp"] if tier == "hsdp" else []
    assert ranks.run(world, whole_run, overrides=overrides(cache, tmp_path, f"tier={tier}", *debug)) == [0] * world
    for key in ("train/loss", "train/grad_norm", "eval/loss"):
        assert metrics(tmp_path, key) == pytest.approx(metrics(truth, key), rel=1e-5), key
    for key in ("train/tokens", "train/targets", "train/learning_rate", "eval/targets"):
        assert metrics(tmp_path, key) == metrics(truth, key), key
    ours, theirs = (load_file(folder / "export" / "model.safetensors") for folder in (tmp_path, truth))
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-6, msg=name)


def long_row(ranks: RankPool, folder: Path, *, size: int) -> dict[str, dict[int, float]]:
    """What `size` ranks of one context see of smollm2_32k's yarn and split documents, by key."""
    words = ["task=smollm2_32k", "tier=long_context", f"cp_size={size}", "debug=cpu", "max_steps=3"]
    words += [f"cache_dir={folder / 'cache'}", f"output_dir={folder / f'cp{size}'}"]
    assert ranks.run(size, whole_run, overrides=words) == [0] * size
    keys = ("train/loss", "train/grad_norm", "eval/loss", "train/targets")
    return {key: metrics(folder / f"cp{size}", key) for key in keys}


@pytest.mark.slow
def test_a_long_row_over_all_ranks(ranks: RankPool, tmp_path: Path) -> None:
    """On as many ranks as are there."""
    truth = long_row(ranks, tmp_path, size=1)
    for world in (2, 4):
        for key, seen in long_row(ranks, tmp_path, size=world).items():
            assert seen == pytest.approx(truth[key], rel=1e-5), (world, key)
