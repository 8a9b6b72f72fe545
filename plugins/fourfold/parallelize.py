"""From a Hugging Face model on the meta device to a model spread over the mesh: the order of application."""

from typing import Any

import torch
from torch import nn

from fourfold.activation import checkpointing
from fourfold.mesh import Mesh, Mpu, neighbours
from fourfold.model.build import CausalLMLoss, final_softcap
from fourfold.model.load import MakeParameter, load
from fourfold.model.weights import Weights
from fourfold.schema import TrainConfig
from fourfold.tensor.apply import apply as apply_tensor
from fourfold.tensor.cuts import Heads
from fourfold.tensor.group import TensorGroup
from fourfold.tensor.head import VocabParallelLossHead
from fourfold.zero import deepspeed_internals as internals
from fourfold.zero.engine import ZeroEngine
from fourfold.zero.optimizer import build_optimizer
from fourfold.zero.settings import deepspeed_json


def parallelize(model: Any, weights: Weights, *, config: TrainConfig, mesh: Mesh, device: torch.device) -> ZeroEngine:
    """Collective over the mesh. `model` is a causal LM on meta; each rank reads only the slices that it keeps."""
    internals.quiet_start(device)
    tensor = _cut_over_tensor_ranks(model, config=config, mesh=mesh)
    checkpointing.apply(model, config.activation)
    load(model, weights, device=device, make_partitioned=_partitioned(config, mesh=mesh))
    names = dict(model.named_parameters())
    module = CausalLMLoss(
        model, chunk_size=config.loss.chunk_size, head=_head(model, config=config, tensor=tensor) if tensor else None
    )
    optimizer = build_optimizer(module, optim=config.optim)
    engine = ZeroEngine(module, names=names, optimizer=optimizer, config=config, mesh=mesh, device=device)
    if weights.exceeds(next(iter(names.values())).dtype):
        _sharpen_masters(engine, weights)
    return engine


def _cut_over_tensor_ranks(model: Any, *, config: TrainConfig, mesh: Mesh) -> TensorGroup | None:
    if mesh.layout.tp_size == 1:
        return None
    group = mesh.axis_groups["tp"]
    tensor = TensorGroup(group, sequence_parallel=config.tensor.sequence_parallel)
    copies = Heads.of(model.config, size=tensor.size).copies
    apply_tensor(
        model,
        tensor=tensor,
        copies_group=neighbours(group, size=copies) if copies > 1 else None,
        plan=config.tensor.plan,
        overlap=config.tensor.overlap
        and config.zero.stage < 3,  # stage 3 lets go of a weight before its gradient is there
        regather=config.tensor.regather,
    )
    return tensor


def _head(model: Any, *, config: TrainConfig, tensor: TensorGroup) -> VocabParallelLossHead:
    softcap, chunk_size = final_softcap(model.config), config.loss.chunk_size
    return VocabParallelLossHead(model.lm_head, tensor=tensor, softcap=softcap, chunk_size=chunk_size)


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
