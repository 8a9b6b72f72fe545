"""fourfold, except that the update at hand fails on rank 1 only."""

import os
from typing import Any

from fourfold.cli import main
from fourfold.loop import TrainingLoop


def cable_pulled(*arguments: Any, **keywords: Any) -> None:
    raise OSError("cable pulled")


if os.environ["RANK"] == "1":
    TrainingLoop._update = cable_pulled  # type: ignore[assignment]
main()
