"""Streams are taken up where they were left, without tokenising what is passed over."""

import itertools
import json
from collections.abc import Iterator

import numpy as np
import pytest

from fourfold.data.document import Encoded
from fourfold.data.loader import Loader, Update
from fourfold.data.pack import PackSettings
from fourfold.data.pieces import IGNORE
from fourfold.data.stream import StreamRowSet
from fourfold.schema import LongDocuments, Packing

SEQ_LEN = 16
STEPS = 30


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fourfold.data.fill.WINDOW_TOKENS", 100)
    monkeypatch.setattr("fourfold.data.fill.WINDOW_ROWS", 2)


class Source:
    """Documents of 0 to 50 tokens, all tokens different; notes which were asked for."""

    def __init__(self, seed: int, *, count: int = 60) -> None:
        self.lengths = np.random.default_rng(seed).integers(0, 50, size=count).tolist()
        self.first = 1 + 1_000_000 * seed
        self.tokenised: list[int] = []

    def __call__(self, skipped: int) -> Iterator[Encoded]:
        starts = np.cumsum([0, *self.lengths]).tolist()
        for number in range(skipped, len(self.lengths)):
            self.tokenised.append(number)
            ids = list(range(self.first + starts[number], self.first + starts[number] + self.lengths[number]))
            yield Encoded(ids, [token % 7 > 0 for token in ids])


def loader(sources: list[Source], *, packing: Packing, policy: LongDocuments) -> Loader:
    settings = PackSettings(seq_len=SEQ_LEN, packing=packing, long_documents=policy)
    weights = [1.0, 2.5, 1.0][: len(sources)]
    rows = StreamRowSet(sources, settings=settings, weights=weights)
    return Loader(rows, seed=0, global_batch_size=4, micro_batch_size=4, data_rank=0, data_size=1, pad_id=0)


def content(updates: list[Update]) -> list[object]:
    return [
        (
            one.rows,
            one.rows_after,
            one.epoch,
            [{k: v.tolist() for k, v in batch.items()} for batch in one.micro_batches],
        )
        for one in updates
    ]


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("policy", ["split", "truncate", "drop"])
@pytest.mark.parametrize("packing", Packing)
def test_a_shortcut_leads_to_the_same_rows(packing: Packing, policy: str, count: int) -> None:
    """Over the end of a pass too; after a round trip through a checkpoint."""

    def fresh() -> Loader:
        sources = [Source(seed, count=20 if count == 3 else 60) for seed in range(count)]
        return loader(sources, packing=packing, policy=LongDocuments(policy))

    through = list(fresh().updates(num_epochs=None, max_steps=STEPS))
    assert len(through) == STEPS
    one_pass = count > 1 or (packing, policy) == (Packing.none, "split")
    assert {update.epoch for update in through} >= ({0} if one_pass else {0, 1})
    for done, update in enumerate(through[:-1], start=1):
        shortcut = json.loads(json.dumps(update.shortcut))
        rest = list(fresh().updates(update.rows_after, num_epochs=None, max_steps=STEPS, shortcut=shortcut))
        assert content(rest) == content(through[done:])
        assert [one.shortcut for one in rest][-1] == through[-1].shortcut


@pytest.mark.parametrize("packing", Packing)
def test_a_shortcut_to_an_earlier_row_is_as_good(packing: Packing) -> None:
    through = list(
        loader([Source(0)], packing=packing, policy=LongDocuments.split).updates(num_epochs=None, max_steps=STEPS)
    )
    for early, late in ((2, 9), (0, 29), (9, 9)):
        again = loader([Source(0)], packing=packing, policy=LongDocuments.split)
        rest = again.updates(
            through[late].rows_after, num_epochs=None, max_steps=STEPS, shortcut=through[early].shortcut
        )
        assert content(list(rest)) == content(through[late + 1 :])


@pytest.mark.parametrize("packing", Packing)
def test_what_is_passed_over_is_not_tokenised(packing: Packing) -> None:
    source = Source(0)
    through = loader([source], packing=packing, policy=LongDocuments.split).updates(num_epochs=None, max_steps=10)
    update = list(itertools.islice(through, 8))[-1]
    assert update.shortcut is not None
    source.tokenised.clear()
    rest = loader([source], packing=packing, policy=LongDocuments.split)
    next(rest.updates(update.rows_after, num_epochs=None, max_steps=10, shortcut=update.shortcut))
    assert source.tokenised[0] == update.shortcut["mark"]["documents"][0] > 0
    window = source.tokenised[: source.tokenised.index(0)] if 0 in source.tokenised else source.tokenised
    assert sum(source.lengths[number] for number in window) < 300


def test_sources_come_in_turn_by_their_weight() -> None:
    """And each is gone through to its end before it begins again, whatever the others do."""
    sources = [Source(0, count=30), Source(1, count=200)]
    rows = StreamRowSet(sources, settings=PackSettings(seq_len=SEQ_LEN), weights=[1.0, 3.0])
    *_, (_, mark) = itertools.islice(rows.read(), 900)
    assert mark.served[1] / mark.served[0] == pytest.approx(3, rel=0.05)
    for source in sources:
        asked = source.tokenised
        assert set(asked) == set(range(len(source.lengths)))
        assert all(after == (before + 1) % len(source.lengths) for before, after in itertools.pairwise(asked))


@pytest.mark.parametrize("packing", Packing)
def test_every_target_of_a_mixture_once(packing: Packing) -> None:
    """Up to a mark, which says how far each source has been read."""
    sources = [Source(0, count=40), Source(1, count=40)]
    settings = PackSettings(seq_len=SEQ_LEN, packing=packing)
    read = list(itertools.islice(StreamRowSet(sources, settings=settings, weights=[1.0, 1.0]).read(), 70))
    last = max(number for number, (_, mark) in enumerate(read) if mark.tokens == mark.rows == 0)
    labels = np.concatenate([row["labels"] for row, _ in read[: last + 1]])
    expected = []
    for source, count in zip(sources, read[last][1].documents, strict=True):
        assert 0 < count < 40
        for document in itertools.islice(source(0), count):
            expected += [t for t, wanted in zip(document.input_ids[1:], document.is_target[1:], strict=True) if wanted]
    assert sorted(labels[labels != IGNORE].tolist()) == sorted(expected)
