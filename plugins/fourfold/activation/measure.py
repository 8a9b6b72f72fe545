"""Counting what autograd keeps between forward and backward; for tests and benchmarks, it adds time and memory itself."""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Saved:
    """Tensors saved for backward, one entry a storage: views and tensors saved by several operations count once."""

    def __init__(self) -> None:
        self.tensors: dict[
            int, Tensor
        ] = {}  # by the storage, of its data fake tensors have none; held, so that it is unique

    def drop(self, tensors: Iterable[Tensor]) -> None:
        """Forget what is not to be counted, e.g. tables that all layers share."""
        for tensor in tensors:
            self.tensors.pop(storage_of(tensor), None)

    @property
    def elements(self) -> int:
        return sum(tensor.untyped_storage().nbytes() // tensor.element_size() for tensor in self.tensors.values())

    @property
    def bytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self.tensors.values())


def storage_of(tensor: Tensor) -> int:
    """Which one it is, while it exists."""
    return int(tensor.untyped_storage()._cdata)


@contextmanager
def saved_tensors(model: nn.Module) -> Iterator[Saved]:
    """Record what forward passes inside the context save for backward, the parameters of `model` excluded.

    With checkpointing that is the inputs of the stretches and what selective keeps; the masks and rotary tables that a
    stretch refers to are shared by all layers and not seen.
    """
    parameters = {storage_of(parameter) for parameter in model.parameters()}
    saved = Saved()

    def pack(tensor: Tensor) -> Tensor:
        address = storage_of(tensor)
        if address not in parameters:
            saved.tensors.setdefault(address, tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


class Live(TorchDispatchMode):
    """Bytes of storages that operations made inside the context and that still exist, now and at most. Unlike
    `saved_tensors` it sees what somebody else than autograd holds."""

    def __init__(self, inputs: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet(tensor.untyped_storage() for tensor in inputs)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage() not in self._known:
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: Any) -> None:
        self._known.add(storage)
        size = storage.nbytes()
        self.bytes += size
        self.peak = max(self.peak, self.bytes)
        weakref.finalize(storage, self._drop, size)

    def _drop(self, size: int) -> None:
        self.bytes -= size
