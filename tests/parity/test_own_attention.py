"""The strategy that README shows, one file and one conf file of a user's folder: exact, counted, and run by its name."""

import os
from pathlib import Path

import pytest

from tests.e2e.launching import ACCELERATE, ROOT, run
from tests.parity.context_ranks import Case, errors_of_plugin
from tests.parity.run_ranks import metrics, whole_run
from tests.pool import RankPool

FOLDER = Path(__file__).parent / "plugin"
ROWS = [((48,), (48,)), ((7, 13, 1, 20, 7), (30, 18)), ((17, 12), (5,))]


@pytest.mark.parametrize("world", [2, 3])
def test_exact(ranks: RankPool, world: int) -> None:
    cases = [
        Case("gathered", documents, 48, heads=6, kv_heads=3, window=window, balance=balance)
        for documents in ROWS
        for window in (None, 5)
        for balance in ("zigzag", "per_document")
    ]
    for found in ranks.run(world, errors_of_plugin, folder=str(FOLDER), target="gathered.Gathered", cases=cases):
        assert max(found) < 1e-12


def test_a_run_takes_it_by_its_name(ranks: RankPool, tmp_path: Path) -> None:
    words = ["task=quickstart", "debug=cpu", f"cache_dir={tmp_path / 'cache'}", "export=false", "seq_len=101"]
    truth, ours = tmp_path / "one", tmp_path / "two"
    assert ranks.run(1, whole_run, overrides=[*words, f"output_dir={truth}"]) == [0]
    own = ["attention=gathered", "cp_size=2", f"output_dir={ours}", "--config-dir", str(FOLDER)]
    path = os.pathsep.join([str(FOLDER), os.environ.get("PYTHONPATH", "")])
    done = run([*ACCELERATE, "-m", "fourfold", *words, *own], folder=tmp_path, PYTHONPATH=path)
    assert done.code == 0, done.err
    assert "gathered over 2 ranks" in " ".join(done.out.split())
    for key in ("train/loss", "train/grad_norm", "eval/loss", "train/targets"):
        assert metrics(ours, key) == pytest.approx(metrics(truth, key), rel=1e-5), key


def test_readme_shows_these_files() -> None:
    text = (ROOT / "README.md").read_text()
    for path in (FOLDER / "gathered.py", FOLDER / "attention" / "gathered.yaml"):
        shown = path.read_text().replace("  # noqa: E731", "").strip()
        assert shown in text, path
