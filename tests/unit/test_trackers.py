import pytest

from fourfold.schema import TrackerConfig
from fourfold.trackers import refuse_unknown_trackers


def test_trackers_that_cannot_be_are_refused_by_name() -> None:
    refuse_unknown_trackers(TrackerConfig(report_to=["tensorboard"]))
    refuse_unknown_trackers(TrackerConfig())
    with pytest.raises(ValueError, match=r"tracker\.report_to=tensorbord: accelerate knows .*tensorboard"):
        refuse_unknown_trackers(TrackerConfig(report_to=["tensorbord"]))
    with pytest.raises(ValueError, match=r"wandb: its package is not installed \(pip install wandb\)"):
        refuse_unknown_trackers(TrackerConfig(report_to=["wandb"]))
