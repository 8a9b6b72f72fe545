"""What one rank does in the tests of whole models under context parallelism."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fourfold.layout import Layout
from fourfold.schema import AttentionConfig, TrainConfig
from tests.parity.zero_ranks import build_engine, gather, micro_batches, split_rows
from tests.reference import batches

ODD = 13  # tokens of a row: no number of ranks divides it
SPREAD = {  # every way to spread attention over ranks
    "ulysses": "fourfold.context.ulysses.Ulysses",
    "ring": "fourfold.context.ring.Ring",
    "allgather": "fourfold.context.allgather.AllGather",
    "hybrid": "fourfold.context.hybrid.Hybrid",
    "needed_only": "fourfold.context.needed_only.NeededOnly",
}


def attention(name: str, **more: str) -> AttentionConfig:
    return AttentionConfig(name=name, _target_=SPREAD[name], **more)


def packed(step: int, *, rows: int) -> dict[str, Tensor]:
    """As `batches`, of odd length; every fourth row a long document with a masked prompt, every fourth one with
    documents of 1, 5 and 4 tokens and padding behind them."""
    batch = batches(step, rows=rows, length=ODD)
    for row in range(1, rows, 4):
        batch["position_ids"][row] = torch.arange(ODD)
        batch["labels"][row] = torch.cat([batch["input_ids"][row, 1:], torch.tensor([-100])])
        batch["labels"][row, :7] = -100
    for row in range(2, rows, 4):
        _cut(batch, row, lengths=(1, 5, 4))
    batch["document_ids"] = (batch["position_ids"] == 0).cumsum(1) - 1
    for row in range(2, rows, 4):
        batch["document_ids"][row, 10:] = -1
    return batch


def _cut(batch: dict[str, Tensor], row: int, *, lengths: Sequence[int]) -> None:
    ids, labels, positions = (batch[key][row] for key in ("input_ids", "labels", "position_ids"))
    labels.fill_(-100)
    positions.fill_(0)
    start = 0
    for length in lengths:
        end = start + length
        labels[start : end - 1] = ids[start + 1 : end]
        positions[start:end] = torch.arange(length)
        start = end
    ids[start:] = 0


def gradients(
    rank: int,
    *,
    folder: Path,
    config: TrainConfig,
    layout: Layout,
    attentions: list[AttentionConfig],
    steps: list[dict[str, Tensor]],
    accumulation: int,
) -> list[list[dict[str, Any]]]:
    """{loss, norm, gradients} by way of attention and by batch, all of one model: updates have a rate of zero."""
    engine, mesh = build_engine(folder=folder, config=config, layout=layout)
    found = []
    for one in attentions:
        split = split_rows(folder=folder, config=replace(config, attention=one), mesh=mesh)
        found.append([])
        for batch in steps:
            targets = int((batch["labels"] != -100).sum())
            micros = [split(micro) for micro in micro_batches(batch, mesh=mesh, count=accumulation)]
            loss = engine.forward_backward(micros, targets=targets).sum()
            tensors = gather(engine, engine.gradients(), mesh=mesh)
            norm = engine.step(learning_rate=0.0)
            dist.all_reduce(loss, group=mesh.loss_group)
            found[-1].append({"loss": loss.item() / targets, "norm": norm, "gradients": tensors})
    return found
