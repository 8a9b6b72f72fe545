"""A long run on eight ranks of three axes has one process's curve: nothing small adds up.

Steps are SGD's. AdamW, which divides by the gradient's own size, lets any difference in rounding grow: 1e-7 in the first loss
is 6e-2 after 180 updates at quickstart's rate, with neither run better than the other.
"""

from pathlib import Path

import numpy as np
import pytest

from tests.parity.run_ranks import metrics, whole_run
from tests.pool import RankPool

UPDATES = 200
SGD = ["optim=sgd", "optim.learning_rate=0.3", "optim.max_grad_norm=1.0"]
AXES = ["tp_size=2", "cp_size=2", "pp_size=2", "dp_shard_size=1", "zero=stage1", "pipeline.schedule=interleaved_1f1b"]


@pytest.mark.slow
def test_two_hundred_updates(ranks: RankPool, tmp_path: Path) -> None:
    def curve(name: str, world: int, *more: str) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
        words = [
            "task=quickstart",
            "debug=cpu",
            f"max_steps={UPDATES}",
            "export=false",
            f"cache_dir={tmp_path / 'cache'}",
        ]
        words += [f"output_dir={tmp_path / name}", "data.max_documents=200", *SGD, *more]
        assert ranks.run(world, whole_run, overrides=words) == [0] * world
        found = metrics(tmp_path / name, "train/loss")
        assert list(found) == list(range(1, UPDATES + 1))
        return np.array(list(found.values()))

    one, eight = curve("one", 1), curve("eight", 8, *AXES)
    assert one[-20:].mean() < one[:20].mean() - 0.5, "it learns"
    apart = eight - one
    assert np.abs(apart).max() < 1e-3
    drift = np.polyfit(np.arange(UPDATES), apart, 1)[0] * UPDATES
    assert abs(drift) < 1e-4, "neither falls behind"
