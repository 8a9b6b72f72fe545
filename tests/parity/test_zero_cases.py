"""Public bug reports about data parallelism, as inputs with their right outcome."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fourfold.layout import Layout
from fourfold.schema import OptimConfig, Precision, TrainConfig
from tests.parity.strategies import STRATEGIES, settings
from tests.parity.zero_ranks import decay_only, of_each_batch, optimizer_dtypes, train, train_by_loader
from tests.pool import RankPool
from tests.reference import LENGTH, Reference, batches, tiny_model, worst

EVERY = pytest.mark.parametrize("strategy", list(STRATEGIES))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_model(tied=True).save_pretrained(path)
    return path


def sgd(strategy: str, **more: Any) -> TrainConfig:
    stage, _ = STRATEGIES[strategy]
    config = settings(stage=stage, optim=OptimConfig(name="sgd", learning_rate=1.0, weight_decay=0.0, max_grad_norm=0))
    for key, value in more.items():
        setattr(config, key, value)
    return config


def world_of(strategy: str) -> tuple[int, Layout]:
    world = 4 if strategy.startswith("hsdp") else 2
    return world, STRATEGIES[strategy][1](world)


def uneven(world: int) -> dict[str, tuple[dict[str, Tensor], int]]:
    """(batch, micro-batches a rank) by the report that it is of."""
    unequal, none = batches(0, rows=world), batches(0, rows=2 * world)
    unequal["labels"][1::2, :-3] = -100  # every other rank has 2 targets at most
    none["labels"][1::world] = -100  # rank 1 has none
    none["labels"][0] = -100  # nor has rank 0's first micro-batch
    return {"z01": (unequal, 1), "d02": (none, 2)}


@pytest.fixture(scope="module")
def of_uneven(ranks: RankPool, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """By strategy what each rank saw of each of those batches."""
    found = {}
    for strategy in STRATEGIES:
        world, layout = world_of(strategy)
        task = {"folder": folder, "config": sgd(strategy), "layout": layout, "batches": uneven(world)}
        found[strategy] = ranks.run(world, of_each_batch, **task)
    return found


def check_uneven(of_uneven: dict[str, list[dict[str, Any]]], strategy: str, report: str) -> None:
    batch, _ = uneven(world_of(strategy)[0])[report]
    loss, norm, gradients = Reference(tiny_model(tied=True)).step(batch)
    for results in of_uneven[strategy]:
        result = results[report]
        assert result["loss"] == pytest.approx(loss, rel=1e-6)
        assert result["norm"] == pytest.approx(norm, rel=1e-5)
        assert worst(result["gradients"], gradients)[0] < 1e-5


@EVERY
def test_z01_ranks_with_unequal_targets(of_uneven: dict[str, list[dict[str, Any]]], strategy: str) -> None:
    """transformers#34242: the mean over all targets, not the mean of the ranks' means."""
    check_uneven(of_uneven, strategy, "z01")


@EVERY
def test_z03_short_last_window_and_z08_every_weight_moves_by_its_gradient(
    ranks: RankPool, folder: Path, strategy: str
) -> None:
    """transformers#39659: 9 rows in updates of 8: the last one is the full gradient of its single row, not an eighth.
    pytorch#149205: every tensor moves by exactly lr x gradient."""
    world, layout = world_of(strategy)
    config = sgd(strategy, global_batch_size=8, micro_batch_size=1)
    rows = batches(3, rows=9)
    (result, *_) = ranks.run(world, train_by_loader, folder=folder, config=config, layout=layout, rows=rows, epochs=1)
    first, last = result["updates"]
    assert (first["tokens"], last["tokens"]) == (8 * LENGTH, LENGTH)
    assert last["padding"] == (world - 1) * LENGTH
    model = tiny_model(tied=True)
    reference = Reference(model, torch.optim.SGD(model.parameters(), lr=1.0))
    begin = reference.weights()
    short_row = last_row_of_epoch(len(rows["labels"]), seed=config.seed)
    others = [index for index in range(9) if index != short_row]
    reference.step({key: value[others] for key, value in rows.items()})
    loss, norm, gradients = reference.step({key: value[[short_row]] for key, value in rows.items()})
    assert last["loss"] == pytest.approx(loss, rel=1e-6)
    assert last["norm"] == pytest.approx(norm, rel=1e-5)
    assert worst(last["gradients"], gradients)[0] < 1e-5
    moved = {name: begin[name] - sum(update["gradients"][name] for update in result["updates"]) for name in begin}
    assert worst(result["weights"], moved)[0] < 1e-6
    assert all(not torch.equal(result["weights"][name], begin[name]) for name in begin)


def last_row_of_epoch(rows: int, *, seed: int) -> int:
    from fourfold.data.rows import epoch_order

    return int(epoch_order(rows, seed=seed, epoch=0)[-1])


@EVERY
def test_z04_masters_and_moments_are_fp32_under_bf16(ranks: RankPool, folder: Path, strategy: str) -> None:
    """AReaL#1292."""
    world, layout = world_of(strategy)
    config = settings(stage=STRATEGIES[strategy][0], optim=OptimConfig(), precision=Precision.bf16)
    for dtypes in ranks.run(
        world, optimizer_dtypes, folder=folder, config=config, layout=layout, batch=batches(0, rows=8)
    ):
        assert dtypes == {"weights": {"torch.bfloat16"}, "masters": {"torch.float32"}, "state": {"torch.float32"}}


@pytest.mark.parametrize("clip", [pytest.param(0.0, marks=pytest.mark.slow), 0.1])
def test_z07_one_norm_and_one_clipped_result_for_all(ranks: RankPool, folder: Path, clip: float) -> None:
    """torchtitan#2318: no factor of the number of ranks between strategies."""
    optim = OptimConfig(name="sgd", learning_rate=0.1, weight_decay=0.0, max_grad_norm=clip)
    steps = [batches(step, rows=8) for step in range(2)]  # the second is of what the first left
    results = {
        strategy: ranks.run(
            4,
            train,
            folder=folder,
            config=settings(stage=stage, optim=optim),
            layout=layout(4),
            steps=steps,
            accumulation=2,
        )[0]
        for strategy, (stage, layout) in STRATEGIES.items()
    }
    truth = results.pop("zero2")
    for strategy, result in results.items():
        assert result["norm"] == pytest.approx(truth["norm"], rel=1e-5), strategy
        assert worst(result["weights"], truth["weights"])[0] < 1e-6, strategy


@EVERY
def test_z10_matrices_decay_and_norms_do_not(ranks: RankPool, folder: Path, strategy: str) -> None:
    """verl#5070: with a gradient of zero, one AdamW step shrinks matrices by 1 - lr x wd and leaves the rest."""
    world, layout = world_of(strategy)
    optim = OptimConfig(learning_rate=0.1, weight_decay=0.5, adam_epsilon=1.0)
    config = settings(stage=STRATEGIES[strategy][0], optim=optim)
    for result in ranks.run(world, decay_only, folder=folder, config=config, layout=layout):
        for name, before in result["before"].items():
            factor = 1 - 0.1 * 0.5 if before.ndim > 1 else 1.0
            torch.testing.assert_close(result["after"][name], before * factor, rtol=1e-6, atol=0, msg=name)


@EVERY
def test_d02_ranks_and_micro_batches_without_a_target(
    of_uneven: dict[str, list[dict[str, Any]]], strategy: str
) -> None:
    """OLMo-core#657: finite, and they add nothing; the others weigh by their tokens."""
    check_uneven(of_uneven, strategy, "d02")


@pytest.mark.parametrize("world", [1, 2, 4])
def test_m01_tokens_count_once_and_padding_apart(ranks: RankPool, folder: Path, world: int) -> None:
    """trl#7100: 5 rows in updates of 4: 4 rows of tokens, then 1, whatever the number of ranks."""
    config = sgd("zero2", global_batch_size=4, micro_batch_size=1)
    layout = Layout(dp_shard_size=world)
    for result in ranks.run(
        world, train_by_loader, folder=folder, config=config, layout=layout, rows=batches(0, rows=5), epochs=2
    ):
        assert [update["tokens"] for update in result["updates"]] == [4 * LENGTH, LENGTH] * 2
        assert [update["padding"] for update in result["updates"]] == [0, (world - 1) * LENGTH] * 2
