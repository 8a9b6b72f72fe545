"""The checkpoints of a run's folder: which are complete, which are kept, what interrupted saves left."""

import re
import shutil
from contextlib import suppress
from pathlib import Path

from fourfold.checkpoint.files import sync
from fourfold.checkpoint.pieces import INDEX, KEPT, read_index

STEP = "step-{:08d}"
NAME = re.compile(r"step-\d{8,}")
BROKEN = "broken-"


def checkpoints(folder: Path) -> list[Path]:
    """Checkpoints by their names, complete or not, oldest first. Other folders are the user's own."""
    return sorted((path for path in folder.glob("step-*") if NAME.fullmatch(path.name)), key=step_of)


def complete_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return [path for path in checkpoints(folder) if (path / INDEX).is_file()]


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def newest(folder: Path) -> Path | None:
    checkpoints = complete_checkpoints(folder)
    return checkpoints[-1] if checkpoints else None


def leftovers(folder: Path) -> list[Path]:
    """What saves and removals that were killed left."""
    return sorted([*folder.glob(".step-*.partial"), *folder.glob(".step-*.old")])


def tidy(folder: Path) -> None:
    """Remove leftovers; a complete one whose checkpoint is not there was about to be put in place, and is."""
    for left in leftovers(folder):
        target = folder / left.name.removeprefix(".").removesuffix(left.suffix)
        if (left / INDEX).is_file() and not target.exists():
            left.rename(target)
        else:
            shutil.rmtree(left, ignore_errors=True)


def rotate(folder: Path, *, keep_last: int | None, latest: Path) -> None:
    """Remove all but the newest `keep_last` complete checkpoints (None: all), the `latest` that was written, and those that
    say they are kept for ever, whatever a later run's settings are."""
    if keep_last is None:
        return
    for path in complete_checkpoints(folder)[: -max(keep_last, 1)]:
        if path != latest and not is_kept(path):
            remove(path)


def is_kept(checkpoint: Path) -> bool:
    """Whether it is never to be removed. One that cannot be read is not ours to remove either."""
    try:
        return bool(read_index(checkpoint).get(KEPT))
    except ValueError:
        return True


def remove(checkpoint: Path) -> None:
    """Never half there under its own name, nor taken for complete, whenever the process dies."""
    hidden = _hide(checkpoint)
    (hidden / INDEX).unlink(missing_ok=True)
    shutil.rmtree(hidden, ignore_errors=True)


def put_in_place(aside: Path, target: Path) -> None:
    """Rename a folder that is whole and synced to its name; one of an earlier try at the same step makes way."""
    hidden = _hide(target) if target.exists() else None
    try:
        aside.rename(target)
    except OSError:
        if hidden:
            hidden.rename(target)
        raise
    with suppress(OSError):  # some file systems sync no folders
        sync(target.parent)
    if hidden:
        shutil.rmtree(hidden, ignore_errors=True)


def _hide(checkpoint: Path) -> Path:
    hidden = checkpoint.with_name(f".{checkpoint.name}.old")
    shutil.rmtree(hidden, ignore_errors=True)
    checkpoint.rename(hidden)
    return hidden


def set_aside(checkpoint: Path) -> Path:
    """A damaged checkpoint out of the way of `newest` and rotation; nothing of it is lost."""
    number, target = 1, checkpoint.with_name(f"{BROKEN}{checkpoint.name}")
    while target.exists():
        number += 1
        target = checkpoint.with_name(f"{BROKEN}{checkpoint.name}.{number}")
    checkpoint.rename(target)
    return target
