"""From a Hugging Face model on the meta device to a model spread over the mesh: the order of application."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fourfold.activation import checkpointing
from fourfold.groups import new_group
from fourfold.mesh import Mesh
from fourfold.model.build import CausalLMLoss, LossHead, final_softcap
from fourfold.model.load import MakeParameter, load
from fourfold.model.weights import Weights
from fourfold.mpu import Mpu
from fourfold.pipeline.cut import Cut, keep, stages_of_model, untie
from fourfold.pipeline.driver import Hidden, Pipeline
from fourfold.pipeline.schedules import SCHEDULES
from fourfold.schema import TrainConfig
from fourfold.tensor.apply import apply as apply_tensor
from fourfold.tensor.group import TensorGroup
from fourfold.tensor.head import VocabParallelLossHead
from fourfold.zero import deepspeed_internals as internals
from fourfold.zero.engine import Tied, ZeroEngine
from fourfold.zero.optimizer import build_optimizer
from fourfold.zero.settings import deepspeed_json


@dataclass(frozen=True)
class Cuts:
    """What of a model one rank has: along the layers, and across them. None where the axis has one rank."""

    stages: Cut | None
    tensor: TensorGroup | None


def parallelize(model: Any, weights: Weights, *, config: TrainConfig, mesh: Mesh, device: torch.device) -> ZeroEngine:
    """Collective over the mesh. `model` is a causal LM on meta; each rank reads only the slices that it keeps."""
    internals.quiet_start(device)
    cuts = cut_model(model, config=config, mesh=mesh)
    load(model, weights, device=device, make_partitioned=_partitioned(config, mesh=mesh))
    names = stored_names(model)
    module = trained_module(model, cuts, config=config, mesh=mesh)
    stages = cuts.stages
    engine = ZeroEngine(
        module,
        names=names,
        optimizer=build_optimizer(module, optim=config.optim),
        config=config,
        mesh=mesh,
        device=device,
        pipeline=_pipeline(module, stages, model=model, config=config, mesh=mesh, device=device) if stages else None,
        tied=_tied(names, stages, model=model, mesh=mesh) if stages else None,
    )
    if weights.exceeds(next(iter(names.values())).dtype):
        _sharpen_masters(engine, weights)
    return engine


def cut_model(model: Any, *, config: TrainConfig, mesh: Mesh) -> Cuts:
    """Leave in `model`, still on meta, what this rank has. Collective over the mesh."""
    stages = _cut_into_stages(model, config=config, mesh=mesh)
    tensor = _cut_over_tensor_ranks(model, config=config, mesh=mesh)
    if stages:
        untie(model, stages)
    checkpointing.apply(model, config.activation, ranges=stages.layers if stages else None)
    return Cuts(stages, tensor)


def stored_names(model: Any) -> dict[str, nn.Parameter]:
    """Parameters by the names that they have in a checkpoint's files, tied ones once."""
    return {getattr(parameter, "stored_as", name): parameter for name, parameter in model.named_parameters()}


def trained_module(model: Any, cuts: Cuts, *, config: TrainConfig, mesh: Mesh) -> nn.Module:
    """What is called in training: the stages of a pipeline rank, or all of the model with its loss."""
    if cuts.stages is None or cuts.stages.last:
        twice = _splits_backward(config, mesh=mesh)
        model.lm_head = _head(model, config=config, tensor=cuts.tensor, twice=twice)
    return nn.ModuleList(stages_of_model(model, cuts.stages)) if cuts.stages else CausalLMLoss(model)


def _cut_into_stages(model: Any, *, config: TrainConfig, mesh: Mesh) -> Cut | None:
    ranks = mesh.layout.pp_size
    if ranks == 1:
        return None
    rank = dist.get_rank(mesh.axis_groups["pp"])
    cut = Cut.of(config.pipeline, model_config=model.config, rank=rank, ranks=ranks)
    keep(model, cut)
    return cut


def _pipeline(module: Any, cut: Cut, *, model: Any, config: TrainConfig, mesh: Mesh, device: torch.device) -> Pipeline:
    return Pipeline(
        list(module),
        cut.stages,
        total=cut.total,
        group=mesh.axis_groups["pp"],
        settings=config.pipeline,
        hidden=Hidden(
            width=model.config.hidden_size,
            dtype=model.dtype,
            parts=mesh.layout.tp_size if config.tensor.sequence_parallel else 1,
        ),
        device=device,
    )


def _tied(names: dict[str, nn.Parameter], cut: Cut, *, model: Any, mesh: Mesh) -> Tied | None:
    """Of a rank with one of two copies of the tied matrix: all ranks with one that see other tokens or another use of it."""
    if not model.config.tie_word_embeddings or cut.first == cut.last:
        return None
    layout, last = mesh.layout, mesh.layout.pp_size - 1
    ranks = layout.group(("cp", "pp", "dp_shard", "dp_replicate"), rank=mesh.rank)
    copies = [rank for rank in ranks if layout.coordinate(rank)["pp"] in (0, last)]
    return Tied(
        names["model.embed_tokens.weight"],
        new_group(copies, like=mesh.world_group),
        brings=dist.get_rank(mesh.loss_group) == 0,
    )


def _cut_over_tensor_ranks(model: Any, *, config: TrainConfig, mesh: Mesh) -> TensorGroup | None:
    if mesh.layout.tp_size == 1:
        return None
    tensor = TensorGroup(mesh.axis_groups["tp"], sequence_parallel=config.tensor.sequence_parallel)
    apply_tensor(
        model,
        tensor=tensor,
        plan=config.tensor.plan,
        # stage 3 lets go of a weight before its gradient is there; a backward pass in two halves would send twice
        overlap=config.tensor.overlap and config.zero.stage < 3 and not _splits_backward(config, mesh=mesh),
        regather=config.tensor.regather,
    )
    return tensor


def _head(model: Any, *, config: TrainConfig, tensor: TensorGroup | None, twice: bool) -> nn.Module:
    settings: dict[str, Any] = {
        "softcap": final_softcap(model.config),
        "chunk_size": config.loss.chunk_size,
        "twice": twice,
    }
    return (
        VocabParallelLossHead(model.lm_head, tensor=tensor, **settings)
        if tensor
        else LossHead(model.lm_head, **settings)
    )


def _splits_backward(config: TrainConfig, *, mesh: Mesh) -> bool:
    return mesh.layout.pp_size > 1 and SCHEDULES[config.pipeline.schedule].splits_backward


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
