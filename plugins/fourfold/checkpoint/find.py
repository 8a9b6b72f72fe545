"""Which checkpoint a run goes on from, and whether it may: before any process group, from the index alone."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from fourfold.checkpoint.pieces import read_index
from fourfold.checkpoint.save import complete_checkpoints, newest
from fourfold.output import CHECKPOINTS
from fourfold.schema import TrainConfig


def checkpoint_to_resume(config: TrainConfig, *, total_steps: int) -> Path | None:
    """`resume` as a complete checkpoint; None to start from the model: none, or auto with nothing there yet.

    Raises ValueError if it is no checkpoint, of a run with other data, batch or optimizer, at or past the end, or older
    than what its branch would overwrite in the output folder.
    """
    ours = Path(config.output_dir).expanduser().absolute() / CHECKPOINTS
    if config.resume == "none":
        return None
    found = newest(ours) if config.resume == "auto" else _given(Path(config.resume).expanduser())
    if found is None:
        return None
    index = read_index(found)
    _refuse_other_settings(found, index, config=config)
    step = index["progress"]["step"]
    if step >= total_steps:
        raise ValueError(
            f"{found} is at update {step} and the run ends at {total_steps}: nothing is left to do. "
            f"Raise max_steps or num_epochs."
        )
    later = [path.name for path in complete_checkpoints(ours) if path.name > found.name]
    if later:
        raise ValueError(
            f"resume={config.resume} is at update {step}, and output_dir={config.output_dir} holds later checkpoints "
            f"({later[-1]}) of the run that went on from there: use another output_dir, or move them away."
        )
    return found


def settings_that_must_not_change(config: TrainConfig) -> dict[str, Any]:
    """What gives a position in the data, a learning rate and an optimizer state their meaning, by key."""
    data = {f"data.{key}": value for key, value in asdict(config.data).items() if key != "num_proc"}
    return {
        "optim.name": config.optim.name,
        "global_batch_size": config.global_batch_size,
        "seq_len": config.seq_len,
        "seed": config.seed,
        **data,
    }


def _given(path: Path) -> Path:
    in_run = newest(path / CHECKPOINTS)
    return in_run if in_run is not None else path


def _refuse_other_settings(found: Path, index: dict[str, Any], *, config: TrainConfig) -> None:
    theirs = index["run"]["settings"]
    differing = [
        f"{key}={value} (there {theirs[key]})"
        for key, value in settings_that_must_not_change(config).items()
        if key in theirs and theirs[key] != value
    ]
    if differing:
        raise ValueError(
            f"Checkpoint {found} is of a run with other settings, with which its position in the data, learning rate or "
            f"optimizer state would mean something else: {', '.join(differing)}. Set them as they were, or start afresh "
            f"from its weights (fourfold export, then model.path)."
        )
