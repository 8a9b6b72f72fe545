"""The output folder of a run: claimed by the main process, one run at a time, nobody's results overwritten."""

import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from omegaconf import OmegaConf

from fourfold.checkpoint.files import write_json
from fourfold.schema import TrainConfig

MARK = "run.json"
CHECKPOINTS = "checkpoints"
EXPORT = "export"
OURS = (CHECKPOINTS, EXPORT, "trackers", "metrics.jsonl", "config.yaml", "deepspeed.json", MARK)
LIBRARIES = ("fourfold", "torch", "deepspeed", "transformers", "accelerate", "datasets", "hydra-core")


@contextmanager
def claimed(folder: Path, *, config: TrainConfig) -> Iterator[None]:
    """Hold the folder for this run. For the main process only.

    Raises ValueError if it cannot be written, another process writes to it, it holds another run, or the run reads
    from a place in it that it would itself replace.
    """
    _make_writable(folder)
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ValueError(
            f"Another process is writing to output_dir={folder} now: wait for it, or use another output_dir."
        ) from None
    try:
        _refuse_other_run(folder, config=config)
        _refuse_own_input(folder, config=config)
        yield
    finally:
        lock.release()


def begin(folder: Path, *, config: TrainConfig, plain: dict[str, Any]) -> None:
    """Mark the claimed folder as this run's, with its resolved config and versions; remove the run that `overwrite`
    gives up. To be called when nothing that the user can mend is left to go wrong."""
    if config.overwrite and config.resume == "none":
        _remove_run(folder)
    write_json(folder / MARK, {"name": config.name, "versions": versions(), "python": platform.python_version()})
    OmegaConf.save(OmegaConf.create(plain), folder / "config.yaml")


def versions() -> dict[str, str]:
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def _make_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"output_dir={folder} cannot be written ({os.strerror(error.errno or 0)}).") from None


def _refuse_other_run(folder: Path, *, config: TrainConfig) -> None:
    found = [name for name in OURS if (folder / name).exists()]
    if found and MARK not in found:
        raise ValueError(
            f"output_dir={folder} has {found[0]} that no run of fourfold wrote, and a run would write its own there: "
            f"use another output_dir."
        )
    started = any((folder / name).exists() for name in (CHECKPOINTS, "metrics.jsonl"))  # beyond its set-up
    if started and config.resume == "none" and not config.overwrite:
        raise ValueError(
            f"output_dir={folder} holds another run: go on with it by resume=auto, keep it and use another "
            f"output_dir=, or lose it by overwrite=true."
        )


def _refuse_own_input(folder: Path, *, config: TrainConfig) -> None:
    """Links and .. followed: a run may neither replace what it reads nor read what it writes."""
    inputs = {"model.path": config.model.path, "data.path": config.data.path, "data.eval_path": config.data.eval_path}
    inputs |= {f"data.sources[{i}].path": source.path for i, source in enumerate(config.data.sources or [])}
    ours = [(folder / name).resolve() for name in OURS]
    for key, value in inputs.items():
        path = Path(value).expanduser() if value else None
        if path is None or not path.exists():
            continue
        if any(path.resolve().is_relative_to(place) for place in ours):
            raise ValueError(
                f"{key}={value} lies in output_dir={folder}, where this run would replace it: use another output_dir."
            )
        if key.startswith("data.") and path.is_dir() and folder.resolve().is_relative_to(path.resolve()):
            raise ValueError(
                f"output_dir={folder} lies in {key}={value}, so that what a run writes would be read as data: use another "
                f"output_dir."
            )


def _remove_run(folder: Path) -> None:
    for name in OURS:
        path = folder / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
