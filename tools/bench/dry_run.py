"""How long a dry run of Llama 3 405B on 16,384 GPUs takes and what it holds, every pipeline rank built; and the plan of it.

    uv run python tools/bench/dry_run.py

Both are the commands as a user has them, in a process of their own. The model is taken by its name: no file of it is read.
"""

import argparse
import re
import resource
import subprocess
import sys
import time

RECIPE = ["task=llama3_405b", "tier=llama3_405b_128k", "seq_len=131072", "global_batch_size=128"]
SECONDS, GIBIBYTES, PLAN_SECONDS = 90.0, 4.0, 2.0
PARAMETERS = 405_853_388_800


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    from common import console, table, verdict

    made = table("Llama 3 405B, 131,072 tokens, 16,384 GPUs", ("what", "measured", "target", ""))
    plan_seconds, plan_cpu, _, _ = run("plan")
    seconds, cpu, peak, text = run("dry-run")
    (found,) = re.findall(r"parameters of all tp x pp ranks: (\d[\d,]*\d)", text)
    rows = [
        (
            "plan",
            f"{plan_seconds:.1f} s ({plan_cpu:.1f} s of CPU)",
            f"{PLAN_SECONDS:.0f} s",
            plan_seconds <= PLAN_SECONDS,
        ),
        ("dry run", f"{seconds:.1f} s ({cpu:.1f} s of CPU)", f"{SECONDS:.0f} s", seconds <= SECONDS),
        ("dry run, peak memory", f"{peak:.2f} GiB", f"{GIBIBYTES:.0f} GiB", peak <= GIBIBYTES),
        ("parameters", found, f"{PARAMETERS:,}", found == f"{PARAMETERS:,}"),
    ]
    for name, measured, target, good in rows:
        made.add_row(name, measured, target, verdict(0.0 if good else 1.0, 0.5))
    console().print(made)


def run(command: str) -> tuple[float, float, float, str]:
    """(seconds, seconds of CPU, peak GiB of this and earlier commands, what it prints)"""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "fourfold", command, *RECIPE], capture_output=True, text=True, check=False
    )
    seconds = time.perf_counter() - begin
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, cpu, after.ru_maxrss / 2**20, done.stdout


if __name__ == "__main__":
    main()
