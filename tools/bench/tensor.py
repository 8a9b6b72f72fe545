"""Tensor parallelism: memory and CPU seconds of the vocabulary-parallel loss against transformers' over all logits; bytes,
memory and CPU seconds of cut layers against formulas and one process (tensor_layers.py).

    uv run python tools/bench/tensor.py                       everything
    uv run python tools/bench/tensor.py --figures time --rounds 5
    uv run python tools/bench/tensor.py --figures layers layers-time

Their loss is `lm_head` and ForCausalLMLoss, which holds all logits, upcast to fp32. Memory is what exists at the worst moment
of forward and backward, gradients included, beside hidden states, weight and labels: counted by storages that operations
return (theirs at full size on the meta device), and resident memory of the process beside it, with theirs at a quarter of
the tokens, whose logits alone fill gigabytes. Time is CPU seconds of one thread at a quarter of the tokens with the chunk
of all of them, sides in turns after one warm-up; a ratio is of one round, the figure its median.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from common import Team, console, median_ratio, peak, reset_peak, table, verdict
from tensor_layers import Layers, counted
from tensor_layers import seconds as layer_seconds
from torch import Tensor

from fourfold.activation.measure import Live

MiB = 2**20
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
FIGURES = ("memory", "time", "layers", "layers-time")
MEMORY, HALF, TIME = 1 / 8, 0.55, 1.05


@dataclass(frozen=True)
class Shape:
    tokens: int
    vocabulary: int
    hidden: int
    dtype: str
    labelled: int  # tokens with labels when ours is measured for memory; chunks without are passed over

    def chunk(self) -> int:
        """That of a run without a setting."""
        from fourfold.model.chunk import default_chunk

        return default_chunk(self.tokens, vocabulary=self.vocabulary, hidden=self.hidden)

    def inputs(self, *, device: str = "cpu", share: int = 1, tokens: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """hidden[N, D], the first of `share` slices of the weight, labels[N], the last of which is ignored."""
        torch.manual_seed(0)
        kind = {"device": device, "dtype": DTYPES[self.dtype]}
        size = tokens or self.tokens
        hidden = torch.randn(size, self.hidden, **kind).requires_grad_()  # type: ignore[arg-type]
        weight = torch.randn(self.vocabulary // share, self.hidden, **kind).mul_(0.02).requires_grad_()  # type: ignore[arg-type]
        labels = torch.randint(0, self.vocabulary, (size,), device=device)
        labels[-1] = -100
        return hidden, weight, labels


# ---------------------------------------------------------------- the two losses


def ours(inputs: tuple[Tensor, Tensor, Tensor], *, chunk_size: int, rank: int = 0, group: Any = None) -> None:
    from fourfold.model.cross_entropy import linear_cross_entropy

    hidden, weight, labels = inputs
    rows = len(weight)
    first = rank * rows
    linear_cross_entropy(
        hidden, weight, labels, group=group, first=first, count=rows, softcap=None, chunk_size=chunk_size
    ).backward()


def theirs(inputs: tuple[Tensor, Tensor, Tensor]) -> None:
    from transformers.loss.loss_utils import ForCausalLMLoss

    hidden, weight, labels = inputs
    logits = torch.nn.functional.linear(hidden, weight)
    ForCausalLMLoss(logits, None, len(weight), num_items_in_batch=1, shift_labels=labels).backward()


def forget(inputs: tuple[Tensor, Tensor, Tensor]) -> None:
    for tensor in inputs:
        tensor.grad = None


# ---------------------------------------------------------------- memory


def measured(inputs: tuple[Tensor, Tensor, Tensor], work: Callable[[], None]) -> tuple[int, int]:
    """(bytes counted, bytes resident) at the worst moment, above what is there before; gradients stay until then."""
    before = reset_peak()
    work()
    resident = peak() - before
    forget(inputs)
    with Live(inputs) as live:
        work()
    return live.peak, resident


class Loss:
    """One rank of the loss over a vocabulary that all share."""

    def __init__(self, *, rank: int, world: int, shape: Shape) -> None:
        import torch.distributed as dist

        self.rank, self.group, self.shape = rank, dist.group.WORLD, shape
        self.inputs = shape.inputs(share=world)
        self.inputs[2][shape.labelled :] = -100
        ours(shape.inputs(share=world, tokens=2), chunk_size=2, rank=rank, group=self.group)  # imports, connections

    def memory(self) -> tuple[int, int]:
        chunk = self.shape.chunk()
        return measured(self.inputs, lambda: ours(self.inputs, chunk_size=chunk, rank=self.rank, group=self.group))


class Theirs:
    """A process of its own, so that nothing else has left memory behind."""

    def __init__(self, *, rank: int, world: int, shape: Shape) -> None:
        self.shape = shape
        theirs(shape.inputs(tokens=2))

    def counted(self) -> int:
        inputs = self.shape.inputs(device="meta")
        with Live(inputs) as live:
            theirs(inputs)
        return live.peak

    def quarter(self) -> tuple[int, int]:
        inputs = self.shape.inputs(tokens=self.shape.tokens // 4)
        return measured(inputs, lambda: theirs(inputs))


def memory(shape: Shape) -> Any:
    with Team(1, Theirs, shape=shape) as team:
        full, (quarter, resident) = team.call("counted")[0], team.call("quarter")[0]
    found = {}
    for world in (1, 2):
        with Team(world, Loss, shape=shape) as team:
            found[world] = [max(one) for one in zip(*team.call("memory"), strict=True)]
    made = table(
        f"Memory of the loss, {shape.dtype}, {shape.tokens} tokens in chunks of {shape.chunk()}, MiB",
        ("", "counted", "resident", "ratio, counted", "target", ""),
        note=f"Worst rank. A ratio is over all logits of {shape.tokens} tokens, at tp 2 over tp 1.",
    )
    made.add_row(f"all logits, {shape.tokens // 4} tokens", f"{quarter / MiB:.0f}", f"{resident / MiB:.0f}", "", "", "")
    made.add_row(f"all logits, {shape.tokens} tokens", f"{full / MiB:.0f}", "", "", "", "")
    for world, over, target in ((1, full, MEMORY), (2, found[1][0], HALF)):
        counted, resident = found[world]
        ratio = counted / over
        row = f"{counted / MiB:.0f}", f"{resident / MiB:.0f}", f"{ratio:.3f}", f"{target:.3f}", verdict(ratio, target)
        made.add_row(f"ours, tp {world}", *row)
    return made


# ---------------------------------------------------------------- time


def seconds(shape: Shape, *, chunks: list[int], rounds: int) -> Any:
    inputs = shape.inputs(tokens=shape.tokens // 4)
    sides: dict[int, Callable[[], None]] = {0: lambda: theirs(inputs)}
    for size in chunks:
        sides[size] = lambda size=size: ours(inputs, chunk_size=size)  # type: ignore[misc]
    found: dict[int, list[float]] = {size: [] for size in sides}
    for turn in range(rounds + 1):
        for size, work in sides.items():
            spent = cpu_seconds(work)
            forget(inputs)
            if turn:
                found[size].append(spent)
    made = table(
        f"CPU seconds of the loss, {shape.dtype}, {shape.tokens // 4} tokens, one rank",
        ("chunk", "ours, s", "all logits, s", "ratio", "quartiles", "target", ""),
    )
    for size in chunks:
        ratio, low, high = median_ratio(found[size], found[0])
        made.add_row(
            f"{size}{', the default' if size == shape.chunk() else ''}",
            f"{statistics.median(found[size]):.2f}",
            f"{statistics.median(found[0]):.2f}",
            f"{ratio:.3f}",
            f"{low:.3f} to {high:.3f}",
            f"{TIME:.2f}",
            verdict(ratio, TIME),
        )
    return made


def cpu_seconds(work: Callable[[], None]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figures", choices=FIGURES, nargs="+", default=list(FIGURES))
    parser.add_argument("--dtypes", choices=tuple(DTYPES), nargs="+", default=list(DTYPES))
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocabulary", type=int, default=128_256)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--chunks", type=int, nargs="*", default=[64, 1024], help="timed beside the default")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=3, help="timed")
    parser.add_argument("--length", type=int, default=2048, help="tokens of the row that the layers see")
    parser.add_argument(
        "--labelled",
        type=int,
        help="for memory: tokens of ours that have labels. Chunks use the same buffers, so that few are enough (default all)",
    )
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    if {"memory", "time"} & set(options.figures):
        losses(options)
    shape = Layers(layers=options.layers, length=options.length)
    if "layers" in options.figures:
        counted(shape, worlds=[2, 4])
    if "layers-time" in options.figures:
        console().print(layer_seconds(shape, rounds=options.rounds))


def losses(options: argparse.Namespace) -> None:
    print(f"Vocabulary {options.vocabulary}, {options.tokens} tokens, hidden {options.hidden}\n")
    for dtype in options.dtypes:
        shape = Shape(options.tokens, options.vocabulary, options.hidden, dtype, options.labelled or options.tokens)
        if "memory" in options.figures:
            console().print(memory(shape))
        if "time" in options.figures:
            chunks = sorted({shape.chunk(), *options.chunks})
            console().print(seconds(shape, chunks=chunks, rounds=options.rounds))


if __name__ == "__main__":
    main()
