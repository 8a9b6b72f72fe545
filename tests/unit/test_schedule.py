"""Learning rates by update, against the schedules' own formulas."""

import math

import pytest

from fourfold.schema import OptimConfig
from fourfold.zero.schedule import learning_rates


def curve(steps: int, **optim: object) -> list[float]:
    rate = learning_rates(OptimConfig(learning_rate=2.0, **optim), total_steps=steps)  # type: ignore[arg-type]
    return [rate(step) for step in range(1, steps + 1)]


def test_linear_ends_at_zero() -> None:
    assert curve(8, lr_scheduler_type="linear") == pytest.approx([2 * (8 - step) / 8 for step in range(1, 9)])


def test_constant_warms_up() -> None:
    assert curve(5, lr_scheduler_type="constant", warmup_steps=2) == pytest.approx([1.0, 2.0, 2.0, 2.0, 2.0])


def test_cosine_with_a_floor() -> None:
    wave = [0.5 * (1 + math.cos(math.pi * (step - 2) / 6)) for step in range(3, 9)]
    assert curve(8, warmup_steps=2) == pytest.approx([1.0, 2.0, *(2 * value for value in wave)])
    floored = curve(8, warmup_steps=2, min_lr_ratio=0.1)
    assert floored[:2] == pytest.approx([1.0, 2.0])
    assert floored[2:] == pytest.approx([2 * (0.1 + 0.9 * value) for value in wave])


def test_wsd_is_stable_then_decays() -> None:
    rates = curve(10, lr_scheduler_type="wsd", warmup_steps=2, decay_steps=4)
    assert rates[:6] == pytest.approx([1.0, 2.0, 2.0, 2.0, 2.0, 2.0])
    assert rates[6] > rates[7] > rates[8] > rates[9] == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize(
    ("optim", "says"),
    [
        ({"warmup_steps": 9}, "optim.warmup_steps=9 is longer than the run of 8"),
        ({"lr_scheduler_type": "wsd", "warmup_steps": 5, "decay_steps": 4}, "final decay of 4 updates"),
    ],
)
def test_what_does_not_fit_is_refused(optim: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        curve(8, **optim)
