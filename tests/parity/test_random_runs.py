"""Random runs that no rule refuses, one update on up to eight ranks each, against one process.

FOURFOLD_SEED=n looks at other ones: cases n, n+1, and so on. A failure prints the number of the case and what it is.
"""

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from torch import Tensor

from fourfold.layout import AXES, Layout, resolve
from fourfold.schema import Offload, Precision
from tests.fake_build import checked
from tests.families import STRETCHED, family_model, save_family
from tests.parity.zero_ranks import train
from tests.pool import RankPool
from tests.random_configs import Case, random_case, random_rows
from tests.reference import Reference

FIRST = int(os.environ.get("FOURFOLD_SEED", "0"))
FEW, MANY, AMONG = 12, 40, 1500  # runs, of so many cases
MOST_ROWS = 32


def layout_of(case: Case) -> Layout:
    return resolve(case.world_size, **{f"{axis}_size": getattr(case.config, f"{axis}_size") for axis in AXES})


def legal(case: Case, *, most_ranks: int) -> bool:
    config = case.config
    if case.world_size > most_ranks or config.global_batch_size > MOST_ROWS or config.precision is not Precision.fp32:
        return False
    problems, _ = checked(config, model_config=case.model_config, world_size=case.world_size)
    return not problems


def features(case: Case) -> set[tuple[str, ...]]:
    """What is used, and each two of it."""
    config, layout = case.config, layout_of(case)
    used = [f"{axis}" for axis in AXES if layout.size(axis) > 1]
    used += [f"zero{config.zero.stage}", case.family, config.activation.checkpointing.value]
    used += [config.pipeline.schedule] if layout.pp_size > 1 else []
    used += [config.attention.name] if layout.cp_size > 1 else []
    used += [f"sp {config.tensor.sequence_parallel}", f"re {config.tensor.regather}"] if layout.tp_size > 1 else []
    used += ["offload"] if config.zero.offload.optimizer is not Offload.none else []
    return {(one, other) for one in used for other in used if one <= other}


@cache
def chosen(count: int, *, most_ranks: int) -> list[int]:
    """So many cases, each the one that brings the most of what those before it do not have."""
    cases = [random_case(seed) for seed in range(FIRST, FIRST + AMONG)]
    left = {case.seed: features(case) for case in cases if legal(case, most_ranks=most_ranks)}
    seen: set[tuple[str, ...]] = set()
    found = []
    for _ in range(count):
        best = max(left, key=lambda seed: (len(left[seed] - seen), -seed))
        found.append(best)
        seen |= left.pop(best)
    return found


def rows_of(case: Case) -> dict[str, Tensor]:
    return random_rows(
        case.seed,
        rows=case.config.global_batch_size,
        length=case.config.seq_len,
        vocabulary=case.changes["vocab_size"],
        whole=case.family in STRETCHED,  # their angles depend on the longest document of a micro-batch
    )


def compared(ranks: RankPool, folder: Path, case: Case) -> Iterator[tuple[str, float, float]]:
    """(what, how far from one process, how far it may be)"""
    rows = rows_of(case)
    layout = layout_of(case)
    results = ranks.run(
        layout.world_size,
        train,
        folder=save_family(case.family, folder, **case.changes),
        config=case.config,
        layout=layout,
        steps=[rows],
        accumulation=case.config.global_batch_size // (case.config.micro_batch_size * layout.data_size),
    )
    loss, norm, gradients = Reference(family_model(case.family, **case.changes)).step(rows)
    for rank, result in enumerate(results):
        yield f"loss of rank {rank}", abs(result["loss"][0] / loss - 1), 1e-6
        yield f"norm of rank {rank}", abs(result["norm"][0] / norm - 1), 1e-5
        for found in result["gradients"]:
            assert found.keys() == gradients.keys()
            for name, far in distances(found, gradients).items():
                allowed = 1e-5 if far <= 1e-5 else 1e-5 + 2 * rounding(case.seed)[name]
                yield f"gradient of {name} on rank {rank}", far, allowed


def distances(found: dict[str, Tensor], truth: dict[str, Tensor]) -> dict[str, float]:
    return {name: float((found[name] - of).norm() / (of.norm() + 1e-12)) for name, of in truth.items()}


@cache
def rounding(case_seed: int) -> dict[str, float]:
    """How far one process in float32 is from float64 itself: a gradient of terms that cancel has fewer digits."""
    case = random_case(case_seed)
    single, double = (
        Reference(model).step(rows_of(case))[2]
        for model in (family_model(case.family, **case.changes), family_model(case.family, **case.changes).double())
    )
    return distances(single, double)


def check(ranks: RankPool, folder: Path, seed: int) -> None:
    case = random_case(seed)
    far = [(what, distance) for what, distance, limit in compared(ranks, folder, case) if not distance <= limit]
    assert not far, f"{case}\n{far}"


@pytest.mark.parametrize("number", range(FEW))
def test_a_random_run_equals_one_process(ranks: RankPool, tmp_path: Path, number: int) -> None:
    check(ranks, tmp_path, chosen(FEW, most_ranks=4)[number])


@pytest.mark.slow
@pytest.mark.parametrize("number", range(MANY))
def test_more_random_runs_on_eight_ranks_equal_one_process(ranks: RankPool, tmp_path: Path, number: int) -> None:
    check(ranks, tmp_path, chosen(MANY, most_ranks=8)[number])
