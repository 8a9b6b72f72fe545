"""Load weights and optimizer state of any layout into a ZeroEngine: each rank reads only the slices that it keeps."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fourfold.checkpoint.pieces import MASTER, WEIGHT, Pieces
from fourfold.checkpoint.save import Progress
from fourfold.zero.engine import ZeroEngine


def resume(folder: Path, *, engine: ZeroEngine) -> Progress:
    """Collective over the shard group. Raises ValueError if an element is in no file."""
    pieces = Pieces(folder)
    masters: list[Any] = engine.masters()
    kinds = sorted(pieces.kinds() - {MASTER, WEIGHT})
    states: dict[str, list[Any]] = {kind: [torch.zeros_like(master) for master in masters] for kind in kinds}
    _fill({MASTER: masters, **states}, pieces, engine=engine)
    steps = pieces.index["optimizer_steps"]
    for index, master in enumerate(masters):
        state: dict[str, Any] = {kind: states[kind][index] for kind in kinds}
        if steps is not None:
            state["step"] = torch.tensor(float(steps))
        if state:
            engine.optimizer.state[master] = state
    engine.publish()
    return Progress(**pieces.index["progress"])


@torch.no_grad()
def _fill(buffers_of: dict[str, list[Tensor]], pieces: Pieces, *, engine: ZeroEngine) -> None:
    for fragment in engine.fragments():
        for kind, buffers in buffers_of.items():
            pieces.read_into(fragment.of(buffers), fragment.name, kind=kind, start=fragment.start, part=fragment.part)
