"""Which checkpoint a run goes on from, and whether it may: before any process group, from the indexes alone."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fourfold.checkpoint.kept import checkpoints, complete_checkpoints, step_of
from fourfold.checkpoint.pieces import NewerFormat, read_index, read_table
from fourfold.output import CHECKPOINTS
from fourfold.schema import DataConfig, TrainConfig

MAY_MOVE = ("data.path=", "data.eval_path=")


@dataclass(frozen=True)
class ToResume:
    """`candidates`, newest first: the first whose files are as they were written is taken (sound.py)."""

    candidates: list[Path]
    passed_over: list[tuple[Path, str]] = field(default_factory=list)  # damaged ones that are newer, and why


def checkpoint_to_resume(
    config: TrainConfig, *, total_steps: int, shapes: Mapping[str, Any], identity: Mapping[str, Any]
) -> ToResume | None:
    """`resume` as checkpoints; None to start from the model: none, or auto with nothing there yet.

    `shapes` are those of the model's parameters by name; `identity` is `data_identity` of this run. Raises ValueError if
    there is none to read, or it is of another model, of a run with other data, batch or optimizer, at or past the end, or
    older than what its branch would overwrite in the output folder.
    """
    if config.resume == "none":
        return None
    ours = Path(config.output_dir).expanduser().absolute() / CHECKPOINTS
    found = _newest_readable(ours) if config.resume == "auto" else _given(Path(config.resume).expanduser())
    if found is None:
        return None
    first = found.candidates[0]
    index = read_index(first)
    _refuse_other_model(first, shapes=shapes)
    _refuse_other_settings(first, index, config=config, identity=identity)
    _refuse_the_end(first, step=index["progress"]["step"], total_steps=total_steps)
    if config.resume != "auto":
        _refuse_older(first, ours=ours, config=config)
    return found


def settings_that_must_not_change(config: TrainConfig) -> dict[str, Any]:
    """What gives a position in the data, a learning rate and an optimizer state their meaning, by key."""
    return {
        "optim.name": config.optim.name,
        "global_batch_size": config.global_batch_size,
        "seq_len": config.seq_len,
        "seed": config.seed,
    }


def data_identity(
    data: DataConfig,
    *,
    digest: str | None,
    rows: int,
    tokens: int,
    vocabulary: int,
    tokenizer: str,
    state: str | None = None,
) -> dict[str, Any]:
    """What tells the rows of one run from those of another: the digest of their content, wherever the files lie, or for
    a stream (`digest=None`) its settings, the `state` of its files, and the digest of the tokenizer."""
    settings = {f"data.{key}": value for key, value in asdict(data).items() if key != "num_proc"}
    return {
        "digest": digest,
        "rows": rows,
        "tokens": tokens,
        "vocabulary": vocabulary,
        "tokenizer": tokenizer,
        "state": state,
        "settings": settings,
    }


def _newest_readable(folder: Path) -> ToResume | None:
    candidates: list[Path] = []
    passed_over: list[tuple[Path, str]] = []
    for path in reversed(checkpoints(folder)):
        try:
            read_table(path)  # and the index before it
        except NewerFormat:
            raise
        except ValueError as error:
            passed_over.append((path, str(error)))
        else:
            candidates.append(path)
    if not candidates and passed_over:
        raise none_is_sound(folder, passed_over)
    return ToResume(candidates, passed_over) if candidates else None


def none_is_sound(folder: Path, passed_over: list[tuple[Path, str]]) -> ValueError:
    reasons = "; ".join(f"{path.name}: {why.rstrip('.')}" for path, why in passed_over)
    others = [path.name for path in complete_checkpoints(folder) if path not in dict(passed_over)]
    if others:
        return ValueError(
            f"{folder} has others than the one that cannot be read ({reasons}): resume from {others[-1]}."
        )
    return ValueError(
        f"No checkpoint in {folder} can be read ({reasons}). Put a copy of one in place, or start afresh in another "
        f"output_dir, or here with resume=none overwrite=true."
    )


def _given(path: Path) -> ToResume:
    """The newest of a run's folder, or the one that it is."""
    in_run = _newest_readable(path / CHECKPOINTS)
    if in_run is not None:
        return in_run
    read_index(path)
    return ToResume([path])


def _refuse_other_model(checkpoint: Path, *, shapes: Mapping[str, Any]) -> None:
    saved = {name: list(entry["shape"]) for name, entry in read_table(checkpoint).items()}
    ours = {name: list(shape) for name, shape in shapes.items()}
    for name in [*saved, *ours]:
        if saved.get(name) != ours.get(name):
            raise ValueError(
                f"Checkpoint {checkpoint} is of another model: its {name} has shape {saved.get(name, 'none')}, this "
                f"model's {ours.get(name, 'none')}. Use resume=none and another output_dir, or the model it was made with."
            )


def _refuse_other_settings(
    checkpoint: Path, index: dict[str, Any], *, config: TrainConfig, identity: Mapping[str, Any]
) -> None:
    theirs = index["run"]["settings"]
    differing = _differing(theirs, settings_that_must_not_change(config)) + _data_differing(
        index["run"]["data"], identity
    )
    if differing:
        raise ValueError(
            f"Checkpoint {checkpoint} is of a run with other settings, with which its position in the data, learning "
            f"rate or optimizer state would mean something else: {', '.join(differing)}. Set them as they were, or start "
            f"afresh from its weights (fourfold export, then model.path)."
        )


def _data_differing(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    if None not in (theirs["digest"], ours["digest"]) and theirs["digest"] == ours["digest"]:
        return []
    found = []
    if theirs["vocabulary"] != ours["vocabulary"]:
        found.append(f"a vocabulary of {ours['vocabulary']} tokens (there {theirs['vocabulary']})")
    elif theirs["tokenizer"] != ours["tokenizer"]:
        found.append("another tokenizer")
    known = ours["digest"] is not None
    moved = MAY_MOVE if known else ()  # rows that are the same may lie elsewhere
    found += [one for one in _differing(theirs["settings"], ours["settings"]) if not one.startswith(moved)]
    if not found and theirs.get("state") != ours["state"]:
        found.append("changed files of the stream")
    if not found and known:
        found.append(
            f"changed data ({ours['rows']} rows of {ours['tokens']} tokens in all, there {theirs['rows']} of "
            f"{theirs['tokens']})"
        )
    return found


def _differing(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    return [
        f"{key}={value} (there {theirs[key]})" for key, value in ours.items() if key in theirs and theirs[key] != value
    ]


def _refuse_the_end(checkpoint: Path, *, step: int, total_steps: int) -> None:
    if step >= total_steps:
        raise ValueError(
            f"{checkpoint} is at update {step} and the run ends at {total_steps}: nothing is left to do. "
            f"Raise max_steps or num_epochs; its Hugging Face folder is made by fourfold export."
        )


def _refuse_older(checkpoint: Path, *, ours: Path, config: TrainConfig) -> None:
    step = read_index(checkpoint)["progress"]["step"]
    is_ours = checkpoint.resolve().parent == ours.resolve()
    later = [path.name for path in complete_checkpoints(ours) if step_of(path) >= step + is_ours]
    if later:
        raise ValueError(
            f"resume={config.resume} is at update {step}, and output_dir="
            f"{config.output_dir} holds later checkpoints ({later[-1]}) of the run that went on from there: use another "
            f"output_dir, or move them away."
        )
