"""What a pipeline sends, holds and reads, counted while it runs, and stages that sleep; for tests and benchmarks."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import safetensors
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.utils._python_dispatch import TorchDispatchMode

from fourfold.pipeline.driver import Hidden


class PointToPoint(TorchDispatchMode):
    """What this rank sends to single others of `group` inside the context, by what c10d's operations are called with.

    `greetings` are the bytes of single numbers: a schedule opens its connections with one each, the first time it runs.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self._name = group.group_name
        self.greetings = 0
        self.sent = Counter[int]()  # bytes by rank of the group
        self.shapes = set[tuple[int, ...]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() == "c10d::send":
            tensors, group, to = args[:3]
            if dist.ProcessGroup.unbox(group).group_name == self._name:
                self._add(tensors, to)
        return func(*args, **(kwargs or {}))

    def _add(self, tensors: list[Tensor], to: int) -> None:
        for one in tensors:
            if one.numel() == 1:
                self.greetings += one.nbytes
            else:
                self.sent[to] += one.nbytes
                self.shapes.add(tuple(one.shape))


class InFlight:
    """Passes through a stage of this rank whose backward pass is still to come, inside the context: now and at most."""

    def __init__(self) -> None:
        self.now = self.peak = 0
        self._patches: list[Any] = []

    def __enter__(self) -> "InFlight":
        self._patches = [
            self._counted("forward_one_chunk", lambda **_: 1),
            self._counted("backward_one_chunk", lambda full_backward=True, **_: -full_backward),
            self._counted("backward_weight_one_chunk", lambda **_: -1),
        ]
        for one in self._patches:
            one.start()
        return self

    def __exit__(self, *error: object) -> None:
        for one in self._patches:
            one.stop()

    def _counted(self, name: str, change: Any) -> Any:
        original = getattr(PipelineStage, name)

        def call(stage: Any, *arguments: Any, **keywords: Any) -> Any:
            result = original(stage, *arguments, **keywords)
            self.now += change(**keywords)
            self.peak = max(self.peak, self.now)
            return result

        return patch.object(PipelineStage, name, call)


@contextmanager
def reads() -> Iterator[Counter[str]]:
    """Bytes by tensor that are read from safetensors files inside the context."""
    found, opened = Counter[str](), safetensors.safe_open

    class Part:
        def __init__(self, name: str, part: Any) -> None:
            self._name, self._part = name, part

        def __getitem__(self, index: Any) -> Tensor:
            read: Tensor = self._part[index]
            found[self._name] += read.nbytes
            return read

    class File:
        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            self._file = opened(*arguments, **keywords)

        def __enter__(self) -> "File":
            self._file.__enter__()
            return self

        def __exit__(self, *error: Any) -> None:
            self._file.__exit__(*error)

        def get_slice(self, name: str) -> Part:
            return Part(name, self._file.get_slice(name))

        def get_tensor(self, name: str) -> Tensor:
            read: Tensor = self._file.get_tensor(name)
            found[name] += read.nbytes
            return read

    with patch.object(safetensors, "safe_open", File):
        yield found


class SleepingStage(nn.Module):
    """Takes `forward` and `backward` seconds, half of those for the input and half for the weight, and no processor."""

    def __init__(self, hidden: Hidden, *, first: bool, last: bool, forward: float = 0.0, backward: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(hidden.width, dtype=hidden.dtype))
        self.first, self.last, self.seconds = first, last, (forward, backward)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """x: ids[B, S] of the first stage, else hidden[B, S, D] -> hidden[B, S, D], or of the last a scalar."""
        ahead, back = self.seconds
        time.sleep(ahead)
        if self.first:  # there is no input to make a gradient for
            output = _SlowBackward.apply(self.weight, back).expand(*x.shape, -1)
        else:
            output = _SlowBackward.apply(x, back / 2) + _SlowBackward.apply(self.weight, back / 2)
        return output.sum() if self.last else output.contiguous()


class _SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient.contiguous(), None  # of a sum it is one number, expanded


def sleeping(
    hidden: Hidden, *, indices: list[int], total: int, forward: float = 0.0, backward: float = 0.0
) -> list[nn.Module]:
    """Stages `indices` of `total`."""
    return [
        SleepingStage(hidden, first=index == 0, last=index == total - 1, forward=forward, backward=backward)
        for index in indices
    ]
