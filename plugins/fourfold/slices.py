"""What a rank holds of a tensor that tensor parallelism cuts, and how a parameter says so.

Parameters stay plain: what is known beside the local values is in attributes of them, under Megatron's names where it has
one, so that DeepSpeed, torch optimizers and Megatron-style callers work on them as they are.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Ranges = tuple[tuple[int, int], ...]  # [first, last) each, in the order in which they are held
MARKS = ("tensor_slice", "tensor_model_parallel", "partition_dim", "partition_stride", "summed_over", "stored_as")


@dataclass(frozen=True)
class Slice:
    """Rows and columns of a tensor of global `shape`, seen as a matrix [shape[0], all other dimensions]."""

    shape: torch.Size
    rows: Ranges
    columns: Ranges
    padding: int = 0  # rows of zeros behind the others, which are no part of the tensor

    @classmethod
    def whole(cls, shape: torch.Size) -> "Slice":
        height = shape[0] if shape else 1
        return cls(shape, rows=((0, height),), columns=((0, shape.numel() // height if height else 0),))

    @property
    def height(self) -> int:
        """Rows held, without padding."""
        return _total(self.rows)

    @property
    def width(self) -> int:
        return _total(self.columns)

    def numel(self) -> int:
        """Elements held, without padding."""
        return self.height * self.width

    def local_shape(self) -> torch.Size:
        """Of the parameter that holds it, with padding."""
        if len(self.shape) < 2:
            return torch.Size([self.height + self.padding] if self.shape else [])
        assert len(self.shape) == 2 or self.width == self.shape[1:].numel(), "only matrices are cut by columns"
        inner = [self.width] if len(self.shape) == 2 else list(self.shape[1:])
        return torch.Size([self.height + self.padding, *inner])

    def cut(self, whole: Tensor) -> Tensor:
        """The local values, a copy, from those of the whole tensor."""
        matrix = whole.reshape(-1, Slice.whole(whole.shape).width)
        rows = torch.cat([matrix[first:last] for first, last in self.rows])
        held = torch.cat([rows[:, first:last] for first, last in self.columns], dim=1)
        padded = torch.cat([held, held.new_zeros(self.padding, self.width)])
        return padded.reshape(self.local_shape())

    def place(self, held: Tensor, *, into: Tensor) -> None:
        """The inverse of `cut`: the local values to where they belong in the whole tensor."""
        target, values = into.view(-1, Slice.whole(self.shape).width), held.reshape(-1, self.width)
        at = 0
        for first, last in self.rows:
            start = 0
            for left, right in self.columns:
                target[first:last, left:right] = values[at : at + last - first, start : start + right - left]
                start += right - left
            at += last - first


def slice_of(parameter: Tensor) -> Slice:
    """What a parameter (also one that ZeRO-3 partitions) holds; all of the tensor if nothing cuts it."""
    marked: Slice | None = getattr(parameter, "tensor_slice", None)
    return marked or Slice.whole(getattr(parameter, "ds_shape", parameter.shape))


def is_counted(parameter: Tensor) -> bool:
    """Whether this rank counts the parameter in the gradient norm and stores it, alone of those that hold copies of it."""
    return bool(getattr(parameter, "tensor_model_parallel", True))


def carry_marks(old: Tensor, new: Any) -> None:
    """`new` takes the place of `old`."""
    for mark in MARKS:
        if hasattr(old, mark):
            setattr(new, mark, getattr(old, mark))


def _total(ranges: Ranges) -> int:
    return sum(last - first for first, last in ranges)
