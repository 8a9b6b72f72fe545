"""What one rank does in the ZeRO parity tests."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fourfold.context.attention import IMPLEMENTATION, register
from fourfold.context.select import splitter
from fourfold.counts import count
from fourfold.data.loader import Loader
from fourfold.layout import Layout
from fourfold.mesh import Mesh, build_mesh
from fourfold.model.build import CausalLMLoss, build_on_meta
from fourfold.model.load import load
from fourfold.model.source import attention_implementation, read_config
from fourfold.model.weights import Weights
from fourfold.parallelize import parallelize
from fourfold.schema import ModelConfig, Offload, Precision, TrainConfig
from fourfold.slices import Slice
from fourfold.zero.engine import ZeroEngine
from tests.reference import batches


def gather(engine: ZeroEngine, buffers: list[Any], *, mesh: Mesh) -> dict[str, Tensor]:
    """Whole tensors by name from the fragments of all ranks of the shard group, of the tp and the pp ranks; every element exactly
    once, and copies that several ranks keep are equal bit by bit."""
    held = _held(engine, buffers, mesh=mesh)
    everywhere: list[Any] = [None] * dist.get_world_size(mesh.model_group)
    dist.all_gather_object(everywhere, held, group=mesh.model_group)
    whole = {}
    for name in dict.fromkeys(name for rank in everywhere for name in rank):
        slices: dict[Slice, Tensor] = {}
        for part, values in (rank[name] for rank in everywhere if name in rank):
            assert torch.equal(slices.setdefault(part, values), values), f"copies of {name} differ"
        whole[name] = torch.full(next(iter(slices)).shape, float("nan"))
        for part, values in slices.items():
            assert part.cut(whole[name])[: part.height].isnan().all(), f"{name} is kept twice"
            part.place(values, into=whole[name])
        assert not whole[name].isnan().any()
    return whole


def _held(engine: ZeroEngine, buffers: list[Any], *, mesh: Mesh) -> dict[str, tuple[Slice, Tensor]]:
    """What the ranks of the shard group hold together, flat and without padding, by name."""
    mine = [(f.name, f.part, f.start, f.of(buffers).clone()) for f in engine.fragments()]
    pieces: list[Any] = [None] * dist.get_world_size(mesh.shard_group)
    dist.all_gather_object(pieces, mine, group=mesh.shard_group)
    held: dict[str, tuple[Slice, Tensor]] = {}
    for name, part, start, values in (piece for rank in pieces for piece in rank):
        _, flat = held.setdefault(name, (part, torch.full((part.numel(),), float("nan"))))
        assert flat[start : start + len(values)].isnan().all(), f"{name} is kept twice"
        flat[start : start + len(values)] = values
    return held


def build(rank: int, *, folder: Path, config: TrainConfig, layout: Layout) -> tuple[ZeroEngine, Mesh]:
    """Its `forward_backward` takes whole rows, of which each cp rank computes its part, as in the training loop."""
    engine, mesh = build_engine(folder=folder, config=config, layout=layout)
    if layout.cp_size * layout.tp_size * layout.pp_size > 1:
        parts, split = engine.forward_backward, split_rows(folder=folder, config=config, mesh=mesh)

        def forward_backward(micro_batches: list[dict[str, Tensor]], *, targets: int) -> Tensor:
            return parts([split(batch) for batch in micro_batches], targets=targets)

        engine.forward_backward = forward_backward  # type: ignore[method-assign]
    return engine, mesh


def build_engine(*, folder: Path, config: TrainConfig, layout: Layout) -> tuple[ZeroEngine, Mesh]:
    mesh = build_mesh(layout, device_type="cpu")
    dtype = torch.bfloat16 if config.precision is Precision.bf16 else torch.float32
    source = ModelConfig(path=str(folder))
    model_config = read_config(folder, model=source)
    attention = attention_implementation(model_config, model=source)
    if layout.cp_size * layout.tp_size * layout.pp_size > 1:
        attention = IMPLEMENTATION
        register()
    hf = build_on_meta(model_config, dtype=dtype, attn_implementation=attention)
    return parallelize(hf, Weights(folder), config=config, mesh=mesh, device=torch.device("cpu")), mesh


def split_rows(*, folder: Path, config: TrainConfig, mesh: Mesh) -> Callable[[dict[str, Tensor]], dict[str, Any]]:
    """From whole rows, with or without document_ids, to this cp rank's part."""
    split = splitter(
        replace(config, **{f"{axis}_size": mesh.layout.size(axis) for axis in ("cp", "tp", "pp")}),
        model_config=read_config(folder, model=ModelConfig(path=str(folder))),
        group=mesh.axis_groups["cp"],
        device=torch.device("cpu"),
    )
    return lambda batch: split({"document_ids": (batch["position_ids"] == 0).cumsum(1) - 1, **batch})


def micro_batches(batch: dict[str, Tensor], *, mesh: Mesh, count: int) -> list[dict[str, Tensor]]:
    """This data rank's rows, cut into `count` micro-batches."""
    mine = {key: value[mesh.data_rank :: mesh.layout.data_size] for key, value in batch.items()}
    return [{key: value[index::count] for key, value in mine.items()} for index in range(count)]


def train(
    rank: int, *, folder: Path, config: TrainConfig, layout: Layout, steps: list[dict[str, Tensor]], accumulation: int
) -> dict[str, Any]:
    """Losses, norms, gradients of each step and the weights at the end, as every rank sees them."""
    engine, mesh = build(rank, folder=folder, config=config, layout=layout)
    history: dict[str, Any] = {"loss": [], "norm": [], "gradients": []}
    for batch in steps:
        targets = int((batch["labels"] != -100).sum())
        micros = micro_batches(batch, mesh=mesh, count=accumulation)
        loss = engine.forward_backward(micros, targets=targets).sum()
        if config.zero.offload.optimizer is Offload.none:  # offloaded gradients are out of reach
            history["gradients"].append(gather(engine, engine.gradients(), mesh=mesh))
        history["norm"].append(engine.step(learning_rate=config.optim.learning_rate))
        dist.all_reduce(loss, group=mesh.loss_group)
        history["loss"].append(loss.item() / targets)
    history["weights"] = gather(engine, engine.masters(), mesh=mesh)
    owned = sum(fragment.count for fragment in engine.fragments())
    total = sum(tensor.numel() for tensor in history["weights"].values())
    history["share"] = owned / total
    return history


def of_each_batch(
    rank: int, *, folder: Path, config: TrainConfig, layout: Layout, batches: dict[str, tuple[dict[str, Tensor], int]]
) -> dict[str, dict[str, Any]]:
    """{loss, norm, gradients} by the name of a batch, each cut into so many micro-batches; all of one model: the
    updates between them have a rate of zero."""
    engine, mesh = build(rank, folder=folder, config=config, layout=layout)
    found = {}
    for name, (batch, accumulation) in batches.items():
        targets = int((batch["labels"] != -100).sum())
        loss = engine.forward_backward(micro_batches(batch, mesh=mesh, count=accumulation), targets=targets).sum()
        gradients = gather(engine, engine.gradients(), mesh=mesh)
        norm = engine.step(learning_rate=0.0)
        dist.all_reduce(loss, group=mesh.loss_group)
        found[name] = {"loss": loss.item() / targets, "norm": norm, "gradients": gradients}
    return found


def bf16_gradients(rank: int, *, folder: Path, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """One process, plain torch: each row a micro-batch in bf16, their gradients added in fp32."""
    from transformers import AutoConfig

    hf = build_on_meta(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16, attn_implementation="sdpa")
    load(hf, Weights(folder), device=torch.device("cpu"))
    module = CausalLMLoss(hf, chunk_size=7)
    targets = int((batch["labels"] != -100).sum())
    total: dict[str, Tensor] = {}
    for row in range(len(batch["labels"])):
        loss = module(**{key: value[row : row + 1] for key, value in batch.items()})
        (loss * 4 / targets).backward()  # times 4 ranks, as there: a power of two, so that bf16 rounds alike
        for name, parameter in hf.named_parameters():
            assert parameter.grad is not None
            total[name] = total.get(name, torch.zeros(())) + parameter.grad.float() / 4
            parameter.grad = None
    return total


class ListedRows:
    """Rows of `batches` as the loader wants them."""

    def __init__(self, batch: dict[str, Tensor]) -> None:
        self._batch = batch

    @property
    def seq_len(self) -> int:
        return self._batch["input_ids"].shape[1]

    def __len__(self) -> int:
        return len(self._batch["input_ids"])

    def row(self, i: int) -> dict[str, Any]:
        row = {key: value[i].numpy() for key, value in self._batch.items()}
        return {**row, "document_ids": (row["position_ids"] == 0).cumsum() - 1}


def train_by_loader(
    rank: int, *, folder: Path, config: TrainConfig, layout: Layout, rows: dict[str, Tensor], epochs: int
) -> dict[str, Any]:
    """Whole epochs through Loader, count and ZeroEngine; what each update saw, and the weights at the end."""
    engine, mesh = build(rank, folder=folder, config=config, layout=layout)
    loader = Loader(
        ListedRows(rows),
        seed=config.seed,
        global_batch_size=config.global_batch_size,
        micro_batch_size=config.micro_batch_size,
        data_rank=mesh.data_rank,
        data_size=layout.data_size,
        pad_id=0,
    )
    updates = []
    for update in loader.updates(0, num_epochs=epochs, max_steps=None):
        counts = count(
            update.micro_batches,
            window=None,
            reasons={},
            group=mesh.loss_group,
            copies=layout.cp_size,
            device=torch.device("cpu"),
        )
        losses = engine.forward_backward(update.micro_batches, targets=counts.targets)
        dist.all_reduce(losses := losses.sum(), group=mesh.loss_group)
        gradients = gather(engine, engine.gradients(), mesh=mesh)
        norm = engine.step(learning_rate=config.optim.learning_rate)
        updates.append(
            {
                "loss": losses.item() / counts.targets,
                "norm": norm,
                "gradients": gradients,
                "tokens": counts.tokens,
                "padding": counts.padding,
                "targets": counts.targets,
            }
        )
    return {"updates": updates, "weights": gather(engine, engine.masters(), mesh=mesh)}


def optimizer_dtypes(
    rank: int, *, folder: Path, config: TrainConfig, layout: Layout, batch: dict[str, Tensor]
) -> dict[str, set[str]]:
    """dtypes of the training weights, master weights and optimizer state after one update."""
    engine, mesh = build(rank, folder=folder, config=config, layout=layout)
    targets = int((batch["labels"] != -100).sum())
    engine.forward_backward(micro_batches(batch, mesh=mesh, count=1), targets=targets)
    engine.step(learning_rate=1e-3)
    state = [value for entry in engine.optimizer.state.values() for value in entry.values() if value.ndim]
    assert state
    return {
        "weights": {str(getattr(p, "ds_tensor", p).dtype) for p in engine.module.parameters()},
        "masters": {str(master.dtype) for master in engine.masters()},
        "state": {str(value.dtype) for value in state},
    }


def decay_only(rank: int, *, folder: Path, config: TrainConfig, layout: Layout) -> dict[str, Any]:
    """Weights before and after an update whose gradient is zero."""
    engine, mesh = build(rank, folder=folder, config=config, layout=layout)
    before = gather(engine, engine.masters(), mesh=mesh)
    batch = micro_batches(batches(0, rows=8), mesh=mesh, count=1)
    engine.forward_backward(batch, targets=10**38)  # the gradient underflows to nothing
    engine.step(learning_rate=config.optim.learning_rate)
    return {"before": before, "after": gather(engine, engine.masters(), mesh=mesh)}
