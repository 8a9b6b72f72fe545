"""Every two features that no rule refuses together, in one run, against one process: README's support matrix.

The runs and what they prove are those of tests/matrix.py. Two clipped updates of packed rows with uneven targets: losses,
norms, every gradient, and the weights at the end.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.families import family_model, save_family
from tests.matrix import (
    MODEL,
    ROWS,
    SGD,
    Run,
    layout_of,
    model_of,
    pairs,
    proven,
    refusals,
    runs,
    triples,
    world_size_of,
)
from tests.parity.context_model_ranks import packed
from tests.parity.matrix_ranks import all_trained
from tests.parity.test_tensor_zero import check
from tests.pool import RankPool
from tests.reference import Reference

STEPS = [packed(step, rows=ROWS) for step in range(2)]
TOGETHER = 8  # runs in the same processes: a start costs as much as a run
Histories = Callable[[Run, tuple[Run, ...]], list[dict[str, Any]]]


def name_of(run: Run) -> str:
    return ", ".join(sorted(run - {"packed"}))


@pytest.fixture(scope="module")
def histories(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Histories:
    """What each rank saw of a run; made together with others of `among` that have as many ranks."""
    folders = {tied: tmp_path_factory.mktemp("model") for tied in (False, True)}
    for tied, folder in folders.items():
        save_family("llama_tied" if tied else "llama", folder, **MODEL)
    made: dict[Run, list[dict[str, Any]]] = {}

    def of(run: Run, among: tuple[Run, ...]) -> list[dict[str, Any]]:
        if run not in made:
            world = world_size_of(run)
            alike = [one for one in among if world_size_of(one) == world]
            first = alike.index(run) // TOGETHER * TOGETHER
            together = alike[first : first + TOGETHER]
            found = ranks.run(world, all_trained, folders=folders, runs=together, steps=STEPS)
            made.update({one: [rank[number] for rank in found] for number, one in enumerate(together)})
        return made.pop(run)

    return of


@pytest.fixture(scope="module")
def truth() -> dict[str, Any]:
    """Of one process: its steps and the weights at the end, by family."""
    found = {}
    for family in ("llama", "llama_tied"):
        model = family_model(family, **MODEL)
        reference = Reference(model, torch.optim.SGD(model.parameters(), lr=SGD.learning_rate), SGD.max_grad_norm)
        steps = [reference.step(batch) for batch in STEPS]
        assert all(norm > SGD.max_grad_norm for _, norm, _ in steps)
        found[family] = (steps, reference.weights())
    return found


def compare(run: Run, results: list[dict[str, Any]], steps: Any, weights: Any) -> None:
    layout = layout_of(run)
    for result in results:
        if layout.tp_size == layout.pp_size == 1:
            assert result["share"] == pytest.approx(1 / layout.partition_size, rel=0.05)
        if not result["gradients"]:  # offloaded ones are out of reach
            result = {**result, "gradients": [gradients for _, _, gradients in steps]}
        check(result, steps, weights)


RARE = {
    "gpipe",
    "looped_bfs",
    "zero_bubble",
    "dualpipe_v",
}  # schedules, in a third of the runs; test_pipeline.py has them all
COMMON = tuple(run for run in runs() if not run & RARE)
OTHERS = tuple(run for run in runs() if run & RARE)


@pytest.mark.parametrize("run", COMMON, ids=name_of)
def test_two_features_equal_one_process(histories: Histories, truth: dict[str, Any], run: Run) -> None:
    compare(run, histories(run, COMMON), *truth[model_of(run)[0]])


@pytest.mark.slow
@pytest.mark.parametrize("run", OTHERS, ids=name_of)
def test_a_rarer_schedule_and_another_feature_equal_one_process(
    histories: Histories, truth: dict[str, Any], run: Run
) -> None:
    compare(run, histories(run, OTHERS), *truth[model_of(run)[0]])


@pytest.mark.slow
@pytest.mark.parametrize("run", list(triples()), ids=name_of)
def test_three_features_equal_one_process(histories: Histories, truth: dict[str, Any], run: Run) -> None:
    compare(run, histories(run, tuple(triples())), *truth[model_of(run)[0]])


@pytest.mark.parametrize(("one", "other"), pairs())
def test_two_features_are_proven_or_refused(one: str, other: str) -> None:
    refused = refusals(frozenset({one, other}))
    assert proven(one, other) != bool(refused), refused or "allowed, and no run has both"
