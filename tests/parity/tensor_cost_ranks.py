"""What one rank counts in the tests of tensor parallelism's bytes and memory."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fourfold.activation import checkpointing
from fourfold.activation.measure import Live, saved_tensors
from fourfold.context.select import splitter
from fourfold.layout import Layout
from fourfold.model.build import CausalLMLoss, build_on_meta
from fourfold.model.load import load
from fourfold.model.source import attention_implementation, read_config
from fourfold.model.weights import Weights
from fourfold.schema import ActivationConfig, OptimConfig, TensorConfig, TrainConfig
from fourfold.slices import MARKS
from fourfold.tensor.measure import Collectives
from tests.families import family_model
from tests.parity.strategies import settings
from tests.parity.tensor_ranks import cut_model
from tests.parity.zero_ranks import build_engine


@dataclass(frozen=True)
class Way:
    tensor: TensorConfig
    overlap: bool = True
    activation: ActivationConfig = field(default_factory=ActivationConfig)


@dataclass(frozen=True)
class Found:
    sent: dict[str, int]  # as TensorGroup counts
    seen: dict[str, int]  # as torch's operations are called
    losses: int  # bytes of the loss's, by the same
    shapes: set[tuple[int, ...]]  # of what they are called with
    saved: int  # elements that autograd keeps after the forward pass
    alive: int  # bytes of all tensors that the forward pass left


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
    with Collectives(tensor.size) as seen:
        with Live(module.parameters()) as live, saved_tensors(module) as saved:
            loss = module(**inputs)
        alive = live.bytes
        loss.backward()
    return Found(dict(tensor.sent), dict(seen.sent), seen.losses, seen.shapes, saved.elements, alive)


class Operations(TorchDispatchMode):
    """Counts calls by operation."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.name()] += 1
        return func(*args, **(kwargs or {}))


def alone(rank: int, *, folder: Path, batch: dict[str, Tensor]) -> dict[str, Any]:
    """What tp_size=1 makes of a model, beside the same model without `parallelize`."""
    config = settings(stage=1, optim=OptimConfig())
    engine, _ = build_engine(folder=folder, config=config, layout=Layout())
    model_config = read_config(folder, model=config.model)
    attention = attention_implementation(model_config, model=config.model)
    hf = build_on_meta(model_config, dtype=torch.float32, attn_implementation=attention)
    load(hf, Weights(folder), device=torch.device("cpu"))
    plain = CausalLMLoss(hf, chunk_size=config.loss.chunk_size)
    return {
        "modules": sorted({type(module).__module__ for module in engine.module.modules()}),
        "marks": sorted({mark for one in engine.module.parameters() for mark in MARKS if hasattr(one, mark)}),
        "ours": _calls(engine.module, batch),
        "plain": _calls(plain, batch),
    }


def _calls(module: nn.Module, batch: dict[str, Tensor]) -> dict[str, int]:
    """Of forward and backward, without what DeepSpeed does with a finished gradient."""
    with Operations() as operations:
        torch.autograd.grad(module(**batch), list(module.parameters()))
    return dict(operations.calls)
