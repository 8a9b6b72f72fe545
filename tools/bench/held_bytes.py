"""Exact bytes of tensors: those alive at one time while something runs, and those kept for its backward pass.

Storages are counted, each once and whole; what was there before is not. Buffers inside an op or a backend are no tensors.
"""

import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PAUSE = 0.02  # seconds


class Held(NamedTuple):
    saved: int  # alive until the backward pass: what autograd keeps, inputs too, and whatever else is not the result
    most: int  # made by the call and alive at one time


def held_by(call: Callable[..., Tensor], *inputs: Tensor) -> Held:
    """Of one forward pass of `call(*inputs)`."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[_key(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), _Alive(inputs) as alive:
        out = call(*inputs)
        alive.settle()
    alive.now.pop(_key(out), None)  # the caller's, unless autograd keeps it
    return Held(sum((alive.now | kept).values()), alive.most)


class _Alive(TorchDispatchMode):
    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self._known = {_key(tensor) for tensor in known}
        self.now: dict[int, int] = {}
        self.most = 0
        self._sent = False

    def settle(self) -> None:
        """After a collective, wait until a thread of gloo has let go of what it sent, which may be after the answer."""
        if self._sent:
            time.sleep(PAUSE)
        self._sent = False

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.settle()
        self._sent = op.namespace == "c10d"
        found = op(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor):
                self._see(tensor)
        self.most = max(self.most, sum(self.now.values()))
        return found

    def _see(self, tensor: Tensor) -> None:
        key = _key(tensor)
        if key in self._known or key in self.now:
            return
        storage = tensor.untyped_storage()
        self.now[key] = storage.nbytes()
        weakref.finalize(storage, self.now.pop, key, None)


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
