"""What this process is doing, asked from another thread of it."""

import linecache
import sys
import threading
from pathlib import Path
from types import FrameType

import torch.distributed as dist

COMMUNICATION = Path(dist.__file__).parent
PACKAGE = Path(__file__).parent


def whereabouts() -> str | None:
    """`loader.py:120 in updates (<the line>)`, where the main thread is; None if a thread waits for other ranks."""
    frames = sys._current_frames()
    frames.pop(threading.get_ident(), None)
    if any(_communicates(frame) for frame in frames.values()):
        return None
    main = threading.main_thread().ident
    assert main is not None
    return _described(_ours(frames[main]))


def _communicates(frame: FrameType) -> bool:
    """Calls into torch.distributed end in its own files, or in a handle's wait() where they were started early."""
    return Path(frame.f_code.co_filename).is_relative_to(COMMUNICATION) or ".wait(" in _line(frame)


def _ours(innermost: FrameType) -> FrameType:
    """The innermost of this package, if there is any."""
    frame: FrameType | None = innermost
    while frame is not None and not Path(frame.f_code.co_filename).is_relative_to(PACKAGE):
        frame = frame.f_back
    return frame or innermost


def _described(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name} ({_line(frame)})"


def _line(frame: FrameType) -> str:
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
