"""Save and resume a ZeroEngine. Each rank writes what it owns (one replica of each shard) and reads what it needs."""

import shutil
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fourfold.checkpoint.pieces import FORMAT, INDEX, MASTER, Pieces, sync, write_json, write_rank_file
from fourfold.mesh import Mesh
from fourfold.zero.engine import ZeroEngine


@dataclass(frozen=True)
class Progress:
    """Where a run is: updates done, rows of the data consumed (over all epochs and ranks), targets and tokens seen."""

    step: int = 0
    rows: int = 0
    tokens: int = 0
    skipped: int = 0


def save(folder: Path, *, engine: ZeroEngine, mesh: Mesh, progress: Progress, extra: dict[str, Any]) -> Path:
    """Write `folder`/step-XXXXXXXX; collective over all ranks. The folder appears complete or not at all."""
    target = folder / f"step-{progress.step:08d}"
    aside = folder / f".{target.name}.partial"
    if mesh.is_main:
        for leftover in folder.glob(".step-*.partial"):  # of runs that were killed
            shutil.rmtree(leftover, ignore_errors=True)
        aside.mkdir(parents=True)
    dist.barrier()
    file = None
    if mesh.layout.coordinate(mesh.rank)["dp_replicate"] == 0:
        file = _write(aside, rank=mesh.rank, engine=engine)
    files: list[Any] = [None] * mesh.layout.world_size
    dist.all_gather_object(files, file)
    if mesh.is_main:
        index = {
            "format": FORMAT,
            "progress": asdict(progress),
            "files": [name for name in files if name],
            "shapes": {name: list(shape) for name, shape in engine.shapes().items()},
            "optimizer_steps": _optimizer_steps(engine),
            "layout": asdict(mesh.layout),
            "versions": {name: version(name) for name in ("fourfold", "torch", "deepspeed", "transformers")},
            **extra,
        }
        write_json(aside / INDEX, index)
        sync(aside)
        old = folder / f".{target.name}.old"
        if target.exists():  # of an earlier try at the same step: a complete one is there at every moment but one
            target.rename(old)
        aside.rename(target)
        sync(folder)
        shutil.rmtree(old, ignore_errors=True)
    dist.barrier()
    return target


def _write(aside: Path, *, rank: int, engine: ZeroEngine) -> str:
    """Raises ValueError, with nothing left behind, if the disk does not take it."""
    from safetensors import SafetensorError

    try:
        return write_rank_file(aside, rank=rank, tensors=_owned(engine))
    except (OSError, SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        kept = newest(aside.parent)
        raise ValueError(
            f"The checkpoint {aside.name.strip('.').removesuffix('.partial')} could not be written to {aside.parent} "
            f"({error}). The newest complete one there is {kept.name if kept else 'none'}."
        ) from None


def complete_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(path for path in folder.glob("step-*") if (path / INDEX).is_file())


def rotate(folder: Path, *, keep: int | None) -> None:
    """Remove all but the newest `keep` complete checkpoints; the newest always stays."""
    if keep is not None:
        for path in complete_checkpoints(folder)[: -max(keep, 1)]:
            shutil.rmtree(path)


def resume(folder: Path, *, engine: ZeroEngine) -> Progress:
    """Load weights and optimizer state of any layout into `engine`; collective over the shard group.

    Raises ValueError if the checkpoint is of another model or optimizer.
    """
    pieces = Pieces(folder)
    _refuse_other_model(pieces, engine=engine)
    masters = engine.masters()
    kinds = sorted(pieces.kinds() - {MASTER})
    states: dict[str, list[Any]] = {kind: [torch.zeros_like(master) for master in masters] for kind in kinds}
    with torch.no_grad():
        for fragment in engine.fragments():
            for kind, buffers in {MASTER: masters, **states}.items():
                values = pieces.read(fragment.name, kind=kind, start=fragment.start, count=fragment.count)
                fragment.of(buffers).copy_(values)
    steps = pieces.index["optimizer_steps"]
    for index, master in enumerate(masters):
        state: dict[str, Any] = {kind: states[kind][index] for kind in kinds}
        if steps is not None:
            state["step"] = torch.tensor(float(steps))
        if state:
            engine.optimizer.state[master] = state
    engine.publish()
    return Progress(**pieces.index["progress"])


def _owned(engine: ZeroEngine) -> dict[tuple[str, str, int], torch.Tensor]:
    masters = engine.masters()
    tensors = {}
    for fragment in engine.fragments():
        tensors[MASTER, fragment.name, fragment.start] = fragment.of(masters)
        for kind, buffers in _states(engine).items():
            tensors[kind, fragment.name, fragment.start] = fragment.of(buffers)
    return tensors


def _states(engine: ZeroEngine) -> dict[str, list[torch.Tensor]]:
    """Optimizer state tensors that have a value for each element, by kind, in the order of the master buffers."""
    masters = engine.masters()
    of_master = [engine.optimizer.state.get(master, {}) for master in masters]
    kinds = {k for state in of_master for k, v in state.items() if torch.is_tensor(v) and v.ndim and v.numel()}
    return {kind: [state[kind] for state in of_master] for kind in sorted(kinds)}


def _optimizer_steps(engine: ZeroEngine) -> float | None:
    for state in engine.optimizer.state.values():
        if "step" in state:
            return float(state["step"])
    return None


def _refuse_other_model(pieces: Pieces, *, engine: ZeroEngine) -> None:
    saved, ours = pieces.shapes(), engine.shapes()
    for name in [*saved, *ours]:
        if saved.get(name) != ours.get(name):
            has = {key: list(shapes[name]) if name in shapes else "none" for key, shapes in (("c", saved), ("m", ours))}
            raise ValueError(
                f"Checkpoint {pieces.folder} is of another model: its {name} has shape {has['c']}, this model's "
                f"{has['m']}. Use resume=none and another output_dir, or the model it was made with."
            )


def newest(folder: Path) -> Path | None:
    checkpoints = complete_checkpoints(folder)
    return checkpoints[-1] if checkpoints else None
