"""A DeepSpeed universal checkpoint from ours, for scripts that call DeepSpeed themselves.

`engine.load_checkpoint(target)` with {"checkpoint": {"load_universal": true}} reads it at ZeRO stages 1, 2 and 3 on any
number of ranks, checked against 0.19.8: a folder of each parameter with fp32, exp_avg and exp_avg_sq, and little files
with what the loader looks up. DeepSpeed's own converter makes folders that load at the stage they were saved at only. At stage 3 its loader gives one step counter to all
parameter groups of a torch optimizer; a script mends that by `entry["step"] = entry["step"].clone()` for each of them.
"""

import shutil
from pathlib import Path
from typing import Any

import torch

from fourfold.checkpoint.files import disk_errors, sync
from fourfold.checkpoint.pieces import MASTER, Pieces

STATES = {"fp32": MASTER, "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
# The loader goes through our groups and the engine's side by side and stops at the shorter; ours say nothing, so that the
# script's own learning rate and weight decay stay.
GROUPS = 1024


def export_universal(checkpoint: Path, *, target: Path) -> Path:
    """Write `target`/global_step<N> and `target`/latest_universal; in hand is one tensor.

    Raises ValueError for a checkpoint without AdamW's moments, which the loader insists on. The folder appears complete or
    not at all.
    """
    pieces = Pieces(checkpoint)
    missing = sorted(set(STATES.values()) - pieces.kinds())
    if missing:
        raise ValueError(
            f"Checkpoint {checkpoint.absolute()} has no {', '.join(missing)}: DeepSpeed loads universal checkpoints of "
            f"AdamW only. Export the weights with --to hf."
        )
    aside = target.with_name(f".{target.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    step = pieces.index["progress"]["step"]
    tag = f"global_step{step}"
    try:
        with disk_errors(str(target.absolute())):
            _write_states(pieces, aside / tag / "zero")
            _write_what_is_looked_up(pieces, aside / tag, step=step)
            (aside / "latest_universal").write_text(tag)
            for path in aside.rglob("*"):
                sync(path)
            aside.rename(target)
    except RuntimeError as error:  # what torch.save makes of a full disk
        raise ValueError(f"{target.absolute()} could not be written: {error}.") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return target


def _write_states(pieces: Pieces, folder: Path) -> None:
    for name, shape in pieces.shapes().items():
        (folder / name).mkdir(parents=True)
        for file, kind in STATES.items():
            torch.save({"param": pieces.read(name, kind=kind).view(shape)}, folder / name / f"{file}.pt")
        torch.save(_optimizer_step(pieces), folder / name / "step.pt")


def _optimizer_step(pieces: Pieces) -> torch.Tensor:
    return torch.tensor(float(pieces.index["optimizer_steps"]))


def _write_what_is_looked_up(pieces: Pieces, folder: Path, *, step: int) -> None:
    version = pieces.index["versions"]["deepspeed"]
    groups: list[dict[str, Any]] = [{} for _ in range(GROUPS)]
    optimizer = {
        "ds_version": version,
        "param_groups": groups,
        "optimizer_state_dict": {"state": {0: {"step": _optimizer_step(pieces)}}, "param_groups": groups},
    }
    torch.save(optimizer, folder / "zero" / "optimizer_state.pt")
    about = {
        "module": {},
        "global_steps": step,
        "global_samples": pieces.index["progress"]["rows"],
        "skipped_steps": 0,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "lr_scheduler": {"last_batch_iteration": step},
        "ds_version": version,
        "fourfold": pieces.index["progress"],
    }
    for name in ("mp_rank_00", "zero_pp_rank_0_mp_rank_00"):  # stages 1 and 2, stage 3
        torch.save(about, folder / f"{name}_model_states.pt")
