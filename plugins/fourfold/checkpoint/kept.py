"""The checkpoints of a run's folder: which are complete, which are kept, what interrupted saves left."""

import shutil
from pathlib import Path

from fourfold.checkpoint.files import sync
from fourfold.checkpoint.pieces import INDEX, KEPT, read_index

STEP = "step-{:08d}"
BROKEN = "broken-"


def complete_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(path for path in folder.glob("step-*") if (path / INDEX).is_file())


def newest(folder: Path) -> Path | None:
    checkpoints = complete_checkpoints(folder)
    return checkpoints[-1] if checkpoints else None


def leftovers(folder: Path) -> list[Path]:
    """What saves and removals that were killed left."""
    return sorted([*folder.glob(".step-*.partial"), *folder.glob(".step-*.old")])


def rotate(folder: Path, *, keep_last: int | None) -> None:
    """Remove all but the newest `keep_last` complete checkpoints (None: all) and those that say they are kept for ever,
    whatever a later run's settings are; the newest always stays."""
    if keep_last is None:
        return
    for path in complete_checkpoints(folder)[: -max(keep_last, 1)]:
        if not is_kept(path):
            remove(path)


def is_kept(checkpoint: Path) -> bool:
    """Whether it is never to be removed. One that cannot be read is not ours to remove either."""
    try:
        return bool(read_index(checkpoint).get(KEPT))
    except ValueError:
        return True


def remove(checkpoint: Path) -> None:
    """Never half there under its own name, whenever the process dies."""
    shutil.rmtree(_hide(checkpoint), ignore_errors=True)


def put_in_place(aside: Path, target: Path) -> None:
    """Rename a folder that is whole and synced to its name; one of an earlier try at the same step makes way."""
    hidden = _hide(target) if target.exists() else None
    aside.rename(target)
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
