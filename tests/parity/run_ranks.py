"""Whole runs (fourfold.train.train) on ranks of the pool."""

import json
from pathlib import Path
from typing import Any

from fourfold.train import train
from tests.compose import composed


def whole_run(rank: int, *, overrides: list[str]) -> int:
    config, plain = composed(*overrides)
    return train(config, plain=plain)


def metrics(output_dir: Path, key: str) -> dict[int, Any]:
    """{step: value} of metrics.jsonl; a step that was run twice counts last."""
    lines = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line[key] for line in lines if key in line}
