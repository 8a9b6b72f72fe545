"""The tables that `fourfold plan` and `fourfold dry-run` share: memory by term, bytes by group, FLOPs."""

from collections.abc import Mapping, Sequence

from fourfold.log import short
from fourfold.planner.fit import RESERVE, TERMS, RankBytes

Rows = list[tuple[str, str]]
WIDTH = 11


def columns(values: Sequence[object], *, width: int = WIDTH) -> str:
    return "".join(f"{value!s:>{width}}" for value in values)


def memory_rows(found: Mapping[str, RankBytes], *, gpu_gb: float) -> Rows:
    """A column for each of several settings, in GB of 1e9."""
    rows = [("", columns(list(found)))]
    for term in (*TERMS, "total"):
        rows.append((f"{term} GB", columns([f"{getattr(one, term) / 1e9:.2f}" for one in found.values()])))
    fits = columns(["fits" if one.fits(gpu_gb * 1e9) else "no" for one in found.values()])
    return [*rows, (f"in {gpu_gb:g} GB", f"{fits}   less {RESERVE:.0%} for what is not counted")]


def verdict(memory: RankBytes, *, gpu_gb: float, nearest: tuple[str, RankBytes] | None) -> str:
    """Of what does not fit."""
    largest = memory.largest
    remedy = "nothing that was tried does: more GPUs, shorter rows, or tier=zero3_offload"
    if nearest is not None:
        remedy = f"the nearest that fits: {nearest[0]}, {nearest[1].total / 1e9:.1f} GB"
    return (
        f"{memory.total / 1e9:.1f} GB do not fit into {gpu_gb:g} less {RESERVE:.0%}, of which {getattr(memory, largest) / 1e9:.1f} "
        f"are {largest}; {remedy}"
    )


def bytes_rows(ranks: Sequence[Mapping[str, int]]) -> Rows:
    """Of the rank that sends most, group by group."""
    return [(f"{group} group", f"{short(max(one[group] for one in ranks), 'B')} a rank") for group in ranks[0]]


def flops_rows(model: Sequence[int], hardware: Sequence[int]) -> Rows:
    """Of each pipeline rank."""
    return [
        (
            "model",
            f"{short(sum(model) / len(model), 'FLOP')} on the average GPU, {short(max(model), 'FLOP')} on the busiest",
        ),
        ("with recomputation", f"{short(sum(hardware) / len(hardware), 'FLOP')}, {short(max(hardware), 'FLOP')}"),
    ]
