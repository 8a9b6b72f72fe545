"""Host memory of each rank while a model is loaded: most above what was there, against its own shard and one tensor.

    uv run python tools/make_smollm2.py /tmp/smollm2       once, where there is no hub
    uv run python tools/bench/load.py --model /tmp/smollm2

VmHWM, reset just before, less the resident set then. Two spans: `load` (the weights), and the whole of `parallelize`
(weights, DeepSpeed's flat buffers and master weights). Allocations go back to the system when freed (malloc settings), so
that the resident set is what is held. The pages of a file being read count too, while it is open.
"""

import argparse
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import Team, console, llama_folder, peak, reset_peak, table, verdict

MiB = 2**20
SLACK = 8 * MiB  # of the interpreter, not of tensors
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(64 * 1024), "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_ARENA_MAX": "2"}


@dataclass(frozen=True)
class Loaded:
    load_bytes: int  # above the start, at most
    load_seconds: float
    all_bytes: int
    all_seconds: float
    shard: int  # bytes of this rank's parameters
    tensor: int  # bytes of the largest tensor, whole


class Loader:
    def __init__(self, *, rank: int, world: int, folder: str, dtype: str) -> None:
        from transformers.utils import logging

        from fourfold.zero.deepspeed_internals import quiet_start

        logging.set_verbosity_error()
        quiet_start(torch.device("cpu"))
        self.world, self.folder, self.dtype = world, Path(folder), dtype

    def warm_up(self, tiny: str, stage: int) -> None:
        """Imports and first allocations happen on a tiny model, not in what is measured."""
        kept, self.folder = self.folder, Path(tiny)
        self.load(stage)
        self.folder = kept

    def load(self, stage: int) -> Loaded:
        from transformers import AutoConfig

        from fourfold import parallelize as module
        from fourfold.layout import Layout
        from fourfold.mesh import build_mesh
        from fourfold.model.build import build_on_meta
        from fourfold.model.load import load
        from fourfold.model.weights import Weights
        from fourfold.schema import Precision, TrainConfig, ZeroConfig

        config = TrainConfig(name="bench", precision=Precision(self.dtype), zero=ZeroConfig(stage=stage))
        dtype = torch.float32 if self.dtype == "fp32" else torch.bfloat16
        model = build_on_meta(AutoConfig.from_pretrained(self.folder), dtype=dtype, attn_implementation="sdpa")
        largest = max(parameter.numel() for parameter in model.parameters()) * dtype.itemsize
        mesh = build_mesh(Layout(dp_shard_size=self.world), device_type="cpu")
        weights = Weights(self.folder)
        found: dict[str, Any] = {}

        def measured(*arguments: Any, **options: Any) -> None:
            torch.distributed.barrier()
            base, start = reset_peak(), time.perf_counter()
            load(*arguments, **options)
            found["load"] = (peak() - base, time.perf_counter() - start)
            found["base"] = base
            local = [getattr(p, "ds_tensor", p) for p in arguments[0].parameters()]
            found["shard"] = sum(tensor.numel() * tensor.element_size() for tensor in local)

        module.load = measured
        start = time.perf_counter()
        try:
            engine = module.parallelize(model, weights, config=config, mesh=mesh, device=torch.device("cpu"))
        finally:
            module.load = load
        seconds = time.perf_counter() - start
        del engine
        return Loaded(
            load_bytes=found["load"][0],
            load_seconds=found["load"][1],
            all_bytes=peak() - found["base"],
            all_seconds=seconds,
            shard=found["shard"],
            tensor=largest,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("/tmp/smollm2"))
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="bf16")
    options = parser.parse_args()
    if not (options.model / "config.json").is_file():
        parser.error(f"{options.model} is no model folder: python tools/make_smollm2.py {options.model}")
    os.environ |= {"OMP_NUM_THREADS": "1", **MALLOC}
    import tempfile

    made = table(
        f"Loading {options.model}, {options.precision}: host memory of the worst rank above the start, MiB",
        (
            "ranks",
            "stage",
            "shard",
            "largest\ntensor",
            "load",
            "of shard\n+ tensor",
            "load, s",
            "parallelize",
            "parallelize,\nin shards",
            "parallelize,\ns",
            "target",
            "",
        ),
        left=0,
        note=f"Target: load at stage 3 at most shard + largest tensor, {SLACK // MiB} MiB apart. Stages 1 and 2 hold whole "
        f"weights by their nature: the shard is the model, and its pages are those of the open file until DeepSpeed flattens "
        f"them. Whole: parallelize, with flat buffers, fp32 masters and (stage 3) the flat fp32 gradients.",
    )
    with tempfile.TemporaryDirectory() as scratch:
        tiny = llama_folder(Path(scratch) / "tiny", layers=1, hidden=64, vocab=256)
        for world in options.ranks:
            for stage in options.stages:
                with Team(world, Loader, folder=str(options.model), dtype=options.precision) as team:
                    team.call("warm_up", str(tiny), stage)
                    found = team.call("load", stage)
                worst = max(found, key=lambda one: one.load_bytes)
                whole = max(one.all_bytes for one in found)
                allowed = worst.shard + worst.tensor
                made.add_row(
                    str(world),
                    str(stage),
                    f"{worst.shard / MiB:.0f}",
                    f"{worst.tensor / MiB:.0f}",
                    f"{worst.load_bytes / MiB:.0f}",
                    f"{worst.load_bytes / allowed:.3f}",
                    f"{max(one.load_seconds for one in found):.2f}",
                    f"{whole / MiB:.0f}",
                    f"{whole / worst.shard:.2f}",
                    f"{max(one.all_seconds for one in found):.2f}",
                    "1.000" if stage == 3 else "",
                    verdict(worst.load_bytes, allowed + SLACK) if stage == 3 else "",
                )
    console().print(made)


if __name__ == "__main__":
    main()
