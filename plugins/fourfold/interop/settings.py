"""What another launcher is told of a recipe."""

from dataclasses import dataclass
from typing import Any

from fourfold.layout import Layout
from fourfold.planner.passes import micro_batches
from fourfold.schema import TrainConfig


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A checked run. `model` is its Hugging Face config; None where there is no folder of it here. `attention`: name of the
    strategy between cp ranks."""

    config: TrainConfig
    layout: Layout
    model: Any | None
    attention: str

    @property
    def micro_batches(self) -> int:
        """Of an update, on each data rank."""
        return micro_batches(self.config, layout=self.layout)


@dataclass(frozen=True)
class Settings:
    """The launcher's own text, and what it has no words for, a sentence each."""

    text: str
    unsaid: list[str]


def unsaid_everywhere(config: TrainConfig) -> list[str]:
    """What none of the other launchers can be told."""
    found = [
        f"data.packing={config.data.packing.value}: whether attention crosses the borders of packed documents is up to its data "
        f"pipeline; here it never does"
    ]
    if config.max_steps is None:
        found.append(f"num_epochs={config.num_epochs}: it counts updates, which follow from the data")
    return found
