"""A folder that is made once, whoever comes first, and opened by all others.

The first process to get the file lock makes it in a folder beside, which is renamed when it is whole; the others wait for
the lock and find it, or refuse with the first one's reason (<key>.refused) instead of finding it out again one by one.
No process group takes part, so that no collective can time out meanwhile.
"""

import os
import shutil
from collections.abc import Callable
from errno import EDQUOT, ENOSPC, EROFS
from pathlib import Path

from filelock import FileLock


def cached(root: Path, *, key: str, make: Callable[[Path], None]) -> Path:
    """`root/key`, filled by `make(folder)` if it is not there: it appears whole or not at all.

    ValueError: what `make` refuses; a `root` that cannot be written.
    """
    folder = root / key
    if folder.is_dir():  # no lock, so that a cache may be read-only
        return folder
    refused = root / f"{key}.refused"
    try:
        root.mkdir(parents=True, exist_ok=True)
        before = _stamp(refused)
        lock = FileLock(f"{folder}.lock")
        lock.acquire()
    except OSError as error:
        raise ValueError(f"cache_dir={root.parent} cannot be written: {error}") from error
    try:
        if _stamp(refused) != before and not folder.is_dir():  # by another process, while this one waited
            raise ValueError(refused.read_text())
        if not folder.is_dir():
            _make(folder, make=make)
            refused.unlink(missing_ok=True)
    except OSError as error:
        if error.errno not in (ENOSPC, EROFS, EDQUOT):
            raise
        raise ValueError(f"cache_dir={root.parent} cannot be written: {error}") from error
    except ValueError as error:
        refused.write_text(str(error))
        raise
    finally:
        lock.release()
    return folder


def _make(folder: Path, *, make: Callable[[Path], None]) -> None:
    """Under the lock: whatever a killed process left of this folder is nobody's any more."""
    for left in folder.parent.glob(f"{folder.name}.tmp-*"):
        shutil.rmtree(left)
    scratch = folder.with_name(f"{folder.name}.tmp-{os.getpid()}")
    try:
        make(scratch)
        os.rename(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _stamp(file: Path) -> int | None:
    return file.stat().st_mtime_ns if file.exists() else None
