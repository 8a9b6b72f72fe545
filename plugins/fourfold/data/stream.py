"""Rows tokenised and packed while they are read, of one source or of several in turn.

Nothing is kept. To go on from a row without tokenising those before it, a Mark says how many documents of each source to
pass over.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from .document import Encoded
from .fill import Place
from .pack import PackSettings, Row, pack_from
from .rows import check_targets
from .stats import PackStats

Open = Callable[[int], Iterator[Encoded]]  # the documents of a source from this number on


@dataclass(frozen=True)
class Mark:
    """Where the rows of a pass can be taken up. Plain numbers, to be kept in a checkpoint."""

    passed: int  # rows of this pass before
    documents: list[int]  # of each source to pass over
    served: list[int]  # tokens that each source gave by then
    tokens: int  # of the next document to pass over
    rows: int  # to make once more and pass over


class StreamRowSet:
    """Every reader gets the same rows in the same order.

    With several sources the one comes next that has given the fewest tokens for its weight, from its beginning again
    when it has no more, so that there is one pass without end. `stats` counts those of the newest pass. ValueError in a pass that ends without any row.
    """

    def __init__(self, sources: Sequence[Open], *, settings: PackSettings, weights: Sequence[float] = (1.0,)) -> None:
        assert len(sources) == len(weights), (len(sources), weights)
        self._sources = sources
        self._weights = weights
        self._settings = settings
        self.seq_len = settings.seq_len
        self.stats = PackStats()

    def __iter__(self) -> Iterator[Row]:
        return (row for row, _ in self.read())

    def read(self, mark: Mark | None = None) -> Iterator[tuple[Row, Mark]]:
        """The rows of one pass after `mark`, each with its own."""
        stats = self.stats = PackStats()
        turns = _Turns(self._sources, weights=self._weights, mark=mark)
        place = Place(tokens=mark.tokens, rows=mark.rows) if mark else Place()
        passed = mark.passed if mark else 0
        packed = pack_from(turns.documents(), place=place, settings=self._settings, stats=stats)
        for number, (row, after) in enumerate(packed, start=1):
            yield row, turns.mark(after, passed=passed + number)
        if mark is None:
            check_targets(stats)


class _Turns:
    """The documents of several sources in turn, and how many of each came before any that may be gone back to."""

    def __init__(self, sources: Sequence[Open], *, weights: Sequence[float], mark: Mark | None) -> None:
        self._sources = sources
        self._weights = weights
        self._documents = mark.documents if mark else [0] * len(sources)
        self._served = mark.served if mark else [0] * len(sources)
        self._first = 0  # document whose state is the oldest kept
        self._states = deque([(self._documents, self._served)])

    def documents(self) -> Iterator[Encoded]:
        streams = [begin(skipped) for begin, skipped in zip(self._sources, self._documents, strict=True)]
        while True:
            turn = min(range(len(streams)), key=lambda one: (self._served[one] / self._weights[one], one))
            encoded = next(streams[turn], None)
            if encoded is None and len(streams) == 1:
                return
            if encoded is None:  # once more from its beginning, while the others go on
                streams[turn] = self._sources[turn](0)
                self._documents = _added(self._documents, turn, -self._documents[turn])
                continue
            self._documents = _added(self._documents, turn, 1)
            self._served = _added(self._served, turn, max(len(encoded.input_ids), 1))  # blank ones take their turn too
            self._states.append((self._documents, self._served))
            yield encoded

    def mark(self, place: Place, *, passed: int) -> Mark:
        """Of a place that is not before an earlier one."""
        while self._first < place.documents:
            self._states.popleft()
            self._first += 1
        documents, served = self._states[0]
        return Mark(passed=passed, documents=documents, served=served, tokens=place.tokens, rows=place.rows)


def _added(counts: list[int], turn: int, amount: int) -> list[int]:
    return [count + amount if one == turn else count for one, count in enumerate(counts)]
