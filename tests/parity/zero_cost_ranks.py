"""What one rank counts in the tests of ZeRO's shares and bytes."""

from collections import Counter
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fourfold.layout import Layout
from fourfold.schema import TrainConfig
from fourfold.zero.optimizer import dimensions
from tests.parity.zero_ranks import build, micro_batches

NUMBERS = 16  # elements up to which a message is of single numbers: norms, flags


class Sent(TorchDispatchMode):
    """Bytes of gathers (weights) and of sums (gradients), of the algorithm over `size` ranks, as the largest tensor that it is called with says."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.bytes = size, Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, name = func.name().split("::")
        if namespace == "c10d":
            tensors = [one for one in tree_leaves(args) if isinstance(one, Tensor)]
            whole = max((one.nbytes for one in tensors), default=0)
            if name.startswith("allgather_") and name != "_allgather_base_":  # a list of parts
                whole *= self.size
            if tensors and max(one.numel() for one in tensors) > NUMBERS:
                purpose = "weights" if "gather" in name else "gradients"
                self.bytes[purpose] += (2 if name == "allreduce_" else 1) * whole * (self.size - 1) // self.size
        return func(*args, **(kwargs or {}))


def shares(
    rank: int, *, folder: Path, config: TrainConfig, layout: Layout, batch: dict[str, Tensor], accumulation: int
) -> dict[str, Any]:
    """Master weights of this rank, elements of each parameter as the optimizer has them, bytes sent in the second update."""
    engine, mesh = build(rank, folder=folder, config=config, layout=layout)
    sizes = [(dimensions(one) > 1, getattr(one, "ds_numel", one.numel())) for one in engine.module.parameters()]
    for _ in range(2):
        with Sent(layout.world_size) as sent:
            engine.forward_backward(micro_batches(batch, mesh=mesh, count=accumulation), targets=8)
            engine.step(learning_rate=0.0)
    return {
        "masters": sum(master.numel() for master in engine.masters()),
        "groups": [[size for is_matrix, size in sizes if is_matrix is wanted] for wanted in (True, False)],
        "sent": sent.bytes,
    }
