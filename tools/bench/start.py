"""How long it takes to start: the command line, and quickstart from launch to the end of its first update.

    uv run python tools/bench/start.py

Quickstart runs as `accelerate launch --config_file tools/launch/cpu.yaml -m fourfold task=quickstart max_steps=1` and
prints its own figure. The peer is a plain script under the same launcher: Accelerator, AutoModelForCausalLM and tokenizer
from the same folder, rows that were packed beforehand, deepspeed.initialize (stage 2) and one update of as many rows.
DeepSpeed's shared-memory collective is off there too: it would compile for minutes. Both have the file caches of an
earlier run; the very first run of ours, which makes the model and packs the data, is shown beside it.

No compiler may run: `gcc` and its like are logged by stand-ins first on PATH, and TORCH_EXTENSIONS_DIR must stay empty.
"""

import argparse
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMMAND_LINE, RATIO = 2.0, 1.2
COMPILERS = ("gcc", "g++", "cc", "c++", "clang", "clang++", "nvcc", "ninja")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peer", nargs=2, metavar=("MODEL", "ROWS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peer:
        peer(*options.peer)
        return
    with tempfile.TemporaryDirectory() as scratch:
        compare(Path(scratch), repeats=options.repeats)


def compare(scratch: Path, *, repeats: int) -> None:
    from common import console, median_ratio, table, verdict

    environment = prepared_environment(scratch)
    commands = {
        "fourfold --help": ["fourfold", "--help"],
        "fourfold train --cfg job task=quickstart": ["fourfold", "train", "--cfg", "job", "task=quickstart"],
    }
    made = table("Start", ("what", "ours", "plain", "measured", "target", ""))
    for name, command in commands.items():
        run(command, environment)  # once for the file cache
        seconds = min(run(command, environment)[0] for _ in range(repeats))  # the best: others use the machine too
        made.add_row(
            name, f"{seconds:.2f} s", "", f"{seconds:.2f} s", f"{COMMAND_LINE:.1f} s", verdict(seconds, COMMAND_LINE)
        )
    first = ours(scratch, environment)
    rows = pack_rows(scratch)
    plain(scratch, environment, rows)
    mine, theirs = [], []
    for _ in range(repeats):
        mine.append(ours(scratch, environment))
        theirs.append(plain(scratch, environment, rows))
    ratio = median_ratio(mine, theirs)[0]
    made.add_row("very first launch to first update", f"{first:.1f} s", "", "", "", "")
    made.add_row(
        "launch to first update",
        f"{statistics.median(mine):.1f} s",
        f"{statistics.median(theirs):.1f} s",
        f"{ratio:.2f}",
        f"{RATIO:.1f}",
        verdict(ratio, RATIO),
    )
    calls = (scratch / "compilers").read_text().splitlines() if (scratch / "compilers").exists() else []
    built = [path for path in (scratch / "extensions").rglob("*") if path.is_file()]
    made.add_row("our compiler calls", "", "", str(len(calls)), "0", verdict(len(calls), 0))
    made.add_row("compiled extensions", "", "", str(len(built)), "0", verdict(len(built), 0))
    console().print(made)
    for call in calls[:5]:
        console().print(f"compiler call: {call}", markup=False)


def prepared_environment(scratch: Path) -> dict[str, str]:
    stand_ins = scratch / "bin"
    stand_ins.mkdir()
    for name in COMPILERS:
        real = shutil.which(name)
        script = stand_ins / name
        script.write_text(
            f'#!/bin/sh\necho "{name} $*" >> "$COMPILER_LOG"\n' + (f'exec {real} "$@"\n' if real else "exit 127\n")
        )
        if real:  # what is not there must not seem to be
            script.chmod(0o755)
    (scratch / "extensions").mkdir()
    return os.environ | {
        "PATH": os.pathsep.join([str(stand_ins), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "TORCH_EXTENSIONS_DIR": str(scratch / "extensions"),
        "COMPILER_LOG": str(scratch / "compilers"),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def run(command: list[str], environment: dict[str, str]) -> tuple[float, str]:
    start = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}")
    return time.perf_counter() - start, done.stdout


def launched(words: list[str], environment: dict[str, str]) -> float:
    """Seconds from the launch to the end of the first update, as the run prints them."""
    launcher = ["accelerate", "launch", "--config_file", "tools/launch/cpu.yaml", "--main_process_port", "0"]
    _, output = run([*launcher, *words], {**environment, "LAUNCHED_AT": str(time.time())})
    found = re.search(r"([\d.]+) s from launch to the end of the first update", output)
    if not found:
        raise SystemExit(f"no figure in:\n{output}")
    return float(found[1])


def ours(scratch: Path, environment: dict[str, str]) -> float:
    settings = ["max_steps=1", "optim.warmup_steps=0", "overwrite=true", "data.eval_documents=0", "export=false"]
    folders = [f"output_dir={scratch}/run", f"cache_dir={scratch}/cache"]
    return launched(["-m", "fourfold", "task=quickstart", *settings, *folders], environment)


def plain(scratch: Path, environment: dict[str, str], rows: Path) -> float:
    words = [str(Path(__file__)), "--peer", str(scratch / "cache" / "tiny-llama"), str(rows)]
    return launched(words, {**environment, "COMPILER_LOG": os.devnull})


def pack_rows(scratch: Path) -> Path:
    import torch
    from common import packed_rows, unshifted

    path = scratch / "rows.pt"
    torch.save(unshifted(packed_rows(8, 256, vocab=2048, seed=0)), path)
    return path


def peer(model_folder: str, rows: str) -> None:
    """What a user writes: 2 processes, stage 2, one update of 8 rows in micro-batches of 2."""
    import deepspeed
    import deepspeed.ops
    import torch
    import torch.distributed as dist
    from accelerate import Accelerator
    from transformers import AutoModelForCausalLM, AutoTokenizer

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    accelerator = Accelerator(cpu=True)
    AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 2},
    }
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw, config=settings)
    batch = {key: value[accelerator.process_index :: 2] for key, value in torch.load(rows).items()}
    for index in range(2):
        loss = engine(**{key: value[2 * index : 2 * index + 2] for key, value in batch.items()}).loss
        engine.backward(loss)
        engine.step()
    if accelerator.is_main_process:
        print(f"{time.time() - float(os.environ['LAUNCHED_AT']):.1f} s from launch to the end of the first update")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
