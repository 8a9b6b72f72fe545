"""ZeRO 0-3 and HSDP over DeepSpeed, with one normaliser, one norm and one accumulation rule for all of them.

What is split: optimizer state (stage 1), gradients (2) and parameters (3) over the shard group, dp_shard x cp. Replicas
of a shard hold equal copies: their averaged gradients are averaged once more, one all-reduce of the shard a step
(HSDP: ZeRO/FSDP inside a group, data parallelism across; dp_shard_size=1 is plain data parallelism).
Bytes a step and rank, parameters P, shard group s, replicas r, element size e: 2 P e (s-1)/s for stages 1 and 2,
3 P e (s-1)/s for stage 3 without accumulation (Rajbhandari et al. 2020, section 7), and 2 (P/s) 4 (r-1)/r for replicas.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fourfold.mesh import Mesh
from fourfold.mpu import Mpu
from fourfold.schema import TrainConfig
from fourfold.slices import Slice, is_counted, slice_of
from fourfold.zero import deepspeed_internals as internals
from fourfold.zero.settings import deepspeed_json


@dataclass(frozen=True)
class Fragment:
    """What this rank keeps the master weight of: elements [start, start + count) of the flattened `part` of a parameter,
    without its padding."""

    name: str
    part: Slice
    start: int
    count: int
    buffer: int  # which flat fp32 buffer
    offset: int  # where in it
    stored: bool = True  # by this rank; False where another rank of the tensor-parallel group stores its copy

    @property
    def shape(self) -> torch.Size:
        """Of the whole parameter."""
        return self.part.shape

    def of(self, buffers: list[Any]) -> Tensor:
        """View [count] of this fragment in `buffers`, one flat tensor for each master buffer."""
        return buffers[self.buffer].detach()[self.offset : self.offset + self.count]


class Runner(Protocol):
    """Runs a module that lies in stages on several ranks (pipeline/driver.py)."""

    def run(self, micro_batches: list[dict[str, Any]], *, scale: float, fold: Any) -> Tensor: ...

    def evaluate(self, batch: dict[str, Any]) -> Tensor: ...


@dataclass(frozen=True)
class Tied:
    """A parameter that lies on two pipeline stages, and the group of all ranks with a copy, over data ranks too."""

    parameter: nn.Parameter
    group: dist.ProcessGroup
    brings: bool  # the sum to the reduction of its stage; one rank does


class ZeroEngine:
    """A module under DeepSpeed. One update is `forward_backward`, then `step`."""

    def __init__(
        self,
        module: nn.Module,
        *,
        names: dict[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
        config: TrainConfig,
        mesh: Mesh,
        device: torch.device,
        pipeline: Runner | None = None,
        tied: Tied | None = None,
    ) -> None:
        """`names` are the parameters of `module` under the names that checkpoints give them. `pipeline` runs the module's
        parts, where it has stages; `tied` is a parameter of which another stage has a copy."""
        for parameter in module.parameters():  # DeepSpeed's name for "this rank counts it in the norm"
            parameter.tensor_model_parallel = is_counted(parameter)  # type: ignore[attr-defined]
        self._mesh = mesh
        self.device = device
        self._deepspeed = internals.initialize(
            module, optimizer=optimizer, settings=deepspeed_json(config, layout=mesh.layout), mpu=Mpu(mesh)
        )
        self._pipeline, self._tied = pipeline, tied
        # without a pipeline stages 2 and 3 keep gradient shards only: they reduce once a micro-batch
        self._reduces_once = config.zero.stage < 2 or pipeline is not None
        if config.zero.stage < 3:
            internals.use_fp32_shards(self._deepspeed.optimizer, whole_gradients=self._reduces_once)
            internals.share_fp32_masters(self._deepspeed.optimizer)
            if mesh.layout.partition_size == 1:
                internals.skip_reduction(self._deepspeed.optimizer)
        else:
            internals.use_flat_gradients(self._deepspeed.optimizer)
            if pipeline is not None and config.zero.fp32_accumulation:
                internals.use_fp32_gradients(module)
        internals.use_blocked_norm(self._deepspeed.optimizer)
        self._fold = internals.folding(self._deepspeed.optimizer)
        self._one_reduction = self._deepspeed.coalesce_grad_reduction
        self._names = {id(parameter): name for name, parameter in names.items()}
        self.optimizer = optimizer
        self.module: nn.Module = self._deepspeed.module

    def forward_backward(self, micro_batches: list[dict[str, Any]], *, targets: int) -> Tensor:
        """Gradients of one update; returns the sum of token losses of each micro-batch [len(micro_batches)], detached.

        `targets` is the number of valid targets of the global batch over all data ranks and micro-batches: the only
        normaliser. DeepSpeed averages over the shard group and we over the replicas, so each rank's sum is scaled by
        the number of ranks first. All ranks must bring equally many micro-batches.
        """
        scale = dist.get_world_size(self._mesh.loss_group) / targets
        run = self._one_by_one if self._pipeline is None else self._in_stages
        with self._one_reduction() if self._reduces_once else nullcontext():
            losses = run(micro_batches, scale)
        self._sum_partial_gradients()
        self._average_replicas()
        return losses

    def _one_by_one(self, micro_batches: list[dict[str, Any]], scale: float) -> Tensor:
        losses = []
        for index, batch in enumerate(micro_batches):
            self._deepspeed.set_gradient_accumulation_boundary(index == len(micro_batches) - 1)
            loss = self._deepspeed(**self._to_device(batch))
            (loss * scale).backward()
            losses.append(loss.detach())
        return torch.stack(losses)

    def _in_stages(self, micro_batches: list[dict[str, Any]], scale: float) -> Tensor:
        assert self._pipeline is not None
        batches = [self._to_device(batch) for batch in micro_batches]  # all are on their way at the same time
        losses = self._pipeline.run(batches, scale=scale, fold=self._fold)
        if self._tied is not None:
            self._sum_copies(self._tied)
        return losses

    @staticmethod
    def _sum_copies(tied: Tied) -> None:
        """Over all ranks at a time, and brought by one to the reduction that follows, where the others have zero: reduced by
        each stage, of which buffers lie otherwise, the copies would be added up in other orders and drift apart."""
        gradient = internals.whole_gradient(tied.parameter)
        dist.all_reduce(gradient, group=tied.group)
        if not tied.brings:
            gradient.zero_()

    def _sum_partial_gradients(self) -> None:
        """Of parameters that several tp ranks hold copies of, each having seen a part of what they act on: one sum an update
        for each group, of all of them. The ranks hold the same slices of these, in the same order."""
        parts: dict[Any, list[Tensor]] = {}
        for parameter, _, buffer, offset, count in internals.owned_slices(self._deepspeed):
            group = getattr(parameter, "summed_over", None)
            if group is not None:
                views = internals.gradient_views(self._deepspeed, buffer, start=offset, count=count)
                parts.setdefault(group, []).extend(views)
        for group, tensors in parts.items():
            flat = torch.cat(tensors)
            dist.all_reduce(flat, group=group)
            for tensor, total in zip(tensors, flat.split([len(tensor) for tensor in tensors]), strict=True):
                tensor.copy_(total)

    def _average_replicas(self) -> None:
        replicas = self._mesh.layout.dp_replicate_size
        if replicas == 1:
            return
        for shard in self.gradient_shards():
            dist.all_reduce(shard, group=self._mesh.replicate_group)
            shard.div_(replicas)

    def step(self, *, learning_rate: float) -> float:
        """Clip, update, publish the new weights; returns the global gradient norm before clipping.

        The norm is inf or nan if a gradient is; then nothing was updated.
        """
        for group in self._deepspeed.optimizer.param_groups:
            group["lr"] = learning_rate
        self._deepspeed.step()
        if self._deepspeed.optimizer.overflow:
            return float("nan")
        return float(self._deepspeed.get_global_grad_norm())

    def forward_only(self, batch: dict[str, Any]) -> Tensor:
        """Sum of the token losses of one batch, without gradients. Every rank must call it equally often."""
        self.module.eval()
        try:
            with torch.no_grad():
                if self._pipeline is not None:
                    return self._pipeline.evaluate(self._to_device(batch))
                return self._deepspeed(**self._to_device(batch))
        finally:
            self.module.train()

    def _to_device(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {
            key: value.to(self.device, non_blocking=True) if torch.is_tensor(value) else value
            for key, value in batch.items()
        }

    def fragments(self) -> list[Fragment]:
        """Slices of the parameters that this rank keeps, by name; together with the other ranks of the shard group
        they cover every element once that this rank of the tensor-parallel group holds."""
        return [
            Fragment(self._names[id(p)], part, start, kept, buffer, offset, stored=is_counted(p))
            for p, start, buffer, offset, count in internals.owned_slices(self._deepspeed)
            for part in [slice_of(p)]
            for kept in [min(count, part.numel() - start)]
            if kept > 0  # the rest is padding
        ]

    def shapes(self) -> dict[str, torch.Size]:
        """Global shape of every parameter by name."""
        return {self._names[id(p)]: slice_of(p).shape for p in self.module.parameters()}

    def weight_dtype(self) -> torch.dtype:
        """Of the weights that are trained; master weights are fp32 whatever it is."""
        return next(self.module.parameters()).dtype

    def masters(self) -> list[nn.Parameter]:
        """Flat fp32 master weights of this rank."""
        return internals.master_buffers(self._deepspeed)

    def gradients(self) -> list[Tensor]:
        """Averaged gradients, laid out as `masters`; valid between `forward_backward` and `step`."""
        return internals.gradient_buffers(self._deepspeed)

    def gradient_shards(self) -> list[Tensor]:
        """The tensors that `step` will read, to change in place; their order and cut are DeepSpeed's."""
        return internals.averaged_gradients(self._deepspeed)

    def publish(self) -> None:
        """After a write to the masters: make the weights used for training equal to them, on all ranks."""
        internals.publish_masters(self._deepspeed)
