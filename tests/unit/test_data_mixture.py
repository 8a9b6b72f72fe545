"""Several sources as one: how much of each, in which order, on any ranks and from any position."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fourfold.data.loader import Loader, Update
from fourfold.data.mixture import MixtureRows, rows_per_epoch, source_config
from fourfold.data.prepared import Prepared
from fourfold.data.rows import RowSet
from fourfold.data.stream import StreamRowSet
from fourfold.schema import DataConfig, LongDocuments, MixtureSource, Packing, SourceKind
from tests.unit.data_making import all_rows, make, spoken, write_documents


def weighted(*weights: float) -> list[MixtureSource]:
    return [MixtureSource("x", weight=weight) for weight in weights]


@pytest.mark.parametrize(
    ("sizes", "weights", "expected"),
    [
        ([100, 100], [2, 1], [100, 50]),
        ([100, 10], [1, 1], [10, 10]),
        ([7, 100], [0.7, 0.3], [7, 3]),  # not [7, 2], as 0.7 x (7 / 0.7) in floats would have it
        ([30, 1], [0.1, 0.9], [1, 1]),  # at least one row of each
        ([5], [3], [5]),
    ],
)
def test_weights_are_shares_of_the_longest_epoch_without_repeats(
    sizes: list[int], weights: list[float], expected: list[int]
) -> None:
    assert rows_per_epoch(sizes, weighted(*weights)) == expected


def test_epochs_are_passes_over_a_source() -> None:
    sources = [MixtureSource("a", epochs=2.5), MixtureSource("b"), MixtureSource("c", epochs=0.1)]
    assert rows_per_epoch([10, 7, 30], sources) == [25, 7, 3]
    assert rows_per_epoch([10, 7], [MixtureSource("a"), MixtureSource("b")]) == [10, 7]


def test_keys_of_a_source_fall_back_to_those_of_the_data() -> None:
    data = DataConfig(path=None, kind=SourceKind.jsonl, text_column="body", eval_path="e", packing=Packing.none)
    data.sources = [MixtureSource("a"), MixtureSource("b", kind=SourceKind.parquet, text_column="t", weight=2.0)]
    first, second = (source_config(data, source) for source in data.sources)
    assert (first.path, first.kind, first.text_column) == ("a", SourceKind.jsonl, "body")
    assert (second.path, second.kind, second.text_column) == ("b", SourceKind.parquet, "t")
    assert first.sources is first.eval_path is None
    assert first.packing is second.packing is Packing.none


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("a.jsonl", SourceKind.jsonl),
        ("b.tsv", SourceKind.csv),
        ("c.parquet", SourceKind.parquet),
        ("d", SourceKind.text),
    ],
)
def test_a_table_is_known_by_its_name(path: str, kind: SourceKind) -> None:
    data = DataConfig(path=None, sources=[MixtureSource(path)])
    assert data.sources is not None
    assert source_config(data, data.sources[0]).kind is kind


def test_a_table_is_no_text(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text("text\nhello\n")
    with pytest.raises(
        ValueError, match=r"a\.csv is a table, and data\.kind=text would take it for one document: use data=csv"
    ):
        make(DataConfig(path=str(file)), tmp_path)


def mixture(folder: Path, *, streaming: bool = False, **settings: Any) -> DataConfig:
    """Documents 0..29 and 100..111, and more of the first, a document a row."""
    keys = settings.pop("keys", [{"weight": 2.0}, {"weight": 1.0}])
    paths = [write_documents(folder / "a.jsonl", 30).path, write_documents(folder / "b.jsonl", 12, first=100).path]
    return DataConfig(
        kind=SourceKind.jsonl,
        path=None,
        sources=[MixtureSource(str(path), **own) for path, own in zip(paths, keys, strict=True)],
        packing=Packing.none,
        streaming=streaming,
        **settings,
    )


def ids(update: Update) -> list[int]:
    first = torch.cat([batch["input_ids"][:, 0] for batch in update.micro_batches])
    return [int(token) - 2 for token in first if token != 0]


def loader(made: Prepared, *, rank: int = 0, ranks: int = 1, size: int = 4) -> Loader:
    return Loader(
        made.train, seed=3, global_batch_size=size, micro_batch_size=1, data_rank=rank, data_size=ranks, pad_id=0
    )


def run(
    made: Prepared, *, ranks: int = 1, start: int = 0, epochs: float = 2, steps: int | None = None
) -> list[list[int]]:
    """Documents of each rank."""
    return [
        [number for update in one for number in ids(update)]
        for one in (
            loader(made, rank=rank, ranks=ranks).updates(start, num_epochs=epochs, max_steps=steps)
            for rank in range(ranks)
        )
    ]


def single(folder: Path) -> DataConfig:
    data = write_documents(folder / "a.jsonl", 30)
    data.packing = Packing.none
    return data


def prepared(kind: str, folder: Path) -> Prepared:
    return make(mixture(folder) if kind == "mixture" else single(folder), folder)


def test_a_mixture_serves_its_sources_by_weight_and_in_full(tmp_path: Path) -> None:
    made = make(mixture(tmp_path), tmp_path)
    assert isinstance(made.train, MixtureRows)
    assert [(source.rows_per_epoch, source.stats.documents) for source in made.sources] == [(24, 30), (12, 12)]
    assert (len(made.train), made.stats.documents) == (36, 42)
    [documents] = run(made, epochs=5)
    for epoch in range(5):
        part = documents[36 * epoch : 36 * epoch + 36]
        assert sorted(number for number in part if number >= 100) == list(range(100, 112))
    first = [number for number in documents if number < 100]
    assert set(range(30)) - set(first[:24]) < set(first[24:48])  # the second epoch begins with what the first one left
    # four passes over its 30 rows in five epochs of 24
    assert {number: first.count(number) for number in set(first)} == dict.fromkeys(range(30), 4)


def test_an_epoch_goes_on_where_the_last_one_stopped(tmp_path: Path) -> None:
    made = make(mixture(tmp_path, keys=[{"epochs": 0.5}, {"epochs": 1.5}]), tmp_path)
    [documents] = run(made, epochs=2)
    assert sorted(number for number in documents if number < 100) == list(range(30))
    assert sorted(number for number in documents if number >= 100) == sorted(3 * list(range(100, 112)))


def test_each_source_keeps_its_own_cache(tmp_path: Path) -> None:
    data = mixture(tmp_path)
    make(data, tmp_path)
    assert data.sources is not None
    make(replace(data, path=data.sources[0].path, sources=None), tmp_path)
    kept = list((tmp_path / "cache" / "data").glob("*/"))
    assert len(kept) == 2
    data.sources[0].weight = 9.0
    made = make(data, tmp_path)
    assert [source.rows_per_epoch for source in made.sources] == [30, 3]
    assert list((tmp_path / "cache" / "data").glob("*/")) == kept


def test_evaluation_data_of_a_mixture(tmp_path: Path) -> None:
    evaluation = write_documents(tmp_path / "e.jsonl", 3, first=200).path
    for streaming in (False, True):
        made = make(mixture(tmp_path, eval_path=evaluation, streaming=streaming), tmp_path)
        assert spoken(made.eval) == {200, 201, 202}


def test_a_single_source_is_not_a_mixture(tmp_path: Path) -> None:
    made = make(single(tmp_path), tmp_path)
    assert isinstance(made.train, RowSet)
    assert [source.rows_per_epoch for source in made.sources] == [30]


# ------------------------------------------------------------------------------ order, ranks, position


@pytest.mark.parametrize("kind", ["single", "mixture"])
def test_d11_ranks_get_disjoint_rows_and_all_of_them(kind: str, tmp_path: Path) -> None:
    made = prepared(kind, tmp_path)
    assert not isinstance(made.train, StreamRowSet)
    size = len(made.train)
    [whole], ranks = run(made), run(made, ranks=2)
    epochs = [[documents[epoch * size // 2 : (epoch + 1) * size // 2] for documents in ranks] for epoch in (0, 1)]
    assert not set(epochs[0][0]) & set(epochs[0][1])
    for epoch, (first, second) in enumerate(epochs):
        assert sorted(first + second) == sorted(whole[epoch * size : (epoch + 1) * size])
        if kind == "single":
            assert sorted(first + second) == list(range(30))
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("kind", ["single", "mixture"])
def test_d11_other_random_draws_change_nothing(kind: str, tmp_path: Path) -> None:
    made = prepared(kind, tmp_path)
    before = run(made, ranks=2)
    random.seed(9), np.random.seed(9), torch.manual_seed(9)
    random.random(), np.random.random(3), torch.rand(3)
    assert run(made, ranks=2) == before
    assert run(prepared(kind, tmp_path), ranks=2) == before


@pytest.mark.parametrize("kind", ["single", "mixture"])
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 4)])
@pytest.mark.parametrize("steps", [1, 5, 8, 13])
def test_k16_another_number_of_ranks_loses_and_repeats_nothing(
    kind: str, before: int, after: int, steps: int, tmp_path: Path
) -> None:
    made = prepared(kind, tmp_path)
    whole = run(made, epochs=2)[0]
    done = run(made, ranks=before, steps=steps)
    position = list(loader(made).updates(num_epochs=2, max_steps=steps))[-1].rows_after
    rest = run(made, ranks=after, start=position)
    together = sorted(number for documents in [*done, *rest] for number in documents)
    assert together == sorted(whole)


# ------------------------------------------------------------------------------------------ digest


def digest(data: DataConfig, folder: Path, **options: Any) -> str:
    found = make(data, folder, **options).digest
    assert found is not None
    return found


def test_the_digest_is_that_of_the_content(tmp_path: Path) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    here, there = single(tmp_path / "here"), single(tmp_path / "there")
    assert digest(here, tmp_path / "one") == digest(there, tmp_path / "two") == digest(here, tmp_path / "one")
    there.packing = Packing.concat
    changed = write_documents(tmp_path / "there" / "c.jsonl", 30, first=1)
    changed.packing = Packing.none
    found = {digest(one, tmp_path) for one in (here, there, changed)} | {digest(here, tmp_path, seq_len=16)}
    assert len(found) == 4


def test_the_digest_does_not_depend_on_how_rows_are_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = digest(single(tmp_path), tmp_path / "one")
    monkeypatch.setattr("fourfold.data.rows.PART_TOKENS", 24)
    assert digest(single(tmp_path), tmp_path / "two") == before


def test_the_digest_of_a_mixture_knows_shares(tmp_path: Path) -> None:
    more = [{"weight": 1.0}, {"weight": 1.0}]
    found = [digest(mixture(tmp_path), tmp_path), digest(mixture(tmp_path, keys=more), tmp_path)]
    assert len(set(found)) == 2
    assert digest(mixture(tmp_path), tmp_path) == found[0]
    assert make(mixture(tmp_path, streaming=True), tmp_path).digest is None


# ----------------------------------------------------------------------------------------- streams


def test_a_stream_serves_tokens_by_weight(tmp_path: Path) -> None:
    made = make(mixture(tmp_path, streaming=True), tmp_path)
    tokens = {True: 0, False: 0}
    for row in all_rows(made.train, first=60):
        tokens[row["input_ids"][0] - 2 >= 100] += sum(document >= 0 for document in row["document_ids"])
        assert abs(tokens[False] / 2 - tokens[True]) <= 5  # a document
    assert tokens[True] > 30


def test_long_documents_of_a_stream_keep_their_policy(tmp_path: Path) -> None:
    data = mixture(tmp_path, streaming=True, long_documents=LongDocuments.drop)
    made = make(data, tmp_path, seq_len=4)
    assert all(len(set(row["input_ids"])) > 1 for row in all_rows(made.train, first=60))
