"""Which rows an update takes and which a rank gets: the same targets once, on any number of ranks."""

import itertools
from collections.abc import Iterable, Iterator

import numpy as np
import pytest
import torch

from fourfold.data.document import Encoded
from fourfold.data.loader import Loader, Update, eval_batches, total_updates, updates_per_epoch
from fourfold.data.pack import PackSettings, Row, pack
from fourfold.data.pieces import IGNORE
from fourfold.data.rows import epoch_order
from fourfold.data.stream import StreamRowSet
from fourfold.schema import Packing

SEQ_LEN = 4
PAD = 0
SETTINGS = PackSettings(seq_len=SEQ_LEN, packing=Packing.concat, pad_id=PAD)


def documents(rows: int) -> list[Encoded]:
    """One document a row; the first token of row i is 10 i + 10."""
    return [Encoded(list(range(10 * i + 10, 10 * i + 10 + SEQ_LEN)), [True] * SEQ_LEN) for i in range(rows)]


class ListRows:
    def __init__(self, count: int) -> None:
        self.seq_len = SEQ_LEN
        self._rows = list(pack(documents(count), settings=SETTINGS))

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, i: int) -> Row:
        return self._rows[i]


def loader(rows: ListRows | StreamRowSet, *, size: int = 8, micro: int = 1, rank: int = 0, ranks: int = 1) -> Loader:
    return Loader(
        rows, seed=5, global_batch_size=size, micro_batch_size=micro, data_rank=rank, data_size=ranks, pad_id=PAD
    )


def numbers(update: Update) -> list[int]:
    """The rows of one rank's update, padding rows left out."""
    first = torch.cat([batch["input_ids"][:, 0] for batch in update.micro_batches])
    return [int(token) // 10 - 1 for token in first if token != PAD]


def flat(parts: Iterable[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(parts))


def whole(rows: ListRows, *, ranks: int = 1, start: int = 0, epochs: float = 1, **sizes: int) -> list[list[int]]:
    """Rows of each update over all ranks, in the order of the permutation; checks what must agree between ranks."""
    every = [
        list(loader(rows, rank=rank, ranks=ranks, **sizes).updates(start, num_epochs=epochs, max_steps=None))
        for rank in range(ranks)
    ]
    found = []
    for updates in zip(*every, strict=True):
        assert len({(one.rows, one.rows_after, one.epoch, len(one.micro_batches)) for one in updates}) == 1
        dealt = itertools.zip_longest(*map(numbers, updates))
        found.append([number for turn in dealt for number in turn if number is not None])
        assert len(found[-1]) == updates[0].rows
    return found


@pytest.mark.parametrize(("ranks", "micro"), [(1, 1), (1, 8), (2, 1), (2, 4), (4, 1), (4, 2), (8, 1)])
def test_same_rows_on_any_ranks(ranks: int, micro: int) -> None:
    rows = ListRows(21)
    updates = whole(rows, ranks=ranks, micro=micro, epochs=2)
    assert updates == whole(rows, epochs=2)
    assert [len(update) for update in updates] == [8, 8, 5] * 2
    for epoch in (0, 1):
        assert flat(updates[3 * epoch : 3 * epoch + 3]) == epoch_order(21, seed=5, epoch=epoch).tolist()


@pytest.mark.parametrize(("ranks", "micro"), [(1, 1), (2, 4), (4, 2), (8, 1)])
def test_every_target_once_an_epoch(ranks: int, micro: int) -> None:
    rows = ListRows(13)
    labels = []
    for rank in range(ranks):
        for update in loader(rows, micro=micro, rank=rank, ranks=ranks).updates(num_epochs=1, max_steps=None):
            for batch in update.micro_batches:
                assert {tuple(column.shape) for column in batch.values()} == {(micro, SEQ_LEN)}
                assert {column.dtype for column in batch.values()} == {torch.int64}
                labels += batch["labels"][batch["labels"] != IGNORE].tolist()
    expected = [token for document in documents(13) for token in document.input_ids[1:]]
    assert sorted(labels) == expected


@pytest.mark.parametrize(
    ("rows", "ranks", "micro", "expected"), [(5, 2, 2, 2), (1, 4, 1, 1), (4, 4, 1, 1), (5, 4, 1, 2), (8, 2, 4, 1)]
)
def test_short_window_has_as_many_micro_batches_on_every_rank(rows: int, ranks: int, micro: int, expected: int) -> None:
    found = ListRows(rows)
    for rank in range(ranks):
        [update] = loader(found, micro=micro, rank=rank, ranks=ranks).updates(num_epochs=1, max_steps=None)
        assert len(update.micro_batches) == expected
        padding = [batch["labels"][batch["document_ids"][:, 0] == -1] for batch in update.micro_batches]
        assert all((labels == IGNORE).all() for labels in padding)
        assert sum(map(len, padding)) == expected * micro - len(range(rank, rows, ranks))


def test_epochs_are_different_permutations() -> None:
    orders = [epoch_order(50, seed=0, epoch=epoch).tolist() for epoch in range(3)] + [
        epoch_order(50, seed=1, epoch=0).tolist()
    ]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len(set(map(tuple, orders))) == 4


@pytest.mark.parametrize("start", range(43))
@pytest.mark.parametrize("size", [4, 8])
def test_resume_from_any_row(start: int, size: int) -> None:
    rows = ListRows(21)
    order = [*epoch_order(21, seed=5, epoch=0).tolist(), *epoch_order(21, seed=5, epoch=1).tolist()]
    assert flat(whole(rows, ranks=2, start=start, epochs=2, size=size)) == order[start:]


def test_resume_at_an_update_goes_on_alike() -> None:
    rows = ListRows(21)
    through = list(loader(rows).updates(num_epochs=3, max_steps=8))
    assert [update.rows_after for update in through] == [8, 16, 21, 29, 37, 42, 50, 58]
    assert [update.epoch for update in through] == [0, 0, 0, 1, 1, 1, 2, 2]
    for done, update in enumerate(through[:-1], start=1):
        rest = list(loader(rows).updates(update.rows_after, num_epochs=3, max_steps=8))
        assert [(one.rows_after, one.epoch, numbers(one)) for one in rest] == [
            (one.rows_after, one.epoch, numbers(one)) for one in through[done:]
        ]


def test_resume_with_another_batch_size_loses_no_row() -> None:
    rows = ListRows(21)
    first = list(loader(rows, size=8).updates(num_epochs=1, max_steps=1))
    rest = list(loader(rows, size=6, micro=3).updates(first[-1].rows_after, num_epochs=1, max_steps=None))
    assert [update.rows for update in rest] == [6, 6, 1]
    assert sorted(flat(map(numbers, first + rest))) == list(range(21))


@pytest.mark.parametrize(
    ("epochs", "steps", "expected"), [(None, 5, 5), (2, None, 6), (2, 5, 5), (1, 5, 3), (1.5, None, 5), (0.1, None, 1)]
)
def test_length_of_a_run(epochs: float | None, steps: int | None, expected: int) -> None:
    assert total_updates(21, global_batch_size=8, num_epochs=epochs, max_steps=steps) == expected
    assert len(list(loader(ListRows(21)).updates(num_epochs=epochs, max_steps=steps))) == expected


def test_decimal_epochs_are_exact() -> None:
    assert updates_per_epoch(30, 1) == 30
    assert total_updates(30, global_batch_size=1, num_epochs=0.1, max_steps=None) == 3


def test_a_run_without_length_is_refused() -> None:
    with pytest.raises(ValueError, match="max_steps=<updates> or num_epochs"):
        loader(ListRows(3)).updates(num_epochs=None, max_steps=None)


@pytest.mark.parametrize(("epochs", "steps"), [(1, None), (None, None), (1, 10)])
def test_a_stream_needs_max_steps_alone(epochs: float | None, steps: int | None) -> None:
    with pytest.raises(ValueError, match=rf"streaming=true.*max_steps={steps} num_epochs={epochs}"):
        loader(stream(5)).updates(num_epochs=epochs, max_steps=steps)


def stream(rows: int) -> StreamRowSet:
    return StreamRowSet([lambda skipped: iter(documents(rows)[skipped:])], settings=SETTINGS)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_stream_in_order_over_epochs(ranks: int) -> None:
    for rank in range(ranks):
        updates = list(loader(stream(11), size=4, rank=rank, ranks=ranks).updates(num_epochs=None, max_steps=7))
        windows = [range(4), range(4, 8), range(8, 11)] * 2 + [range(4)]
        assert [numbers(update) for update in updates] == [list(window[rank::ranks]) for window in windows]
        assert [update.rows_after for update in updates] == [4, 8, 11, 15, 19, 22, 26]
        assert [update.epoch for update in updates] == [0, 0, 0, 1, 1, 1, 2]


@pytest.mark.parametrize("done", range(1, 7))
def test_stream_resumes_at_an_update(done: int) -> None:
    through = list(loader(stream(11), size=4).updates(num_epochs=None, max_steps=7))
    start = through[done - 1].rows_after
    rest = list(loader(stream(11), size=4).updates(start, num_epochs=None, max_steps=7))
    assert [(one.rows_after, one.epoch, numbers(one)) for one in rest] == [
        (one.rows_after, one.epoch, numbers(one)) for one in through[done:]
    ]


def test_stream_is_read_no_further_than_needed() -> None:
    taken = []

    def endless(skipped: int) -> Iterator[Encoded]:
        for number in itertools.count(skipped):
            taken.append(number)
            yield documents(1)[0]

    rows = StreamRowSet([endless], settings=SETTINGS)
    assert len(list(loader(rows, size=4).updates(num_epochs=None, max_steps=3))) == 3
    assert len(taken) == 12


def test_stream_without_rows_ends() -> None:
    with pytest.raises(ValueError, match="0 documents read"):
        next(loader(stream(0)).updates(num_epochs=None, max_steps=1))


@pytest.mark.parametrize(("rows", "ranks", "micro"), [(7, 1, 1), (7, 2, 2), (3, 4, 2), (8, 4, 1)])
def test_evaluation_takes_every_row_once(rows: int, ranks: int, micro: int) -> None:
    seen, counts = [], set()
    for rank in range(ranks):
        batches = list(
            eval_batches(ListRows(rows), micro_batch_size=micro, data_rank=rank, data_size=ranks, pad_id=PAD)
        )
        counts.add(len(batches))
        tokens = np.concatenate([batch["labels"].numpy().ravel() for batch in batches])
        seen += tokens[tokens != IGNORE].tolist()
    assert counts == {-(-rows // (ranks * micro))}
    assert sorted(seen) == [token for document in documents(rows) for token in document.input_ids[1:]]
