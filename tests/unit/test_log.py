"""What is kept of a run while the disk does not take it."""

from pathlib import Path

import pytest

from fourfold.log import Reporter


def test_metrics_that_cannot_be_written_do_not_end_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reporter = Reporter(enabled=True, total_steps=2, first_step=0, output_dir=tmp_path)
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    for step in (1, 2):
        reporter.step(step, text=["loss 1.0", "lr 2"], metrics={"train/loss": 1.0}, show=True)
    shown = capsys.readouterr().out
    assert shown.count("metrics.jsonl cannot be written (No space left on device)") == 1
    assert "step 2/2  loss 1.0  lr 2" in shown


def test_metrics_of_updates_to_be_run_again_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "a": 1}\n{"step": 2, "a": 2}\n{"step": 3, "a"')
    Reporter(enabled=True, total_steps=3, first_step=1, output_dir=tmp_path)
    assert path.read_text() == '{"step": 1, "a": 1}\n'
