"""Faults of a rank, made on purpose, that `fourfold verify` has to find and to name."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch

from fourfold.verify.ranks import verified_run

Fault = Callable[[int], AbstractContextManager[Any]]


def run_with(rank: int, *, fault: str, **keywords: Any) -> Any:
    """As verified_run."""
    with FAULTS[fault](rank):
        return verified_run(rank, **keywords)


def nothing_is_reduced(rank: int) -> Any:
    """Gradients of dp_shard, in DeepSpeed."""
    from deepspeed.runtime.zero import stage_1_and_2

    real = stage_1_and_2.dist.all_reduce

    def all_reduce(tensor: Any, *arguments: Any, **keywords: Any) -> Any:
        return None if tensor.numel() > 1000 else real(tensor, *arguments, **keywords)

    return mock.patch.object(stage_1_and_2.dist, "all_reduce", all_reduce)


def without(method: str) -> Fault:
    def fault(rank: int) -> Any:
        return mock.patch(f"fourfold.zero.engine.ZeroEngine.{method}", return_value=None)

    return fault


def halved_loss(rank: int) -> Any:
    from fourfold.model.build import CausalLMLoss

    real = CausalLMLoss.forward
    return mock.patch.object(CausalLMLoss, "forward", lambda self, **batch: real(self, **batch) / 2)


def halved_gradients(rank: int) -> Any:
    from fourfold.zero.engine import ZeroEngine

    real = ZeroEngine.forward_backward
    return mock.patch.object(
        ZeroEngine, "forward_backward", lambda self, batches, *, targets: real(self, batches, targets=2 * targets)
    )


def labels_moved(by: int) -> Fault:
    def fault(rank: int) -> Any:
        from fourfold.context.split import Splitter

        real = Splitter.__call__

        def call(self: Any, batch: Any) -> Any:
            labels = batch["labels"].roll(by, dims=1)
            labels[:, 0 if by > 0 else -1] = -100
            return real(self, {**batch, "labels": labels})

        return mock.patch.object(Splitter, "__call__", call)

    return fault


def one_document_a_row(rank: int) -> Any:
    return mock.patch("fourfold.context.split.documents_of", lambda ids: ((0, len(ids)),))


def untied(rank: int) -> Any:
    return mock.patch("fourfold.parallelize._tied", return_value=None)


def later_stages_pull_harder(rank: int) -> Any:
    from fourfold.zero.engine import ZeroEngine

    real = ZeroEngine.forward_backward

    def forward_backward(self: Any, batches: Any, *, targets: int) -> Any:
        losses = real(self, batches, targets=targets)
        for shard in self.gradient_shards() if rank else []:
            shard.mul_(1.5)
        return losses

    return mock.patch.object(ZeroEngine, "forward_backward", forward_backward)


def everything_is_counted(rank: int) -> Any:
    return mock.patch("fourfold.zero.engine.is_counted", return_value=True)


def everybody_is_the_first(rank: int) -> Any:
    from fourfold.mesh import Mesh

    return mock.patch.object(Mesh, "data_rank", property(lambda self: 0))


def step_is_forgotten(rank: int) -> Any:
    """By the last rank, of the matrices it has."""
    from fourfold.zero.engine import ZeroEngine

    real = ZeroEngine.step

    def step(self: Any, *, learning_rate: float) -> float:
        before = [master.detach().clone() for master in self.masters()]
        norm = real(self, learning_rate=learning_rate)
        with torch.no_grad():
            for master, old in zip(self.masters(), before, strict=True):
                master.copy_(old if rank == 1 else master)
        return norm

    return mock.patch.object(ZeroEngine, "step", step)


def more_is_sent(rank: int) -> Any:
    from fourfold.tensor.group import TensorGroup

    real = TensorGroup._count
    return mock.patch.object(
        TensorGroup, "_count", lambda self, kind, purpose, sent: real(self, kind, purpose, sent + (rank == 1))
    )


def asleep(rank: int, *, seconds: float) -> None:
    if rank == 1:
        time.sleep(seconds)


FAULTS: dict[str, Fault] = {
    "no reduction over dp_shard": nothing_is_reduced,
    "no average over replicas": without("_average_replicas"),
    "no sum over tp": without("_sum_partial_gradients"),
    "halved loss": halved_loss,
    "halved gradients": halved_gradients,
    "labels shifted twice": labels_moved(-1),
    "labels not shifted": labels_moved(1),
    "leaking documents": one_document_a_row,
    "stale tied copy": untied,
    "one stage": later_stages_pull_harder,
    "norm of copies": everything_is_counted,
    "rows read twice": everybody_is_the_first,
    "no step": step_is_forgotten,
    "more bytes": more_is_sent,
}
