"""Context-parallel attention in CPU seconds, forward and backward: all ranks together against one process, and peers.

    uv run python tools/bench/context.py                    one document and 17 packed ones, 2 and 4 ranks
    uv run python tools/bench/context.py --ranks 2 --strategies ring --rounds 9

Tensors lie in memory as a transformers layer has them ([B, S, H, D] seen as [B, H, S, D]), the answer is [B, S, H, D]. In
every round each side runs once, one after the other; a ratio is of one round, the figure its median. One process is
`local` over the whole row, run on two ranks at a time, so that it meets the same neighbour on the other core. CPU
seconds are those of all threads of a process: what communication costs the processor is in them. Memory is an exact
count of tensors (held_bytes.py).

Peers on the same row, group and kernel: DeepSpeed's UlyssesSPAttentionHF over transformers' sdpa, and torch's templated
ring (load-balanced, all-to-all) around the CPU op, which torch itself cannot drive there. Neither knows documents, so
that they run one document only; heads divide.
"""

import argparse
import os
import statistics
from typing import Any

from common import Team, console, median_ratio, table, verdict
from context_sides import HEAD_DIM, HEADS, KV_HEADS, OURS, PEERS, Memory, Run, Sides, documents_of, needed_share

COST = {2: 1.10, 4: 1.15}  # CPU seconds of all ranks over one process
RING_COST = {2: 1.10, 4: 1.20}
EVEN = {"one": 1.05, "packed": 1.10}  # slowest rank over the mean
PEER, NOISE = 1.0, 0.03
SHARE, WINDOW_SHARE = 0.25, 0.15  # bytes of needed_only over allgather's
SHAPE = f"heads {HEADS}/{KV_HEADS} of {HEAD_DIM}, fp32"
Rounds = dict[str, list[list[Run]]]  # by side, round and rank


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rows", choices=("one", "packed"), nargs="+", default=["one", "packed"])
    parser.add_argument("--strategies", nargs="+", default=[*OURS, *PEERS], choices=[*OURS, *PEERS])
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    for world in options.ranks:
        for row in options.rows:
            sides = [name for name in options.strategies if name in OURS or row == "one"]
            with Team(world, Sides, length=options.length, row=row) as team:
                found = measured(team, ["local", *sides], rounds=options.rounds)
                print(f"\n{len(documents_of(row, options.length))} document(s) in {options.length} tokens, {SHAPE}\n")
                console().print(costs(found, world=world))
                console().print(evenness(found, world=world, row=row))
                console().print(
                    memory({name: team.call("memory", name) for name in sides if name in OURS}, world=world)
                )
                if row == "one" and set(sides) & set(PEERS):
                    console().print(against_peers(found, world=world))
    console().print(exchanged())


def measured(team: Team, names: list[str], *, rounds: int) -> Rounds:
    for name in names:
        team.call("run", name)  # what the first call does once: plans, buffers, connections
    found: Rounds = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            found[name].append(team.call("run", name))
    return found


def costs(found: Rounds, *, world: int) -> Any:
    alone = [statistics.mean(one.seconds for one in ranks[:2]) for ranks in found["local"]]
    made = table(
        f"{world} ranks: CPU seconds of all of them",
        ("strategy", "all ranks, s", "over one process", "quartiles", "target", ""),
        note=f"One process: {statistics.median(alone):.2f} CPU s.",
    )
    for name in [name for name in found if name in OURS]:
        seconds = [total(ranks) for ranks in found[name]]
        ratio, low, high = median_ratio(seconds, alone)
        target = (RING_COST if name == "ring" else COST).get(world, COST[4])
        made.add_row(
            name,
            f"{statistics.median(seconds):.2f}",
            f"{ratio:.3f}",
            f"{low:.3f} to {high:.3f}",
            f"{target:.2f}",
            verdict(ratio, target),
        )
    return made


def evenness(found: Rounds, *, world: int, row: str) -> Any:
    made = table(
        f"{world} ranks: slowest over mean, and bytes sent",
        ("strategy", "pairs", "CPU s", "target", "", "MB a rank", "formula"),
    )
    for name in [name for name in found if name in OURS]:
        rounds = found[name]
        pairs = slowest([one.pairs for one in rounds[0]])
        seconds = statistics.median(slowest([one.seconds for one in ranks]) for ranks in rounds)
        agrees = all(one.sent == one.formula for ranks in rounds for one in ranks)
        made.add_row(
            name,
            f"{pairs:.3f}",
            f"{seconds:.3f}",
            f"{EVEN[row]:.2f}",
            verdict(max(pairs, seconds), EVEN[row]),
            f"{statistics.mean(one.sent for one in rounds[-1]) / 1e6:.2f}",
            "[green]equal[/]" if agrees else "[red]differs[/]",
        )
    return made


def memory(found: dict[str, list[Memory]], *, world: int) -> Any:
    """Of the rank that is the furthest beyond the figure."""
    made = table(
        f"{world} ranks: MB of tensors that a rank holds for one layer",
        ("strategy", "saved", "figure", "", "peak", "figure", "beyond", "merging", ""),
        note="Saved: for the backward pass. Peak: in the forward pass, beside the inputs; figures: context_sides.py. Merging: one "
        "partial output of a rectangle, in fp32, and four lse beside the sum; reached means no more than that beyond.",
    )
    for name, ranks in found.items():
        saved = max(ranks, key=lambda one: one.saved - one.saved_figure)
        peak = max(ranks, key=lambda one: one.most - one.most_figure)
        made.add_row(
            name,
            f"{saved.saved / 1e6:.2f}",
            f"{saved.saved_figure / 1e6:.2f}",
            verdict(saved.saved, saved.saved_figure),
            f"{peak.most / 1e6:.2f}",
            f"{peak.most_figure / 1e6:.2f}",
            f"{(peak.most - peak.most_figure) / 1e6:.2f}",
            f"{peak.spare / 1e6:.2f}",
            verdict(peak.most, peak.most_figure + peak.spare),
        )
    return made


def against_peers(found: Rounds, *, world: int) -> Any:
    made = table(
        f"{world} ranks, one document: CPU seconds of all ranks against peers",
        ("ours", "peer", "ours, s", "peer, s", "ratio", "quartiles", "target", ""),
        left=2,
        note=f"Two equal runs differ by {NOISE:.2f} here.",
    )
    for peer, name in PEERS.items():
        if peer not in found or name not in found:
            continue
        ours, theirs = ([total(ranks) for ranks in found[one]] for one in (name, peer))
        ratio, low, high = median_ratio(ours, theirs)
        made.add_row(
            name,
            peer,
            f"{statistics.median(ours):.2f}",
            f"{statistics.median(theirs):.2f}",
            f"{ratio:.3f}",
            f"{low:.3f} to {high:.3f}",
            f"{PEER:.2f}",
            verdict(ratio, PEER + NOISE),
        )
    return made


def exchanged() -> Any:
    made = table(
        "Bytes of needed_only over allgather's, 4 ranks, all together",
        ("row", "share", "target", ""),
        note="By the plans that the runs use; counters equal them above and in tests/parity/test_context_attention.py.",
    )
    packed = [
        needed_share(documents_of("packed", 8192, seed=seed), length=8192, ranks=4, window=None) for seed in range(20)
    ]
    windowed = needed_share(((0, 4096),), length=4096, ranks=4, window=256)
    for text, target, share in (
        ("17 documents in 8192 tokens, median of 20 random rows", SHARE, statistics.median(packed)),
        ("one document, 4096 tokens, window 256", WINDOW_SHARE, windowed),
    ):
        made.add_row(text, f"{share:.3f}", f"{target:.2f}", verdict(share, target))
    return made


def total(ranks: list[Run]) -> float:
    return sum(one.seconds for one in ranks)


def slowest(values: list[float]) -> float:
    return max(values) * len(values) / sum(values)


if __name__ == "__main__":
    main()
