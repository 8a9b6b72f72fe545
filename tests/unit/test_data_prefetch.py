"""Items made ahead by a thread: the same ones, their errors, and no thread left."""

import itertools
import threading
import time
from collections.abc import Iterator

import pytest

from fourfold.data.prefetch import prefetch


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


def test_the_same_items_and_no_thread_left() -> None:
    assert list(prefetch(range(100))) == list(range(100))
    assert list(prefetch([])) == []
    assert not threads()


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_no_more_than_depth_ahead(depth: int) -> None:
    made: list[int] = []

    def source() -> Iterator[int]:
        for number in itertools.count():
            made.append(number)
            yield number

    items = prefetch(source(), depth=depth)
    assert not made  # nothing before the first one is asked for
    for taken in range(1, 5):
        next(items)
        for _ in range(200):
            if len(made) == taken + depth:
                break
            time.sleep(0.005)
        time.sleep(0.02)
        assert len(made) == taken + depth
    items.close()  # type: ignore[attr-defined]
    assert not threads()


def test_errors_come_at_their_turn() -> None:
    def source() -> Iterator[int]:
        yield 1
        raise ValueError("broken row")

    items = prefetch(source())
    assert next(items) == 1
    with pytest.raises(ValueError, match="broken row"):
        next(items)
    assert not threads()


def test_work_goes_on_while_an_item_is_used() -> None:
    def source() -> Iterator[int]:
        for number in range(5):
            time.sleep(0.05)
            yield number

    start = time.perf_counter()
    for _ in prefetch(source()):
        time.sleep(0.05)
    assert time.perf_counter() - start < 0.45  # 0.5 one after the other, 0.3 at best
