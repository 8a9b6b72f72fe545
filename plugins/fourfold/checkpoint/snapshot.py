"""What one rank saves of a ZeroEngine: its slices of master weights and optimizer state, where they are or copied."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fourfold.checkpoint.files import Entry
from fourfold.checkpoint.pieces import MASTER, WEIGHT, key_of
from fourfold.zero.engine import Fragment, ZeroEngine


@dataclass(frozen=True)
class Snapshot:
    """Flat buffers by kind, each laid out as the engine's master buffers, and the fragments in them that this rank
    stores."""

    buffers: dict[str, list[Tensor]]
    fragments: list[Fragment]
    weight_dtype: torch.dtype  # of the weights that are trained
    optimizer_steps: float | None

    def kinds(self) -> dict[str, torch.dtype]:
        """fp32 weights are the masters and not stored again."""
        kinds = dict.fromkeys(self.buffers, torch.float32)
        return kinds if self.weight_dtype is torch.float32 else {**kinds, WEIGHT: self.weight_dtype}

    def entries(self) -> list[Entry]:
        return [
            Entry(key_of(kind, fragment.name, fragment.start), (fragment.count,), dtype, self._values(kind, fragment))
            for kind, dtype in self.kinds().items()
            for fragment in self.fragments
        ]

    def _values(self, kind: str, fragment: Fragment) -> Callable[[int, int], Tensor]:
        whole = fragment.of(self.buffers[MASTER if kind == WEIGHT else kind])
        return lambda start, stop: whole[start:stop]

    def bytes(self) -> int:
        return sum(entry.count * entry.dtype.itemsize for entry in self.entries())


def look(engine: ZeroEngine) -> Snapshot:
    """The engine's own buffers: they change with the next update."""
    masters = engine.masters()
    state = [engine.optimizer.state.get(master, {}) for master in masters]
    kinds = {k for of_master in state for k, v in of_master.items() if torch.is_tensor(v) and v.ndim and v.numel()}
    buffers: dict[str, list[Tensor]] = {MASTER: [master.detach() for master in masters]}
    buffers |= {kind: [of_master[kind] for of_master in state] for kind in sorted(kinds)}
    steps = [float(of_master["step"]) for of_master in state if "step" in of_master]
    stored = [fragment for fragment in engine.fragments() if fragment.stored]
    return Snapshot(buffers, stored, engine.weight_dtype(), steps[0] if steps else None)


class HostCopies:
    """Copies a snapshot to host memory that is kept from one save to the next (page-locked for a GPU)."""

    def __init__(self) -> None:
        self._host: dict[tuple[str, int], Tensor] = {}

    def copy(self, snapshot: Snapshot) -> Snapshot:
        """The loop may go on when this returns."""
        copied: dict[str, list[Any]] = {
            kind: [self._copy((kind, index), buffer) for index, buffer in enumerate(buffers)]
            for kind, buffers in snapshot.buffers.items()
        }
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return Snapshot(copied, snapshot.fragments, snapshot.weight_dtype, snapshot.optimizer_steps)

    def _copy(self, where: tuple[str, int], buffer: Tensor) -> Tensor:
        if where not in self._host:
            self._host[where] = torch.empty(buffer.shape, dtype=buffer.dtype, pin_memory=buffer.is_cuda)
        return self._host[where].copy_(buffer, non_blocking=True)
