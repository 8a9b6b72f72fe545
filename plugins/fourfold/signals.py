"""Ctrl-C and SIGTERM ask a run to stop after the update at hand, with a checkpoint."""

import signal
import time
from types import FrameType

GRACE = 5.0  # seconds: launchers send a terminal's Ctrl-C a second time; a later one is meant


class StopRequest:
    """`requested` is true once a signal came; one more Ctrl-C after a moment leaves at once."""

    def __init__(self) -> None:
        self._first: float | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._note)

    @property
    def requested(self) -> bool:
        return self._first is not None

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first = now
        elif number == signal.SIGINT and now - self._first > GRACE:
            raise KeyboardInterrupt
