"""What one rank does in the tests of the support matrix."""

from pathlib import Path
from typing import Any

from torch import Tensor

from tests.matrix import Run, config_of, layout_of
from tests.parity.zero_ranks import train


def all_trained(
    rank: int, *, folders: dict[bool, Path], runs: list[Run], steps: list[dict[str, Tensor]]
) -> list[dict[str, Any]]:
    """Of each run, one after the other, what this rank saw; they have layouts of as many ranks."""
    found = []
    for run in runs:
        config, layout = config_of(run), layout_of(run)
        history = train(
            rank,
            folder=folders["tied" in run],
            config=config,
            layout=layout,
            steps=steps,
            accumulation=config.global_batch_size // (config.micro_batch_size * layout.data_size),
        )
        found.append(history)
    return found
