"""Counting what torch's own collectives are asked to send; for tests and benchmarks, beside TensorGroup's own count."""

from collections import Counter
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Collectives(TorchDispatchMode):
    """Bytes that this rank of `size` sends inside the context, by what c10d's operations are called with.

    `sent` is of activations, three dimensions and more, by operation: (t-1)/t of the largest tensor, twice for an
    all-reduce. `losses` are the bytes of the others, as they are: the loss's numbers of each token.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.losses = size, 0
        self.sent, self.shapes = Counter[str](), set[tuple[int, ...]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, name = func.name().split("::")
        if namespace == "c10d":
            self._add(name, [one for one in tree_leaves(args) if isinstance(one, Tensor)])
        return func(*args, **(kwargs or {}))

    def _add(self, name: str, tensors: list[Tensor]) -> None:
        self.shapes |= {tuple(one.shape) for one in tensors}
        whole = max(one.nbytes for one in tensors)
        if max(one.ndim for one in tensors) < 3:
            self.losses += whole
        else:
            self.sent[name] += (2 if name == "allreduce_" else 1) * whole * (self.size - 1) // self.size
