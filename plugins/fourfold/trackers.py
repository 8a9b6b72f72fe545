"""Experiment trackers, by accelerate: TensorBoard, W&B, MLflow and whatever else it knows by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fourfold.schema import TrackerConfig


def start_trackers(tracker: TrackerConfig, *, output_dir: Path, device: torch.device, config: dict[str, Any]) -> Any:
    """An Accelerator that serves launch state and trackers only, or None if no tracker is asked for.

    Call it on every process, after the process group exists.
    """
    if not tracker.report_to:
        return None
    from accelerate import Accelerator

    accelerator = Accelerator(
        cpu=device.type == "cpu", log_with=tracker.report_to, project_dir=str(output_dir / "trackers")
    )
    flat = {key: value for key, value in _flatten(config) if isinstance(value, int | float | str | bool)}
    accelerator.init_trackers(tracker.project, config=flat, init_kwargs=tracker.init_kwargs)
    return accelerator


def refuse_unknown_trackers(tracker: TrackerConfig) -> None:
    """Raises ValueError for a tracker that accelerate does not know or whose package is missing."""
    if not tracker.report_to:
        return
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

    available = {str(getattr(name, "value", name)) for name in get_available_trackers()}
    for name in tracker.report_to:
        if name not in LOGGER_TYPE_TO_CLASS:
            known = ", ".join(sorted(LOGGER_TYPE_TO_CLASS))
            raise ValueError(f"tracker.report_to={name}: accelerate knows {known}.")
        if name not in available:
            raise ValueError(f"tracker.report_to={name}: its package is not installed (pip install {name}).")


class Trackers:
    """Those that `start_trackers` began; one that fails is told once and never ends the run."""

    def __init__(self, accelerator: Any, *, say: Callable[[str], None]) -> None:
        self._accelerator, self._say = accelerator, say

    def log(self, metrics: dict[str, Any], step: int) -> None:
        self._try(lambda: self._accelerator.log(metrics, step=step))

    def finish(self) -> None:
        """Flush and close them. (Accelerator.end_training would destroy the process group as well.)"""
        for tracker in self._accelerator.trackers if self._accelerator else ():
            self._try(tracker.finish)

    def _try(self, work: Callable[[], Any]) -> None:
        if self._accelerator is None:
            return
        try:
            work()
        except Exception as error:  # whatever a service or its client raises
            self._say(f"the trackers are left out from here on: {type(error).__name__}: {error}")
            self._accelerator = None


def _flatten(tree: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    items: list[tuple[str, Any]] = []
    for key, value in tree.items():
        items += _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else [(prefix + key, value)]
    return items
