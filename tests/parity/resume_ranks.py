"""What one rank does in the tests of checkpoints."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from fourfold.checkpoint.board import Board
from fourfold.checkpoint.pieces import MASTER
from fourfold.checkpoint.resume import resume
from fourfold.checkpoint.save import Progress, Saver
from fourfold.checkpoint.snapshot import look
from fourfold.layout import Layout
from fourfold.mesh import Mesh
from fourfold.schema import TrainConfig
from fourfold.zero.engine import ZeroEngine
from tests.parity.zero_ranks import build, gather, micro_batches
from tests.reference import batches

ROWS, ACCUMULATION = 12, 3


def saver(folder: Path, *, engine: ZeroEngine, mesh: Mesh, **changes: Any) -> Saver:
    options: dict[str, Any] = {
        "board": Board(rank=mesh.rank, world_size=mesh.layout.world_size),
        "about": {"run": {}},
        "config": {},
        "keep_last": None,
        "keep_every": None,
        "in_background": False,
        "say": print,
        **changes,
    }
    return Saver(folder, engine=engine, mesh=mesh, **options)


def update(engine: ZeroEngine, *, mesh: Mesh, step: int) -> dict[str, Any]:
    """One update; the loss, the norm, and all weights and moments after it by `<kind>:<name>`."""
    batch = batches(step, rows=ROWS)
    targets = int((batch["labels"] != -100).sum())
    micros = micro_batches(batch, mesh=mesh, count=ACCUMULATION)
    loss = engine.forward_backward(micros, targets=targets).sum()
    norm = engine.step(learning_rate=1e-3)
    dist.all_reduce(loss, group=mesh.loss_group)
    return {"loss": loss.item() / targets, "norm": norm, "state": state(engine, mesh=mesh)}


def state(engine: ZeroEngine, *, mesh: Mesh) -> dict[str, Tensor]:
    snapshot = look(engine)
    return {
        f"{kind}:{name}": tensor
        for kind, buffers in snapshot.buffers.items()
        for name, tensor in gather(engine, buffers, mesh=mesh).items()
    }


def save_after_two(
    rank: int, *, folder: Path, config: TrainConfig, layout: Layout, output: Path, in_background: bool
) -> dict[str, Any]:
    """Two updates, a checkpoint, a third update: what that saw and left, and as `saved` what was to be saved."""
    engine, mesh = build(rank, folder=folder, config=config, layout=layout)
    for step in range(2):
        update(engine, mesh=mesh, step=step)
    saving = saver(output, engine=engine, mesh=mesh, in_background=in_background)
    saving.save(Progress(step=2, rows=2 * ROWS))
    saved = state(engine, mesh=mesh)
    third = update(engine, mesh=mesh, step=2)
    saving.settle()
    return {**third, "saved": saved}


def resume_from_all(
    rank: int,
    *,
    folder: Path,
    config: TrainConfig,
    layout: Layout,
    checkpoints: dict[str, Path],
    truths: dict[str, Path] | None = None,
) -> dict[str, dict[str, Any]]:
    """The third update after each of the checkpoints, and which tensors were not loaded bit by bit: by their files, or
    by what was saved (files `truths`)."""
    engine, mesh = build(rank, folder=folder, config=config, layout=layout)
    found = {}
    for name, checkpoint in checkpoints.items():
        progress = resume(checkpoint, engine=engine)
        assert (progress.step, progress.rows) == (2, 2 * ROWS)
        loaded, stored = state(engine, mesh=mesh), torch.load(truths[name]) if truths else whole_tensors(checkpoint)
        assert loaded.keys() == stored.keys()
        wrong = [key for key in stored if not torch.equal(loaded[key].reshape(-1), stored[key].reshape(-1))]
        assert float(engine.optimizer.state[engine.masters()[0]]["step"]) == 2
        found[name] = {"wrong": wrong, **update(engine, mesh=mesh, step=2)}
    return found


def whole_tensors(checkpoint: Path) -> dict[str, Tensor]:
    """{`<kind>:<name>`: flat} put together from the files by safetensors' own reader, every element exactly once."""
    pieces: dict[str, list[tuple[int, Tensor]]] = {}
    for file in checkpoint.glob("*.safetensors"):
        for key, values in load_file(file).items():
            kind, name, start = key.split(":")
            if kind != "weight":
                pieces.setdefault(f"{kind}:{name}", []).append((int(start), values))
    whole = {}
    for key, found in pieces.items():
        end = 0
        for start, values in sorted(found, key=lambda piece: piece[0]):
            assert start == end, key
            end += len(values)
        whole[key] = torch.cat([values for _, values in sorted(found, key=lambda piece: piece[0])])
    assert any(key.startswith(f"{MASTER}:") for key in whole)
    return whole


def save_many(
    rank: int, *, folder: Path, config: TrainConfig, layout: Layout, output: Path, options: dict[str, Any], steps: int
) -> list[str]:
    """A checkpoint after each of `steps` updates; what was said."""
    engine, mesh = build(rank, folder=folder, config=config, layout=layout)
    said: list[str] = []
    saving = saver(output, engine=engine, mesh=mesh, say=said.append, **options)
    for step in range(steps):
        update(engine, mesh=mesh, step=step)
        saving.save(Progress(step=step + 1))
    saving.settle()
    return said
