"""What one rank does in the tests of pipelines at the edges."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fourfold.context.attention import IMPLEMENTATION, register
from fourfold.context.select import splitter
from fourfold.layout import Layout
from fourfold.model.build import CausalLMLoss, LossHead, build_on_meta
from fourfold.model.load import load
from fourfold.model.source import read_config
from fourfold.model.weights import Weights
from fourfold.pipeline.cut import Cut, keep, stages_of_model
from fourfold.pipeline.driver import Hidden, Pipeline
from fourfold.pipeline.schedules import SCHEDULES
from fourfold.schema import AttentionConfig, ModelConfig, PipelineConfig, TrainConfig
from tests.families import family_model
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


def plain_gradients(
    rank: int, *, ways: list[tuple[PipelineConfig, int]], batch: dict[str, Tensor]
) -> list[dict[str, Any]]:
    """{losses, gradients of this rank's parameters} in float64 without DeepSpeed, for each schedule and number of layers; a
    row a micro-batch. The ranks are those of one pipeline."""
    register()
    world = dist.group.WORLD
    assert world is not None
    found = []
    for settings, layers in ways:
        hf = family_model("llama_tied", num_hidden_layers=layers).double()
        hf.set_attn_implementation(IMPLEMENTATION)
        cut = Cut.of(settings, model_config=hf.config, rank=rank, ranks=dist.get_world_size())
        if cut.last and not cut.first:
            hf.lm_head.weight = nn.Parameter(hf.lm_head.weight.detach().clone())
        keep(hf, cut)
        if cut.last:
            hf.lm_head = LossHead(
                hf.lm_head, softcap=None, chunk_size=7, twice=SCHEDULES[settings.schedule].splits_backward
            )
        pipeline = Pipeline(
            stages_of_model(hf, cut),
            cut.stages,
            total=cut.total,
            group=world,
            settings=settings,
            hidden=Hidden(width=hf.config.hidden_size, dtype=torch.float64, parts=1),
            device=torch.device("cpu"),
        )
        losses = pipeline.run(split_by_row(batch, hf.config), scale=1.0, fold=lambda parameter: None)
        gradients = {name: parameter.grad for name, parameter in hf.named_parameters()}
        found.append({"losses": losses, "gradients": gradients})
    return found


def whole_gradients(rank: int, *, layers: list[int], batch: dict[str, Tensor]) -> list[dict[str, Any]]:
    """The same of one process, for each number of layers; those of the tied matrix by use."""
    register()
    found = []
    for count in layers:
        hf = family_model("llama_tied", num_hidden_layers=count).double()
        hf.set_attn_implementation(IMPLEMENTATION)
        hf.lm_head.weight = nn.Parameter(hf.lm_head.weight.detach().clone())
        module = CausalLMLoss(hf, chunk_size=7)
        losses = torch.stack([module(**micro) for micro in split_by_row(batch, hf.config)])
        losses.sum().backward()
        gradients = {name: parameter.grad for name, parameter in hf.named_parameters()}
        found.append({"losses": losses.detach(), "gradients": gradients})
    return found


def split_by_row(batch: dict[str, Tensor], model_config: Any) -> list[dict[str, Any]]:
    """Micro-batches of one row, for one rank."""
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    config = TrainConfig(name="rows", attention=AttentionConfig(name="local"))
    split = splitter(config, model_config=model_config, group=group, device=torch.device("cpu"))
    whole = {"document_ids": (batch["position_ids"] == 0).cumsum(1) - 1, **batch}
    return [split({key: values[row : row + 1] for key, values in whole.items()}) for row in range(len(batch["labels"]))]
