"""From a Hugging Face model on the meta device to a model spread over the mesh: the order of application."""

from typing import Any

import torch
from torch import nn

from fourfold.activation import checkpointing
from fourfold.mesh import Mesh, Mpu
from fourfold.model.build import CausalLMLoss
from fourfold.model.load import MakeParameter, load
from fourfold.model.weights import Weights
from fourfold.schema import TrainConfig
from fourfold.zero import deepspeed_internals as internals
from fourfold.zero.engine import ZeroEngine
from fourfold.zero.optimizer import build_optimizer
from fourfold.zero.settings import deepspeed_json


def parallelize(model: Any, weights: Weights, *, config: TrainConfig, mesh: Mesh, device: torch.device) -> ZeroEngine:
    """Collective over the mesh. `model` is a causal LM on meta; each rank reads only the slices that it keeps."""
    internals.quiet_start(device)
    checkpointing.apply(model, config.activation)
    load(model, weights, device=device, make_partitioned=_partitioned(config, mesh=mesh))
    names = dict(model.named_parameters())
    module = CausalLMLoss(model, chunk_size=config.loss.chunk_size)
    optimizer = build_optimizer(module, optim=config.optim)
    engine = ZeroEngine(module, names=names, optimizer=optimizer, config=config, mesh=mesh, device=device)
    if weights.exceeds(next(iter(names.values())).dtype):
        _sharpen_masters(engine, weights)
    return engine


def _sharpen_masters(engine: ZeroEngine, weights: Weights) -> None:
    """DeepSpeed made the fp32 master weights from rounded parameters; read them from the files instead."""
    masters = engine.masters()
    for fragment in engine.fragments():
        values = weights.read_part(fragment.name, fragment.part, start=fragment.start, count=fragment.count)
        fragment.of(masters).copy_(values)


def _partitioned(config: TrainConfig, *, mesh: Mesh) -> MakeParameter | None:
    if config.zero.stage < 3:
        return None
    partitioner = internals.partitioner(
        group=mesh.shard_group, settings=deepspeed_json(config, layout=mesh.layout), mpu=Mpu(mesh)
    )

    def make(shape: torch.Size, dtype: torch.dtype) -> nn.Parameter:
        return internals.new_partitioned_parameter(shape, dtype=dtype, partitioner=partitioner)

    return make
