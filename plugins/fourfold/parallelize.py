"""From a Hugging Face model on the meta device to a ZeroEngine: the one place that knows the order."""

from typing import Any

import torch
from torch import nn

from fourfold.mesh import Mesh, Mpu
from fourfold.model.build import CausalLMLoss
from fourfold.model.load import load
from fourfold.model.weights import Weights
from fourfold.schema import TrainConfig
from fourfold.zero import deepspeed_internals as internals
from fourfold.zero.engine import ZeroEngine
from fourfold.zero.optimizer import build_optimizer
from fourfold.zero.settings import deepspeed_json


def build_engine(model: Any, weights: Weights, *, config: TrainConfig, mesh: Mesh, device: torch.device) -> ZeroEngine:
    """Load `model` (Hugging Face, on meta) from `weights` and put it under ZeRO; collective over the mesh."""
    internals.quiet_start(device)
    make_partitioned = None
    if config.zero.stage == 3:
        partitioner = internals.partitioner(
            group=mesh.shard_group, settings=deepspeed_json(config), mpu=Mpu(mesh)
        )

        def make_partitioned(shape: torch.Size, dtype: torch.dtype) -> nn.Parameter:
            return internals.new_partitioned_parameter(shape, dtype=dtype, partitioner=partitioner)

    load(model, weights, device=device, make_partitioned=make_partitioned)
    names = dict(model.named_parameters())
    module = CausalLMLoss(model, chunk_size=config.loss.chunk_size)
    optimizer = build_optimizer(module, optim=config.optim)
    return ZeroEngine(module, names=names, optimizer=optimizer, config=config, mesh=mesh)
