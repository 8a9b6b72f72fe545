"""What ZeRO sends, counted while it runs; for tests and `fourfold verify`."""

from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fourfold.context.comm import Comm


class DataAxes(TorchDispatchMode):
    """Bytes that this rank sends to `groups` inside the context, by what c10d's operations are called with: of the algorithm, as
    zero/cost.py has them. Single numbers and integers (norms, flags) are not counted, nor what attention strategies send, to
    which the same group may belong."""

    def __init__(self, groups: Mapping[str, dist.ProcessGroup]) -> None:
        super().__init__()
        self._axes = {group.group_name: (axis, group.size()) for axis, group in groups.items() if group.size() > 1}
        self._reduced, self._moved = Counter[tuple[str, int]](), Counter[str]()
        self._attention = 0  # calls of a strategy that are under way
        self._patches = ExitStack()

    @property
    def sent(self) -> dict[str, int]:
        """By axis. An all-reduce is a reduce-scatter and a gather of the whole."""
        found = Counter(self._moved)
        for (axis, size), whole in self._reduced.items():
            found[axis] += 2 * whole * (size - 1) // size
        return dict(found)

    def __enter__(self) -> "DataAxes":
        for name in ("fill", "summed", "all_to_all"):
            self._patches.enter_context(patch.object(Comm, name, self._apart(getattr(Comm, name))))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()

    def _apart(self, original: Any) -> Any:
        def call(*arguments: Any, **keywords: Any) -> Any:
            self._attention += 1
            try:
                return original(*arguments, **keywords)
            finally:
                self._attention -= 1

        return call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and not self._attention:
            self._add(func.name().removeprefix("c10d::"), args)
        return func(*args, **(kwargs or {}))

    def _add(self, name: str, args: Any) -> None:
        group = next((one for one in args if isinstance(one, torch.ScriptObject)), None)
        if group is None or (name := name.strip("_")) in ("send", "recv", "barrier", "monitored_barrier"):
            return
        axis, size = self._axes.get(dist.ProcessGroup.unbox(group).group_name, ("", 1))
        parts = [
            one for one in tree_leaves(args[1] if name.startswith("allgather") else args[0]) if isinstance(one, Tensor)
        ]
        if size == 1 or sum(one.numel() for one in parts) == 1 or not parts[0].is_floating_point():
            return
        each = sum(one.nbytes for one in parts)
        if name.startswith("allreduce"):
            self._reduced[axis, size] += each
        else:  # a gather of parts, a scatter of sums of parts
            self._moved[axis] += each * (size - 1)
