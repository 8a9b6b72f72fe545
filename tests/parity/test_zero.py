"""Plain data parallelism, ZeRO 1-3 and HSDP against one process: loss, every gradient, norm, weights after steps."""

from pathlib import Path
from typing import Any

import pytest
import torch

from fourfold.layout import Layout
from fourfold.schema import Offload, OffloadConfig, OptimConfig, Precision
from tests.parity.strategies import STRATEGIES, settings
from tests.parity.zero_ranks import bf16_gradients, train
from tests.pool import RankPool
from tests.reference import Reference, batches, tiny_model, worst

STEPS, ROWS = 3, 12


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    made = {}
    for tied in (False, True):
        made[tied] = tmp_path_factory.mktemp(f"tied-{tied}")
        tiny_model(tied=tied).save_pretrained(made[tied])
    return made


def truth(*, tied: bool, optim: OptimConfig) -> tuple[list[float], list[float], list[dict[str, Any]], dict[str, Any]]:
    model = tiny_model(tied=tied)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": optim.weight_decay}, {"params": others, "weight_decay": 0.0}]
    if optim.name == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(groups, lr=optim.learning_rate)
    else:
        optimizer = torch.optim.AdamW(
            groups, lr=optim.learning_rate, betas=(optim.adam_beta1, optim.adam_beta2), eps=optim.adam_epsilon
        )
    reference = Reference(model, optimizer, optim.max_grad_norm)
    losses, norms, gradients = zip(*(reference.step(batches(step, rows=ROWS)) for step in range(STEPS)), strict=True)
    return list(losses), list(norms), list(gradients), reference.weights()


def check(results: list[dict[str, Any]], expected: Any, *, tight: float) -> None:
    losses, norms, gradients, weights = expected
    for result in results:
        assert result["loss"] == pytest.approx(losses, rel=tight)
        assert result["norm"] == pytest.approx(norms, rel=10 * tight)
        if result["gradients"]:
            for got, want in zip(result["gradients"], gradients, strict=True):
                distance, name = worst(got, want)
                assert distance < 10 * tight, name
        distance, name = worst(result["weights"], weights)
        assert distance < 10 * tight, name


# On 4 ranks one micro-batch an update, as AdamW below has three; on 1 and 2 ranks one or three in turn.
CASES = [
    (strategy, world, 1 if world == 4 or (world + number) % 2 else 3)
    for number, strategy in enumerate(STRATEGIES)
    for world in ((4,) if strategy.startswith("hsdp") else (1, 2, 4))
]


@pytest.mark.parametrize(
    ("strategy", "world", "accumulation"),
    [pytest.param(*case, marks=[pytest.mark.slow] * (case[1] == 1)) for case in CASES],
)
def test_sgd_equals_one_process(
    ranks: RankPool, folders: dict[bool, Path], strategy: str, world: int, accumulation: int
) -> None:
    stage, layout = STRATEGIES[strategy]
    tied = (world + accumulation) % 2 == 0
    optim = OptimConfig(name="sgd", learning_rate=0.5, weight_decay=0.1, max_grad_norm=0.3)
    results = ranks.run(
        world,
        train,
        folder=folders[tied],
        config=settings(stage=stage, optim=optim),
        layout=layout(world),
        steps=[batches(step, rows=ROWS) for step in range(STEPS)],
        accumulation=accumulation,
    )
    check(results, truth(tied=tied, optim=optim), tight=1e-6)
    assert all(result["share"] == pytest.approx(1 / layout(world).partition_size, rel=0.05) for result in results)


@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_adamw_equals_one_process(ranks: RankPool, folders: dict[bool, Path], strategy: str) -> None:
    stage, layout = STRATEGIES[strategy]
    # epsilon far above the rounding of a gradient: AdamW divides by it, and amplifies noise of entries near zero
    optim = OptimConfig(learning_rate=1e-2, weight_decay=0.5, max_grad_norm=0.3, adam_epsilon=1e-3)
    results = ranks.run(
        4,
        train,
        folder=folders[True],
        config=settings(stage=stage, optim=optim),
        layout=layout(4),
        steps=[batches(step, rows=ROWS) for step in range(STEPS)],
        accumulation=3,
    )
    check(results, truth(tied=True, optim=optim), tight=1e-6)


@pytest.fixture(scope="module")
def in_bf16(ranks: RankPool, folders: dict[bool, Path]) -> dict[str, torch.Tensor]:
    (gradients,) = ranks.run(1, bf16_gradients, folder=folders[False], batch=batches(0, rows=16))
    return dict(gradients)


@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_bf16_sums_and_reduces_in_fp32(
    ranks: RankPool, folders: dict[bool, Path], in_bf16: dict[str, torch.Tensor], strategy: str
) -> None:
    """Against one process that runs the same 16 micro-batches in bf16 and adds their gradients in fp32: what is left is
    the order of fp32 additions. (Sums in bf16 are wrong by about 5e-3.)"""
    stage, layout = STRATEGIES[strategy]
    result = ranks.run(
        4,
        train,
        folder=folders[False],
        config=settings(stage=stage, optim=OptimConfig(name="sgd"), precision=Precision.bf16),
        layout=layout(4),
        steps=[batches(0, rows=16)],
        accumulation=4,
    )[0]
    distance, name = worst(result["gradients"][0], in_bf16)
    assert distance < 1e-5, name


@pytest.mark.parametrize(
    ("stage", "offload", "accumulation"),
    [
        (2, OffloadConfig(optimizer=Offload.cpu), 1),
        (2, OffloadConfig(optimizer=Offload.cpu), 3),
        (3, OffloadConfig(optimizer=Offload.cpu), 3),
        (3, OffloadConfig(parameters=Offload.cpu), 3),
        (3, OffloadConfig(optimizer=Offload.cpu, parameters=Offload.cpu), 1),
        (3, OffloadConfig(optimizer=Offload.cpu, parameters=Offload.cpu), 3),
    ],
)
def test_offload_equals_one_process(
    ranks: RankPool, folders: dict[bool, Path], stage: int, offload: OffloadConfig, accumulation: int
) -> None:
    optim = OptimConfig(learning_rate=1e-2, weight_decay=0.5, max_grad_norm=0.3, adam_epsilon=1e-3)
    results = ranks.run(
        2,
        train,
        folder=folders[False],
        config=settings(stage=stage, optim=optim, offload=offload),
        layout=Layout(dp_shard_size=2),
        steps=[batches(step, rows=ROWS) for step in range(STEPS)],
        accumulation=accumulation,
    )
    check(results, truth(tied=False, optim=optim), tight=1e-6)
