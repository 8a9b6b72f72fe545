"""Every context-parallel strategy against dense attention in float64: output and gradients of q, k and v to 1e-12."""

import dataclasses
import itertools

import pytest
import torch

from tests.parity.context_ranks import STRATEGIES, Case, counted, errors
from tests.pool import RankPool

HEADS = [(8, 8), (8, 2), (8, 1), (6, 3), (9, 3)]
SPREAD = [name for name in STRATEGIES if name != "local"]
DOCUMENTS = {  # of two rows of 48 tokens
    "one": ((48,), (48,)),
    "packed": ((7, 13, 1, 20, 7), (30, 18)),
    "short": ((1, 2, 1, 3, 40, 1), (1,) * 48),
    "padded": ((17, 12), (5,)),
}
LENGTH = 48


def cases(strategy: str, *, head_counts: list[tuple[int, int]], **more: object) -> list[Case]:
    return [
        Case(strategy, documents, LENGTH, heads=heads, kv_heads=kv_heads, window=window, **more)  # type: ignore[arg-type]
        for (heads, kv_heads), documents, window in itertools.product(head_counts, DOCUMENTS.values(), (None, 5))
    ]


def check(ranks: RankPool, world: int, wanted: list[Case], *, within: float = 1e-12) -> None:
    for found in ranks.run(world, errors, cases=wanted):
        for case, error in zip(wanted, found, strict=True):
            assert error < within, (case, error)


@pytest.mark.parametrize("strategy", SPREAD)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_exact(ranks: RankPool, strategy: str, world: int) -> None:
    check(ranks, world, cases(strategy, head_counts=HEADS))


@pytest.mark.parametrize("balance", ["zigzag", "greedy", "per_document", "contiguous"])
def test_exact_whoever_holds_what(ranks: RankPool, balance: str) -> None:
    spread = [name for name in SPREAD if name != "ulysses"]
    check(ranks, 4, [one for name in spread for one in cases(name, head_counts=[(6, 3)], balance=balance)])


def test_local_is_exact(ranks: RankPool) -> None:
    check(ranks, 1, cases("local", head_counts=HEADS))


def test_hybrid_of_any_sizes(ranks: RankPool) -> None:
    options = [{"ulysses_size": size, "outer": outer} for size in ("1", "2", "4") for outer in ("ring", "allgather")]
    check(
        ranks, 4, [one for option in options for one in cases("hybrid", head_counts=[(8, 2), (9, 3)], options=option)]
    )


@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_the_plain_kernel_and_a_soft_cap(ranks: RankPool, strategy: str) -> None:
    world = 1 if strategy == "local" else 2
    capped = cases(strategy, head_counts=[(6, 3)], kernel="plain", softcap=1.5)
    check(ranks, world, capped + cases(strategy, head_counts=[(6, 3)], kernel="plain"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_selective_checkpointing_keeps_what_the_kernel_returned(ranks: RankPool, dtype: torch.dtype) -> None:
    """One document: a ring's first block is one rectangle, whose output later blocks are added to."""
    wanted = [
        Case(name, documents, LENGTH, selective=True, dtype=dtype)
        for name in SPREAD
        for documents in (DOCUMENTS["one"], DOCUMENTS["packed"])
    ]
    check(ranks, 2, wanted, within=1e-5 if dtype is torch.float32 else 0.2)


def test_long_windowed_rows_go_tile_by_tile(ranks: RankPool) -> None:
    documents = ((1200, 30, 370), (1600,))
    wanted = [Case(name, documents, 1600, heads=2, kv_heads=1, head_dim=4, window=100) for name in SPREAD]
    check(ranks, 2, wanted)
    check(ranks, 1, [Case("local", documents, 1600, heads=2, kv_heads=1, head_dim=4, window=100)])


def test_bf16_is_no_worse_than_one_process(ranks: RankPool) -> None:
    """Partial results are merged in fp32: a ring of four loses no more than 1.5 times what the kernel itself loses."""
    one = Case("local", ((512,),), 512, heads=4, kv_heads=2, head_dim=32, dtype=torch.bfloat16)
    ((alone,),) = ranks.run(1, errors, cases=[one])
    spread = [dataclasses.replace(one, strategy=name) for name in SPREAD]
    for found in ranks.run(4, errors, cases=spread):
        for case, error in zip(spread, found, strict=True):
            assert error < 1.5 * alone, (case.strategy, error, alone)


@pytest.mark.parametrize("world", [2, 4])
def test_bytes_are_those_of_the_formula(ranks: RankPool, world: int) -> None:
    wanted = [one for name in SPREAD for one in cases(name, head_counts=HEADS, dtype=torch.float32)]
    for found in ranks.run(world, counted, cases=wanted):
        for case, (sent, formula) in zip(wanted, found, strict=True):
            assert {key: count for key, count in sent.items() if count} == {
                key: count for key, count in formula.items() if count
            }, case
