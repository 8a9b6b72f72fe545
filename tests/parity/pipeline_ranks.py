"""What one rank does in the tests of pipelines at the edges."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fourfold.context.attention import IMPLEMENTATION, register
from fourfold.context.select import splitter
from fourfold.layout import Layout
from fourfold.model.build import CausalLMLoss, build_on_meta
from fourfold.model.load import load
from fourfold.model.source import read_config
from fourfold.model.weights import Weights
from fourfold.schema import ModelConfig, TrainConfig
from tests.parity.zero_ranks import build, build_engine, gather, micro_batches, split_rows


def norms_by_accumulation(
    rank: int,
    *,
    folder: Path,
    config: TrainConfig,
    layout: Layout,
    batch: dict[str, Tensor],
    accumulations: list[int],
) -> list[float]:
    """Of one and the same global batch, cut into so many micro-batches; updates have a rate of zero."""
    engine, mesh = build(rank, folder=folder, config=config, layout=layout)
    targets = int((batch["labels"] != -100).sum())
    norms = []
    for count in accumulations:
        engine.forward_backward(micro_batches(batch, mesh=mesh, count=count), targets=targets)
        norms.append(engine.step(learning_rate=0.0))
    return norms


def short_updates(
    rank: int, *, folder: Path, config: TrainConfig, layout: Layout, batches: list[dict[str, Tensor]]
) -> list[dict[str, Any]]:
    """{loss, norm, gradients} of each batch, a row a micro-batch."""
    engine, mesh = build(rank, folder=folder, config=config, layout=layout)
    found = []
    for batch in batches:
        targets = int((batch["labels"] != -100).sum())
        micros = micro_batches(batch, mesh=mesh, count=len(batch["labels"]))
        losses = engine.forward_backward(micros, targets=targets)
        assert len(losses) == len(micros)
        gradients = gather(engine, engine.gradients(), mesh=mesh)
        norm = engine.step(learning_rate=0.0)
        found.append({"loss": losses.sum().item() / targets, "norm": norm, "gradients": gradients})
    return found


def evaluated(
    rank: int, *, folder: Path, config: TrainConfig, layout: Layout, batches: list[dict[str, Tensor]]
) -> list[float]:
    """Mean losses, forward only; an update with a rate of zero lies between them."""
    engine, mesh = build_engine(folder=folder, config=config, layout=layout)
    split = split_rows(folder=folder, config=config, mesh=mesh)
    losses = []
    for batch in batches:
        targets = int((batch["labels"] != -100).sum())
        losses.append(engine.forward_only(split(batch)).item() / targets)
        micros = [split(micro) for micro in micro_batches(batch, mesh=mesh, count=1)] * 2
        engine.forward_backward(micros, targets=targets)
        engine.step(learning_rate=0.0)
        dist.barrier()
    return losses


def bf16_truth(rank: int, *, folder: Path, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """One process, no DeepSpeed, the same attention: each row a micro-batch in bf16, their gradients added in fp32."""
    register()
    model_config = read_config(folder, model=ModelConfig(path=str(folder)))
    hf = build_on_meta(model_config, dtype=torch.bfloat16, attn_implementation=IMPLEMENTATION)
    load(hf, Weights(folder), device=torch.device("cpu"))
    module = CausalLMLoss(hf, chunk_size=7)
    world = dist.group.WORLD
    assert world is not None
    split = splitter(TrainConfig(name="truth"), model_config=model_config, group=world, device=torch.device("cpu"))
    documents = (batch["position_ids"] == 0).cumsum(1) - 1
    targets = int((batch["labels"] != -100).sum())
    total: dict[str, Tensor] = {}
    for row in range(len(batch["labels"])):
        one = {key: values[row : row + 1] for key, values in {"document_ids": documents, **batch}.items()}
        (module(**split(one)) / targets).backward()
        for name, parameter in hf.named_parameters():
            assert parameter.grad is not None
            total[name] = total.get(name, torch.zeros(())) + parameter.grad.float()
            parameter.grad = None
    return total
