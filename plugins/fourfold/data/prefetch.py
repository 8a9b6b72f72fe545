"""The next items are made while the current one is used."""

import threading
from collections.abc import Iterable, Iterator
from queue import SimpleQueue
from typing import Any, TypeVar

Item = TypeVar("Item")


def prefetch(items: Iterable[Item], *, depth: int = 2) -> Iterator[Item]:
    """`items`, of which a thread makes up to `depth` ahead from the first one asked for.

    What they raise is raised here, at its turn. Closing the generator ends the thread once its item at hand is made.
    """
    assert depth > 0, depth
    made: SimpleQueue[tuple[str, Any]] = SimpleQueue()
    room, closed = threading.Semaphore(depth), threading.Event()

    def work() -> None:
        try:
            source = iter(items)
            while room.acquire() and not closed.is_set():
                made.put(("item", next(source)))
        except StopIteration:
            made.put(("end", None))
        except BaseException as error:
            made.put(("error", error))

    thread = threading.Thread(target=work, name="prefetch", daemon=True)
    thread.start()
    try:
        while True:
            kind, value = made.get()
            if kind == "end":
                return
            if kind == "error":
                raise value
            room.release()
            yield value
    finally:
        closed.set()
        room.release()
        thread.join(timeout=1.0)  # a source that hangs does not hold up the end
