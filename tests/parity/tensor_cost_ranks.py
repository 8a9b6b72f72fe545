"""What one rank counts in the tests of tensor parallelism's bytes and memory."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fourfold.activation import checkpointing
from fourfold.activation.measure import Live, saved_tensors
from fourfold.context.select import splitter
from fourfold.schema import ActivationConfig, TensorConfig, TrainConfig
from tests.families import family_model
from tests.parity.tensor_ranks import cut_model


@dataclass(frozen=True)
class Way:
    tensor: TensorConfig
    overlap: bool = True
    activation: ActivationConfig = field(default_factory=ActivationConfig)


@dataclass(frozen=True)
class Found:
    sent: dict[str, int]  # as TensorGroup counts
    seen: dict[str, int]  # as torch's operations are called
    shapes: set[tuple[int, ...]]  # of what they are called with
    saved: int  # elements that autograd keeps after the forward pass
    alive: int  # bytes of all tensors that the forward pass left


class Collectives(TorchDispatchMode):
    """Bytes that this rank sends by what torch's own operations are given; apart from the loss's, which are [n] or [2, n]."""

    def __init__(self, size: int, *, chunk: int) -> None:
        super().__init__()
        self.size, self.chunk = size, chunk
        self.sent, self.shapes = Counter[str](), set[tuple[int, ...]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, name = func.name().split("::")
        if namespace == "c10d":
            self._add(name, [one for one in tree_leaves(args) if isinstance(one, Tensor)])
        return func(*args, **(kwargs or {}))

    def _add(self, name: str, tensors: list[Tensor]) -> None:
        self.shapes |= {tuple(one.shape) for one in tensors}
        if all(one.shape[-1] <= self.chunk for one in tensors):
            return
        whole = max(one.nbytes for one in tensors)
        self.sent[name] += (2 if name == "allreduce_" else 1) * whole * (self.size - 1) // self.size


def costs(
    rank: int, *, layers: list[int], changes: dict[str, Any], ways: list[Way], batch: dict[str, Tensor]
) -> list[list[Found]]:
    """Of Llama with each number of layers, by way."""
    return [[_cost(rank, {**changes, "num_hidden_layers": one}, way, batch) for one in layers] for way in ways]


def _cost(rank: int, changes: dict[str, Any], way: Way, batch: dict[str, Tensor]) -> Found:
    hf = family_model("llama", **changes)
    module, tensor = cut_model(hf, settings=way.tensor, overlap=way.overlap)
    checkpointing.apply(hf, way.activation)
    config = TrainConfig(name="cut", tp_size=tensor.size, tensor=way.tensor)
    group = dist.new_group([rank], use_local_synchronization=True)
    split = splitter(config, model_config=hf.config, group=group, device=torch.device("cpu"))
    inputs = split({"document_ids": (batch["position_ids"] == 0).cumsum(1) - 1, **batch})
    with Collectives(tensor.size, chunk=module.model.lm_head.chunk_size) as seen:
        with Live(module.parameters()) as live, saved_tensors(module) as saved:
            loss = module(**inputs)
        alive = live.bytes
        loss.backward()
    return Found(dict(tensor.sent), dict(seen.sent), seen.shapes, saved.elements, alive)
