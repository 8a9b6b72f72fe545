"""What each tp rank gets of a weight: pure numbers."""

from types import SimpleNamespace

import pytest
import torch

from fourfold.slices import Slice
from fourfold.tensor.cuts import Cut, Heads, even, legal_sizes, refused_sizes, rounded_up, side_by_side


def model(heads: int, kv_heads: int, intermediate: int, *, kind: str = "llama") -> SimpleNamespace:
    return SimpleNamespace(
        model_type=kind,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        hidden_size=heads * 4,
        intermediate_size=intermediate,
    )


def covered(cut: Cut, total: int) -> list[int]:
    """How many ranks hold each row."""
    held = [0] * total
    for ranges in cut:
        for first, last in ranges:
            for row in range(first, last):
                held[row] += 1
    return held


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"), [(8, 8, 4), (8, 4, 4), (8, 2, 4), (8, 1, 8), (6, 3, 3), (9, 3, 9)]
)
def test_queries_lie_with_the_keys_that_they_look_at(heads: int, kv_heads: int, size: int) -> None:
    one = Heads.of(model(heads, kv_heads, size), size=size)
    assert one.fits
    assert covered(one.queries(), heads * 4) == [1] * heads * 4
    assert covered(one.keys(), kv_heads * 4) == [one.copies] * kv_heads * 4
    for queries, keys in zip(one.queries(), one.keys(), strict=True):
        wanted = {row // 4 * kv_heads // heads for first, last in queries for row in range(first, last)}
        assert {row // 4 for first, last in keys for row in range(first, last)} == wanted


def test_packed_matrices_are_cut_each_by_itself() -> None:
    assert side_by_side((even(4, size=2), 4), (even(2, size=2), 2)) == (((0, 2), (4, 5)), ((2, 4), (5, 6)))


@pytest.mark.parametrize(("total", "size"), [(12, 4), (13, 4), (3, 4), (1, 3), (5, 4)])
def test_a_vocabulary_is_covered_once_whatever_its_size(total: int, size: int) -> None:
    cut = rounded_up(total, size=size)
    assert covered(cut, total) == [1] * total
    assert max(last - first for ((first, last),) in cut) == -(-total // size)


@pytest.mark.parametrize(
    ("rows", "columns", "padding"),
    [(((0, 2), (4, 5)), ((0, 3),), 0), (((0, 5),), ((1, 3),), 0), (((3, 5),), ((0, 3),), 2), (((5, 5),), ((0, 3),), 1)],
)
def test_what_is_cut_goes_back_to_its_place(
    rows: tuple[tuple[int, int], ...], columns: tuple[tuple[int, int], ...], padding: int
) -> None:
    whole = torch.arange(1.0, 16.0).view(5, 3)
    part = Slice(whole.shape, rows, columns, padding)
    held = part.cut(whole)
    assert held.shape == part.local_shape()
    assert not held[part.height :].any()
    back = torch.zeros_like(whole)
    part.place(held, into=back)
    again = torch.where(back != 0, whole, back)
    assert torch.equal(again, back)
    assert int((back != 0).sum()) == part.numel()


REFUSED = [
    (model(9, 3, 1536), 2, ["tp_size=2", "9 query heads", "use tp_size=1, 3."]),
    (model(8, 3, 24), 4, ["tp_size=4", "3 key/value heads", "use tp_size=1."]),
    (model(8, 8, 36), 8, ["tp_size=8", "36 channels", "use tp_size=1, 2, 4."]),
    (model(8, 2, 32, kind="phi3"), 4, ["tp_size=4", "2 key/value heads", "use tp_size=1, 2."]),
]


@pytest.mark.parametrize(("config", "size", "words"), REFUSED, ids=["heads", "kv heads", "mlp", "packed"])
def test_sizes_that_do_not_fit_are_refused_with_those_that_do(
    config: SimpleNamespace, size: int, words: list[str]
) -> None:
    (problem,) = refused_sizes(config, size=size)
    assert all(word in problem for word in words), problem


def test_every_legal_size_is_accepted() -> None:
    for config in (model(32, 8, 14336), model(9, 3, 1536), model(6, 2, 512)):
        for size in range(1, 65):
            assert (size in legal_sizes(config)) == (not list(refused_sizes(config, size=size))), (config, size)
