"""Who holds which tokens of a row: for each cp rank the stretches of global positions, equally many tokens on each.

This object alone says it; inputs, labels, positions and attention are all derived from it. Without any document border,
causal attention of S tokens over P ranks costs the slowest rank, over the mean: contiguous 2 - 1/P, the others 1.
    contiguous     rank i has the i-th S/P tokens
    zigzag         of 2P equal chunks, rank i has chunks i and 2P-1-i (Llama 3, arXiv:2407.21783 section 3.3.2)
    per_document   every document cut into 2P chunks, dealt like that: balanced whatever the borders, but every document
                   is exchanged, and short ones become crumbs
    greedy         every document over as few ranks as make the work even, two chunks on each, short ones whole on one, those
                   with the least work first; what is left over makes up the numbers
"""

import itertools
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Sequence

from fourfold.context.rectangles import Interval, Stretches

Ownership = tuple[tuple[Interval, ...], ...]  # by cp rank
UNEVENNESS = 1.05  # what is simpler is kept if its slowest rank has no more work than this over the best, or the mean

LIMITS = (
    1.0,
    0.7,
    0.5,
    0.35,
    0.25,
    0.18,
    0.12,
    0.06,
    0.03,
    0.0,
)  # of a document's work on a rank, over the mean of ranks


def contiguous(length: int, ranks: int, documents: Stretches) -> Ownership:
    size = length // ranks
    return tuple(((rank * size, (rank + 1) * size),) for rank in range(ranks))


def zigzag(length: int, ranks: int, documents: Stretches) -> Ownership:
    edges = [chunk * (length // (2 * ranks)) for chunk in range(2 * ranks)] + [length]  # one rank has odd rows too
    chunks = list(itertools.pairwise(edges))
    return tuple(_joined([chunks[rank], chunks[-1 - rank]]) for rank in range(ranks))


def per_document(length: int, ranks: int, documents: Stretches) -> Ownership:
    shares = _Shares(length, ranks)
    for document in documents:
        shares.deal(document, over=ranks)
    return shares.filled_up(documents)


def greedy(length: int, ranks: int, documents: Stretches) -> Ownership:
    longest = sorted(documents, key=lambda one: (one[0] - one[1], one))
    mean = sum(_pairs(one, one) for one in documents) / ranks
    shares = _Shares(length, ranks)
    for limit in LIMITS:
        shares = _dealt(longest, length=length, ranks=ranks, limit=limit * mean)
        if shares.are_even():
            break
    return shares.filled_up(documents)


def _dealt(longest: Sequence[Interval], *, length: int, ranks: int, limit: float) -> "_Shares":
    """Each document over as few ranks as leave none more work of it than `limit`; the largest pieces first."""
    shares = _Shares(length, ranks)
    over = [(_fewest(one, ranks=ranks, limit=limit, room=length // ranks), one) for one in longest]
    for count, document in sorted(over, key=lambda one: -_pairs(one[1], one[1]) / one[0]):
        shares.deal(document, over=count)
    return shares


def _fewest(document: Interval, *, ranks: int, limit: float, room: int) -> int:
    whole = _pairs(document, document)
    return next((n for n in range(1, ranks) if whole <= n * limit and document[1] - document[0] <= n * room), ranks)


BALANCES: dict[str, Callable[[int, int, Stretches], Ownership]] = {
    "zigzag": zigzag,
    "greedy": greedy,
    "per_document": per_document,
    "contiguous": contiguous,
}


def choose(length: int, ranks: int, documents: Stretches, *, among: Sequence[str]) -> str:
    """Of `among`, the simplest first: the one whose slowest rank has the fewest pairs, or a simpler one about as good."""
    if len(among) == 1:
        return among[0]
    loads = {name: max(work(BALANCES[name](length, ranks, documents), documents)) for name in among}
    best = min(loads.values())
    return next(name for name in among if loads[name] <= UNEVENNESS * best)


def work(ownership: Ownership, documents: Stretches) -> list[int]:
    """Causal pairs within documents that each rank's queries have."""
    starts = [start for start, _ in documents]

    def pairs(stretch: Interval) -> int:
        first = max(bisect_right(starts, stretch[0]) - 1, 0)
        return sum(_pairs(stretch, documents[number]) for number in range(first, bisect_left(starts, stretch[1])))

    return [sum(map(pairs, held)) for held in ownership]


def _pairs(stretch: Interval, document: Interval) -> int:
    start, end = max(stretch[0], document[0]), min(stretch[1], document[1])
    if start >= end:
        return 0
    first, last = start - document[0] + 1, end - document[0]
    return (first + last) * (last - first + 1) // 2


def _joined(stretches: Sequence[Interval]) -> tuple[Interval, ...]:
    joined: list[Interval] = []
    for start, end in stretches:
        if start == end:
            continue
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return tuple(joined)


class _Shares:
    """What each rank has been given so far of `length` tokens, of which each gets an equal number."""

    def __init__(self, length: int, ranks: int) -> None:
        assert length % ranks == 0, (length, ranks)
        self._held: list[list[Interval]] = [[] for _ in range(ranks)]
        self._room = [length // ranks] * ranks
        self._work = [0] * ranks

    def deal(self, document: Interval, *, over: int) -> None:
        """Two chunks to each of so many ranks, those with the least work, from both ends to the middle; given where there
        is no room for that."""
        roomy = [rank for rank, room in enumerate(self._room) if room >= (document[1] - document[0]) // over]
        members = sorted(roomy, key=lambda rank: (self._work[rank], rank))[:over]
        sizes = self._chunks(document[1] - document[0], members=members) if len(members) == over > 1 else []
        turns = [*members, *reversed(members)]
        wanted = Counter[int]()
        for rank, size in zip(turns, sizes, strict=False):
            wanted[rank] += size
        if not sizes or any(size > self._room[rank] for rank, size in wanted.items()):
            self.give(document)
            return
        at = document[0]
        for rank, size in zip(turns, sizes, strict=True):
            self._add(rank, (at, at + size), document=document)
            at += size

    def _chunks(self, length: int, *, members: list[int]) -> list[int]:
        """Two for each; odd tokens go to those with the most room."""
        over = len(members)
        sizes = [length // (2 * over)] * (2 * over)
        most_room = sorted(range(over), key=lambda member: (-self._room[members[member]], members[member]))
        for number in range(length % (2 * over)):
            member = most_room[number % over]
            sizes[member if number < over else 2 * over - 1 - member] += 1
        return sizes

    def give(self, document: Interval) -> None:
        """Whole to the rank with the least work that has room for it, else in pieces to those with the most."""
        start, end = document
        roomy = [rank for rank, room in enumerate(self._room) if room >= end - start]
        if roomy:
            self._add(min(roomy, key=lambda rank: (self._work[rank], rank)), document, document=document)
            return
        while start < end:
            rank = max(range(len(self._room)), key=lambda rank: (self._room[rank], -rank))
            size = min(self._room[rank], end - start)
            self._add(rank, (start, start + size), document=document)
            start += size

    def are_even(self) -> bool:
        return max(self._work) * len(self._work) <= UNEVENNESS * sum(self._work)

    def filled_up(self, documents: Stretches) -> Ownership:
        """Padding, which costs nothing, where there is room left."""
        length = sum(self._room) + sum(end - start for held in self._held for start, end in held)
        for gap in _gaps(documents, length=length):
            self.give(gap)
        return tuple(_joined(sorted(held)) for held in self._held)

    def _add(self, rank: int, stretch: Interval, *, document: Interval) -> None:
        if stretch[0] == stretch[1]:
            return
        self._held[rank].append(stretch)
        self._room[rank] -= stretch[1] - stretch[0]
        self._work[rank] += _pairs(stretch, document)


def _gaps(documents: Stretches, *, length: int) -> list[Interval]:
    edges = [0, *(at for document in sorted(documents) for at in document), length]
    return [(start, end) for start, end in zip(edges[::2], edges[1::2], strict=True) if start < end]
