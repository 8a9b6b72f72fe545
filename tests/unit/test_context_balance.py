"""Who holds what: every position once, equally many on each rank, and about the same work whatever the documents."""

import itertools
import math
import random

import pytest

from fourfold.context.balance import BALANCES, UNEVENNESS, choose, contiguous, work, zigzag
from fourfold.context.rectangles import Interval
from fourfold.context.work import unit

LENGTH = 32768
ONE, PACKED = 1.05, 1.10  # slowest rank over the mean


def lengths(length: int, *, mean: float, rng: random.Random) -> tuple[Interval, ...]:
    """Log-normal documents that fill a row."""
    cuts = [0]
    while cuts[-1] < length:
        cuts.append(min(length, cuts[-1] + max(8, int(rng.lognormvariate(math.log(mean) - 0.5, 1.0)))))
    return tuple(itertools.pairwise(cuts))


def unevenness(name: str, ranks: int, documents: tuple[Interval, ...], *, length: int = LENGTH) -> float:
    loads = work(BALANCES[name](length, ranks, documents), documents)
    return max(loads) * ranks / sum(loads)


@pytest.mark.parametrize("name", BALANCES)
def test_every_position_once_and_equally_many(name: str) -> None:
    rng = random.Random(1)
    for _ in range(400):
        ranks = rng.choice([1, 2, 3, 4, 8])
        length = unit(ranks) * rng.randint(1, 30)
        cuts = sorted(rng.sample(range(1, length), min(length - 1, rng.randint(0, 9))))
        documents = list(zip([0, *cuts], [*cuts, length], strict=True))
        documents = documents[:-1] if rng.random() < 0.4 else documents  # padding at the end
        held = BALANCES[name](length, ranks, documents)
        assert len(held) == ranks
        assert {sum(end - start for start, end in part) for part in held} == {length // ranks}
        assert sorted(at for part in held for start, end in part for at in range(start, end)) == list(range(length))
        assert all(start < end for part in held for start, end in part)


def test_work_counts_pairs() -> None:
    documents = ((0, 5), (5, 6), (6, 12))  # of a row of 14
    assert work((((0, 3), (6, 10)), ((3, 6), (10, 14))), documents) == [1 + 2 + 3 + 1 + 2 + 3 + 4, 4 + 5 + 1 + 5 + 6]


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 16])
def test_one_document(ranks: int) -> None:
    length = LENGTH // unit(ranks) * unit(ranks)
    row = ((0, length),)
    assert unevenness("contiguous", ranks, row, length=length) == pytest.approx(2 - 1 / ranks, rel=1e-3)
    assert choose(length, ranks, row, among=tuple(BALANCES)) == "zigzag"
    assert unevenness("zigzag", ranks, row, length=length) <= ONE


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("mean", [500, 1000, 4000, 16000])
def test_packed_rows(ranks: int, mean: int) -> None:
    rng = random.Random(ranks * mean)
    for _ in range(20):
        documents = lengths(LENGTH, mean=mean, rng=rng)
        chosen = choose(LENGTH, ranks, documents, among=tuple(BALANCES))
        assert unevenness(chosen, ranks, documents) <= PACKED, (chosen, documents)


def test_the_worst_row_for_a_plain_zigzag() -> None:
    """One document as long as a rank's share in the middle of the row, crumbs elsewhere."""
    share = LENGTH // 8
    middle = LENGTH // 2 - share // 2
    crumbs = [(at, at + 16) for at in range(0, LENGTH, 16) if not middle <= at < middle + share]
    documents = tuple(sorted([*crumbs, (middle, middle + share)]))
    assert unevenness("zigzag", 8, documents) > 3
    chosen = choose(LENGTH, 8, documents, among=tuple(BALANCES))
    assert unevenness(chosen, 8, documents) <= PACKED


def test_a_simpler_balance_is_kept_while_it_is_about_as_good() -> None:
    rng = random.Random(3)
    for _ in range(30):
        documents = lengths(LENGTH, mean=rng.choice([1000, 20000]), rng=rng)
        chosen = choose(LENGTH, 4, documents, among=tuple(BALANCES))
        loads = {name: max(work(kind(LENGTH, 4, documents), documents)) for name, kind in BALANCES.items()}
        assert loads[chosen] <= UNEVENNESS * min(loads.values())
        before = list(BALANCES)[: list(BALANCES).index(chosen)]
        assert all(loads[name] > UNEVENNESS * min(loads.values()) for name in before)


def test_short_documents_stay_whole_where_they_may() -> None:
    documents = tuple((at, at + 512) for at in range(0, LENGTH, 512))
    held = BALANCES["greedy"](LENGTH, 4, documents)
    whole = [
        sum(start < document[1] and document[0] < end for part in held for start, end in part) for document in documents
    ]
    assert set(whole) == {1}


def test_plain_ones_do_not_look_at_documents() -> None:
    assert contiguous(12, 3, ()) == (((0, 4),), ((4, 8),), ((8, 12),))
    assert zigzag(12, 3, ()) == (((0, 2), (10, 12)), ((2, 4), (8, 10)), ((4, 8),))
