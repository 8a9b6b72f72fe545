"""What one rank does in the tests of whole models under context parallelism."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fourfold.activation import checkpointing
from fourfold.context.attention import IMPLEMENTATION, Context, register
from fourfold.context.select import splitter
from fourfold.context.sharding import positions
from fourfold.counts import Counts, count
from fourfold.layout import Layout
from fourfold.mesh import build_mesh
from fourfold.model.build import CausalLMLoss, build_on_meta
from fourfold.model.load import load
from fourfold.model.source import read_config
from fourfold.model.weights import Weights
from fourfold.schema import ActivationConfig, AttentionConfig, Checkpointing, ModelConfig, TrainConfig
from tests.parity.strategies import SPREAD
from tests.parity.zero_ranks import build, build_engine, gather, micro_batches, split_rows
from tests.reference import batches

ODD = 13  # tokens of a row: no number of ranks divides it


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


class Watched:
    """A model without DeepSpeed, its rows split over all ranks; what it was given and what came out, whole again."""

    def __init__(self, folder: Path, *, attention: AttentionConfig | None = None) -> None:
        """`attention` None: that of one process."""
        register()
        config = TrainConfig(name="watched", cp_size=dist.get_world_size(), attention=attention or AttentionConfig())
        model_config = read_config(folder, model=ModelConfig(path=str(folder)))
        self.hf = build_on_meta(model_config, dtype=torch.float32, attn_implementation=IMPLEMENTATION)
        load(self.hf, Weights(folder), device=torch.device("cpu"))
        self.module = CausalLMLoss(self.hf, chunk_size=7)
        world = dist.group.WORLD
        assert world is not None
        self.split = splitter(config, model_config=model_config, group=world, device=torch.device("cpu"))
        self._seen: dict[str, Tensor] = {}
        self.hf.model.register_forward_hook(self._see_hidden)
        self.hf.model.rotary_emb.register_forward_pre_hook(self._see_positions, with_kwargs=True)

    def _see_hidden(self, module: Any, args: Any, output: Any) -> None:
        self._seen["hidden"] = output.last_hidden_state.detach()

    def _see_positions(self, module: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self._seen["positions"] = keywords["position_ids"] if "position_ids" in keywords else args[1]

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """The sum over this rank's targets."""
        documents = (batch["position_ids"] == 0).cumsum(1) - 1
        self._part = self.split({"document_ids": documents, **batch})
        loss: Tensor = self.module(**self._part)
        return loss

    def seen(self) -> dict[str, Tensor]:
        """Of the last forward pass: hidden[B, S, H], positions[B, S] and labels[B, S] in the order of the rows."""
        context: Context = self._part["context"]
        mine = {**self._seen, "labels": self._part["labels"]}
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, mine)
        owners = [row.ownership for row in context.sharding.rows]
        return {
            key: torch.stack([_unpermuted([part[key][row] for part in parts], one) for row, one in enumerate(owners)])
            for key in mine
        }


def _unpermuted(parts: list[Tensor], ownership: Any) -> Tensor:
    whole = torch.cat(parts)
    order = torch.cat([positions(held) for held in ownership])
    assert torch.equal(order.sort().values, torch.arange(len(whole))), "every token is held once"
    return torch.empty_like(whole).index_copy_(0, order, whole)


def observed(
    rank: int, *, folder: Path, attentions: Sequence[AttentionConfig | None], steps: list[dict[str, Tensor]]
) -> list[list[dict[str, Tensor]]]:
    """`Watched.seen` by way of attention and by batch."""
    found = []
    for one in attentions:
        model = Watched(folder, attention=one)
        found.append([])
        for batch in steps:
            with torch.no_grad():
                model.loss(batch)
            found[-1].append(model.seen())
    return found


def two_models(
    rank: int, *, folders: list[Path], attention: AttentionConfig, batch: dict[str, Tensor]
) -> list[dict[str, Tensor]]:
    """Gradients of the summed loss of two models whose passes take turns in one process."""
    models = [Watched(folder, attention=attention) for folder in folders]
    for loss in [model.loss(batch) for model in models]:
        loss.backward()
    found = []
    for model in models:
        tensors = {name: parameter.grad for name, parameter in model.hf.named_parameters()}
        for tensor in tensors.values():
            assert tensor is not None
            dist.all_reduce(tensor)
        found.append(tensors)
    return found


def counted(rank: int, *, layout: Layout, rows: dict[str, Tensor]) -> Counts:
    """One row for each data rank."""
    mesh = build_mesh(layout, device_type="cpu")
    mine = {key: values[mesh.data_rank :: layout.data_size] for key, values in rows.items()}
    return count(
        [mine],
        window=2,
        reasons={},
        group=mesh.loss_group,
        copies=layout.cp_size,
        device=torch.device("cpu"),
    )


def disagreeing(
    rank: int, *, folder: Path, config: TrainConfig, layout: Layout, alike: int, batches: list[dict[str, Tensor]]
) -> str:
    """How the first update ends when each rank has rows of its own, after so many micro-batches that are the same."""
    engine, _ = build(rank, folder=folder, config=config, layout=layout)
    try:
        engine.forward_backward([batches[0]] * alike + [batches[rank]], targets=1)
    except RuntimeError as error:
        return str(error)
    return "was not noticed"


class _AttentionCounter(TorchDispatchMode):
    """How often the fused attention op really runs forward; what selective checkpointing kept does not come here."""

    runs = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.runs += func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        return func(*args, **(kwargs or {}))


def attention_runs(
    rank: int, *, folder: Path, attentions: list[AttentionConfig], batch: dict[str, Tensor]
) -> list[dict[Checkpointing, int]]:
    """Runs of the kernel in forward and backward, by way of attention and by what is checkpointed."""
    found: list[dict[Checkpointing, int]] = []
    for one in attentions:
        found.append({})
        for mode in Checkpointing:
            model = Watched(folder, attention=one)
            checkpointing.apply(model.hf, ActivationConfig(checkpointing=mode))
            with _AttentionCounter() as counter:
                model.loss(batch).backward()
            found[-1][mode] = counter.runs
    return found
