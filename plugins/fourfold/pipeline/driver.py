"""Runs the stages of one rank by a schedule of torch.distributed.pipelining: all micro-batches of an update at a time.

What is split: the layers, over the pp ranks. What is sent: hidden[B, s, D] of each micro-batch from a stage to the next, and
its gradient back; s is what context and sequence parallelism leave of the tokens, so that nothing is sent twice. Everything
else a micro-batch needs is made on each rank from the same rows. Gradients stay whole on each rank until the schedule is
through; the caller reduces them once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from fourfold.pipeline.schedules import SCHEDULES, rank_of, refusals
from fourfold.schema import PipelineConfig

IGNORED = -100
Fold = Callable[[nn.Parameter], None]  # adds a parameter's `grad` to its sum, where that is kept in fp32


@dataclass(frozen=True, kw_only=True)
class Hidden:
    """What goes from stage to stage."""

    width: int
    dtype: torch.dtype
    parts: int  # in which sequence parallelism cuts a row's tokens


class Pipeline:
    """The stages of this rank, `indices` of them of `total`, lowest first. All calls are collective over `group`."""

    def __init__(
        self,
        stages: list[Any],
        indices: list[int],
        *,
        total: int,
        group: dist.ProcessGroup,
        settings: PipelineConfig,
        hidden: Hidden,
        device: torch.device,
    ) -> None:
        self._stages, self._indices, self._total = stages, indices, total
        self._group, self._settings, self._hidden, self._device = group, settings, hidden, device
        self._ranks = dist.get_process_group_ranks(group)
        self._schedules: dict[tuple[int, int, int], Any] = {}
        self._losses: dict[int, Tensor] = {}
        self._scale = 1.0

    def run(self, micro_batches: list[dict[str, Any]], *, scale: float, fold: Fold) -> Tensor:
        """Gradients of scale x loss; returns the sums of token losses [len(micro_batches)] on every rank.

        A schedule that needs more micro-batches gets some without a target.
        """
        filled = self._filled(micro_batches)
        rows, tokens = filled[0]["input_ids"].shape
        schedule = self._schedule(rows, tokens, len(filled), fold=fold)
        self._losses, self._scale = {}, scale
        schedule.step(
            arg_mbs=[(batch["input_ids"],) for batch in filled] if self._has_first else None,
            kwarg_mbs=[{k: v for k, v in batch.items() if k != "input_ids"} for batch in filled],
            target_mbs=[torch.tensor(number) for number in range(len(filled))] if self._has_last else None,
            return_outputs=False,
        )
        losses = torch.zeros(len(micro_batches), device=self._device)
        if self._has_last:
            losses = torch.stack([self._losses[number] for number in range(len(micro_batches))])
        return self._from_last(losses)

    def evaluate(self, batch: dict[str, Any]) -> Tensor:
        """Sum of the token losses of one batch, forward only. torch's schedules in a V cannot do it (2.15)."""
        rows, tokens = batch["input_ids"].shape
        rest = {key: value for key, value in batch.items() if key != "input_ids"}
        result, held = torch.zeros((), device=self._device), -1
        for index, stage in zip(self._indices, self._stages, strict=True):
            if index == 0:
                x = batch["input_ids"]
            elif held == index - 1:
                x = result
            else:
                x = self._empty(rows, tokens, device=self._device)
                dist.recv(x, src=self._world_rank(index - 1), group=self._group)
            result, held = stage(x, **rest), index
            if index + 1 < self._total and index + 1 not in self._indices:
                dist.send(result.contiguous(), dst=self._world_rank(index + 1), group=self._group)
        return self._from_last(result if self._has_last else torch.zeros((), device=self._device))

    @property
    def _has_first(self) -> bool:
        return self._indices[0] == 0

    @property
    def _has_last(self) -> bool:
        return self._indices[-1] == self._total - 1

    def _world_rank(self, stage: int) -> int:
        return self._ranks[rank_of(stage, ranks=len(self._ranks), settings=self._settings)]

    def _from_last(self, losses: Tensor) -> Tensor:
        losses = losses.float().contiguous()
        dist.broadcast(losses, src=self._world_rank(self._total - 1), group=self._group)
        return losses

    def _filled(self, micro_batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
        missing = self._legal(len(micro_batches)) - len(micro_batches)
        empty = {**micro_batches[0], "labels": torch.full_like(micro_batches[0]["labels"], IGNORED)}
        return [*micro_batches, *[empty] * missing]

    def _legal(self, micro_batches: int) -> int:
        ranks = len(self._ranks)
        return next(
            number
            for number in count(micro_batches)
            if not list(refusals(self._settings, ranks=ranks, micro_batches=number))
        )

    def _schedule(self, rows: int, tokens: int, micro_batches: int, *, fold: Fold) -> Any:
        """Made anew for rows of another shape: torch's stages are for one."""
        key = (rows, tokens, micro_batches)
        if key not in self._schedules:
            stages = [
                _Stage(
                    stage,
                    index,
                    self._total,
                    self._device,
                    group=self._group,
                    fold=fold,
                    **self._shapes(index, rows, tokens),
                )
                for index, stage in zip(self._indices, self._stages, strict=True)
            ]
            made = getattr(pipelining, SCHEDULES[self._settings.schedule].class_name)
            given = stages[0] if issubclass(made, PipelineScheduleSingle) else stages
            self._schedules[key] = made(given, micro_batches, loss_fn=self._loss, scale_grads=False)
        return self._schedules[key]

    def _loss(self, output: Tensor, number: Tensor) -> Tensor:
        self._losses[int(number)] = output.detach()
        return output * self._scale

    def _shapes(self, index: int, rows: int, tokens: int) -> dict[str, Tensor]:
        meta = torch.device("meta")
        between = self._empty(rows, tokens, device=meta).requires_grad_()
        first = torch.empty(rows, tokens, dtype=torch.long, device=meta)
        loss = torch.empty((), device=meta, requires_grad=True)
        return {
            "input_args": first if index == 0 else between,
            "output_args": loss if index == self._total - 1 else between,
        }

    def _empty(self, rows: int, tokens: int, *, device: torch.device) -> Tensor:
        hidden = self._hidden
        return torch.empty(rows, tokens // hidden.parts, hidden.width, dtype=hidden.dtype, device=device)


class _Stage(PipelineStage):
    """Schedules that compute weight gradients on their own write them to `grad` past every hook: they are added up after
    each micro-batch."""

    def __init__(self, *arguments: Any, fold: Fold, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._fold = fold

    @cached_property
    def _parameters_of_stage(self) -> list[nn.Parameter]:
        return list(self.submod.parameters())

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward=last_backward)
        for parameter in self._parameters_of_stage:
            if parameter.grad is not None:
                self._fold(parameter)
