"""Which documents share a row: best-fit decreasing (Ding et al. 2024, arXiv 2404.10830). Pure arithmetic on lengths.

The longest goes first, each into the row with the least room that still holds it, or into a new row. Rooms are kept
as a sorted list of the distinct ones, so that a document costs a bisection.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence


def best_fit(lengths: Sequence[int], *, capacity: int) -> list[list[int]]:
    """Numbers of the documents of each row, ascending; rows by their first document. Each length is at most `capacity`."""
    rows: list[list[int]] = []
    rooms: list[int] = []  # the distinct ones, sorted
    rows_of: dict[int, list[int]] = {}  # room -> rows that have it, the newest last
    for number in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):  # equal ones in their order
        length = lengths[number]
        assert 0 < length <= capacity, (length, capacity)
        at = bisect_left(rooms, length)
        if at == len(rooms):
            row, room = len(rows), capacity
            rows.append([])
        else:
            room = rooms[at]
            row = rows_of[room].pop()
            if not rows_of[room]:
                del rows_of[room], rooms[at]
        rows[row].append(number)
        _give_back(row, room - length, rooms=rooms, rows_of=rows_of)
    return sorted(sorted(row) for row in rows)


def _give_back(row: int, room: int, *, rooms: list[int], rows_of: dict[int, list[int]]) -> None:
    if room == 0:
        return
    if room not in rows_of:
        insort(rooms, room)
        rows_of[room] = []
    rows_of[room].append(row)
