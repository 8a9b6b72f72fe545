"""Checkpoints: bytes written, stall of the training loop, host memory, and time to load into another layout.

    uv run python tools/make_smollm2.py /tmp/smollm2       once, where there is no hub
    uv run python tools/bench/save.py --model /tmp/smollm2

Stall: how long `save` holds up the loop, waiting for the disk or (in the background) only for the copy to host memory;
each kind takes turns. Memory: VmHWM reset just before, less what is resident then (save) or afterwards (load: weights,
masters and moments are there to stay). Load: the same checkpoint's layout, against those of other layouts.
"""

import argparse
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import Team, console, median_ratio, peak, reset_peak, status_bytes, table, verdict
from load import MALLOC

MiB = 2**20
EXTRA = 64 * MiB  # allowed beside the largest tensor


class Trainer:
    """One rank with an engine whose optimizer has state."""

    def __init__(self, *, rank: int, world: int, folder: str, stage: int, precision: str) -> None:
        from transformers import AutoConfig
        from transformers.utils import logging

        from fourfold.checkpoint.board import Board
        from fourfold.layout import Layout
        from fourfold.mesh import build_mesh
        from fourfold.model.build import build_on_meta
        from fourfold.model.weights import Weights
        from fourfold.parallelize import parallelize
        from fourfold.schema import Precision, TrainConfig, ZeroConfig

        logging.set_verbosity_error()
        config = TrainConfig(name="bench", precision=Precision(precision), zero=ZeroConfig(stage=stage))
        dtype = torch.float32 if precision == "fp32" else torch.bfloat16
        model = build_on_meta(AutoConfig.from_pretrained(folder), dtype=dtype, attn_implementation="sdpa")
        self.mesh = build_mesh(Layout(dp_shard_size=world), device_type="cpu")
        self.engine = parallelize(
            model, Weights(Path(folder)), config=config, mesh=self.mesh, device=torch.device("cpu")
        )
        for master in self.engine.masters():
            self.engine.optimizer.state[master] = {
                "step": torch.tensor(1.0),
                "exp_avg": torch.rand_like(master),
                "exp_avg_sq": torch.rand_like(master),
            }
        self.board = Board(rank=rank, world_size=world)
        self.savers: dict[bool, Any] = {}

    def sizes(self) -> tuple[int, int]:
        """(parameters, elements of the largest)."""
        counts = [shape.numel() for shape in self.engine.shapes().values()]
        return sum(counts), max(counts)

    def save(self, folder: str, step: int, in_background: bool) -> tuple[float, float, int]:
        """(seconds that the loop stands, seconds until it is on the disk, bytes above what was there)."""
        from fourfold.checkpoint.save import Progress, Saver

        if in_background not in self.savers:
            self.savers[in_background] = Saver(
                Path(folder),
                engine=self.engine,
                mesh=self.mesh,
                board=self.board,
                about={"run": {}},
                config={},
                keep_last=1,
                keep_every=None,
                in_background=in_background,
                say=print,
            )
        saver = self.savers[in_background]
        torch.distributed.barrier()
        base, start = reset_peak(), time.perf_counter()
        saver.save(Progress(step=step))
        stall = time.perf_counter() - start
        saver.settle()
        return stall, time.perf_counter() - start, peak() - base

    def resume(self, checkpoint: str) -> tuple[float, int]:
        from fourfold.checkpoint.resume import resume

        self.engine.optimizer.state.clear()
        torch.distributed.barrier()
        reset_peak()
        start = time.perf_counter()
        resume(Path(checkpoint), engine=self.engine)
        return time.perf_counter() - start, peak() - status_bytes("VmRSS")


def start(world: int, stage: int, options: argparse.Namespace) -> Team:
    return Team(world, Trainer, folder=str(options.model), stage=stage, precision=options.precision)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("/tmp/smollm2"))
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--scratch", type=Path, help="folder on the disk to be measured")
    options = parser.parse_args()
    if not (options.model / "config.json").is_file():
        parser.error(f"{options.model} is no model folder: python tools/make_smollm2.py {options.model}")
    os.environ |= {"OMP_NUM_THREADS": "1", **MALLOC}
    scratch = Path(tempfile.mkdtemp(dir=options.scratch))
    try:
        memory(options, scratch)
        stall(options, scratch)
        loading(options, scratch)
    finally:
        shutil.rmtree(scratch)


def memory(options: argparse.Namespace, scratch: Path) -> None:
    made = table(
        f"Save and load, {options.precision}: bytes on the disk, and host memory of the worst rank above what stays, MiB",
        ("ranks", "stage", "bytes a\nparameter", "target", "save", "load", "largest tensor\n+ 64 MiB", ""),
        left=0,
    )
    target = 12 if options.precision == "fp32" else 14
    for world, stage in ((1, 2), (2, 1), (2, 3), (4, 2), (4, 3)):
        with start(world, stage, options) as team:
            folder = scratch / f"{world}-{stage}"
            saves = team.call("save", str(folder), 1, False)
            (checkpoint,) = folder.iterdir()
            loads = team.call("resume", str(checkpoint))
            parameters, largest = team.call("sizes")[0]
        written = sum(file.stat().st_size for file in checkpoint.iterdir()) / parameters
        worst_save, worst_load = max(one[2] for one in saves), max(one[1] for one in loads)
        allowed = 4 * largest + EXTRA
        made.add_row(
            str(world),
            str(stage),
            f"{written:.4f}",
            str(target),
            f"{worst_save / MiB:.0f}",
            f"{worst_load / MiB:.0f}",
            f"{allowed / MiB:.0f}",
            verdict(max(worst_save, worst_load), allowed),
        )
    console().print(made)


def stall(options: argparse.Namespace, scratch: Path) -> None:
    with start(2, 2, options) as team:
        team.call("save", str(scratch / "stall"), 1, True)  # host memory is taken once
        waits, copies, disk = [], [], []
        for number in range(options.repeat):
            waits.append(max(one[0] for one in team.call("save", str(scratch / "stall"), 2 * number + 2, False)))
            found = team.call("save", str(scratch / "stall"), 2 * number + 3, True)
            copies.append(max(one[0] for one in found))
            disk.append(max(one[1] for one in found))
    ratio, low, high = median_ratio(copies, waits)
    made = table(
        "Stall of the loop by a save, 2 ranks, ZeRO-2",
        ("waiting, s", "in the background, s", "on the disk after, s", "ratio", "quartiles", "target", ""),
        left=0,
    )
    median = sorted(waits)[len(waits) // 2], sorted(copies)[len(copies) // 2], sorted(disk)[len(disk) // 2]
    made.add_row(
        *(f"{one:.3f}" for one in median), f"{ratio:.3f}", f"{low:.3f}-{high:.3f}", "0.10", verdict(ratio, 0.1)
    )
    console().print(made)


def loading(options: argparse.Namespace, scratch: Path) -> None:
    made = table(
        "Load into 2 ranks at ZeRO-3, against a checkpoint of the same layout",
        ("saved by", "seconds", "ratio", "quartiles", "target", ""),
    )
    same = scratch / "2-3" / "step-00000001"
    with start(2, 3, options) as team:
        team.call("resume", str(same))
        for name in ("1-2", "2-1", "4-2", "4-3"):
            ours, theirs = [], []
            for _ in range(options.repeat):
                other = team.call("resume", str(scratch / name / "step-00000001"))
                ours.append(max(one[0] for one in other))
                theirs.append(max(one[0] for one in team.call("resume", str(same))))
            ratio, low, high = median_ratio(ours, theirs)
            world, stage = name.split("-")
            made.add_row(
                f"{world} ranks, ZeRO-{stage}",
                f"{sorted(ours)[len(ours) // 2]:.2f}",
                f"{ratio:.3f}",
                f"{low:.3f}-{high:.3f}",
                "1.50",
                verdict(ratio, 1.5),
            )
    console().print(made)


if __name__ == "__main__":
    main()
