"""What one rank does in the tests of tensor parallelism without DeepSpeed."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fourfold.context.attention import IMPLEMENTATION, register
from fourfold.context.select import splitter
from fourfold.device import seed_everything
from fourfold.layout import Layout
from fourfold.loop import rank_of_tokens
from fourfold.mesh import build_mesh
from fourfold.model.build import CausalLMLoss, final_softcap
from fourfold.schema import TensorConfig, TrainConfig
from fourfold.slices import Slice
from fourfold.tensor.apply import apply
from fourfold.tensor.cuts import even
from fourfold.tensor.group import TensorGroup
from fourfold.tensor.head import VocabParallelLossHead
from fourfold.tensor.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from fourfold.tensor.regions import Block
from tests.families import family_model
from tests.parity.zero_ranks import build, micro_batches


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def gathered(values: Tensor, part: Slice | None) -> Tensor:
    """The whole tensor of which each rank has `values`: its part, or all of it, the same everywhere."""
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, (values, part))
    if part is None:
        assert all(torch.equal(values, other) for other, _ in everywhere), "copies differ"
        return values
    whole = torch.full(part.shape, float("nan"), dtype=values.dtype)
    for held, one in everywhere:
        one.place(held, into=whole)
        assert not held[one.height :].any(), "padding has a gradient"
    assert not whole.isnan().any()
    return whole


def gradient(parameter: nn.Parameter) -> Tensor:
    """The whole gradient of a parameter of which each rank has a slice or a copy."""
    assert parameter.grad is not None
    total = parameter.grad.clone()
    group = getattr(parameter, "summed_over", None)
    if group is not None:
        dist.all_reduce(total, group=group)
    return gathered(total, getattr(parameter, "tensor_slice", None))


def layers(rank: int, *, tensors: dict[str, Tensor], ways: list[dict[str, bool]]) -> list[dict[str, Any]]:
    return [_layers(rank, tensors=tensors, **way) for way in ways]


def _layers(
    rank: int, *, tensors: dict[str, Tensor], sequence_parallel: bool, overlap: bool, regather: bool
) -> dict[str, Any]:
    """Embedding, two columns, one row with bias, in float64; output and gradients whole again, and the layers themselves."""
    tensor = TensorGroup(world(), sequence_parallel=sequence_parallel)
    plain = plain_layers(tensors)
    block = Block(tensor, overlap=overlap, regather=regather)
    embedding = VocabParallelEmbedding.from_embedding(plain["embedding"], tensor=tensor)
    cut = even(plain["gate"].out_features, size=tensor.size)
    gate, up = (ColumnParallelLinear.from_linear(plain[name], cut, block=block) for name in ("gate", "up"))
    down = RowParallelLinear.from_linear(plain["down"], cut, tensor=tensor)
    if sequence_parallel:
        down.bias.summed_over = tensor.group
    whole = block.enter(embedding(tensors["ids"]))
    out = down(torch.tanh(gate(whole)) * up(whole))
    mine = tensors["upstream"].tensor_split(tensor.size, dim=1)[rank] if sequence_parallel else tensors["upstream"]
    out.backward(mine)
    made = {"embedding": embedding, "gate": gate, "up": up, "down": down}
    again = [embedding.to_embedding(), gate.to_linear(), up.to_linear(), down.to_linear()]
    return {
        "out": torch.cat(all_of(out), dim=1) if sequence_parallel else out.detach(),
        "gradients": {f"{n}.{k}": gradient(p) for n, layer in made.items() for k, p in layer.named_parameters()},
        "again": {f"{n}.{k}": p for n, one in zip(made, again, strict=True) for k, p in one.state_dict().items()},
        "sent": dict(tensor.sent),
    }


def plain_layers(tensors: dict[str, Tensor]) -> dict[str, Any]:
    made: dict[str, Any] = {"embedding": nn.Embedding(*tensors["embedding.weight"].shape, dtype=torch.float64)}
    for name in ("gate", "up", "down"):
        out, into = tensors[f"{name}.weight"].shape
        made[name] = nn.Linear(into, out, bias=f"{name}.bias" in tensors, dtype=torch.float64)
    for name, layer in made.items():
        layer.load_state_dict({key: tensors[f"{name}.{key}"] for key in layer.state_dict()})
    return made


def all_of(values: Tensor) -> list[Tensor]:
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, values.detach())
    return everywhere


def cut_model(hf: Any, *, settings: TensorConfig, overlap: bool | None = None) -> tuple[CausalLMLoss, TensorGroup]:
    """A whole model cut over all ranks."""
    register()
    hf.set_attn_implementation(IMPLEMENTATION)
    tensor = TensorGroup(world(), sequence_parallel=settings.sequence_parallel)
    apply(
        hf,
        tensor=tensor,
        plan=settings.plan,
        overlap=settings.overlap if overlap is None else overlap,
        regather=settings.regather,
    )
    softcap = final_softcap(hf.config)
    hf.lm_head = VocabParallelLossHead(hf.lm_head, tensor=tensor, softcap=softcap, chunk_size=7)
    return CausalLMLoss(hf), tensor


def family_gradients(
    rank: int, *, names: list[str], changes: dict[str, Any], settings: list[TensorConfig], batch: dict[str, Tensor]
) -> list[dict[str, Any]]:
    """{loss, gradients} of the mean over the targets, for each family and each way."""
    found = []
    for name in names:
        for one in settings:
            hf = family_model(name, **changes)
            module, tensor = cut_model(hf, settings=one)
            config = TrainConfig(name="cut", tp_size=tensor.size, tensor=one)
            group = dist.new_group([rank], use_local_synchronization=True)
            split = splitter(config, model_config=hf.config, group=group, device=torch.device("cpu"))
            documents = (batch["position_ids"] == 0).cumsum(1) - 1
            targets = int((batch["labels"] != -100).sum())
            loss = module(**split({"document_ids": documents, **batch})) / targets
            loss.backward()
            gradients = {key: gradient(parameter) for key, parameter in hf.named_parameters()}
            found.append({"loss": loss.item(), "gradients": gradients, "sent": dict(tensor.sent)})
    return found


def tied_through_a_run(rank: int, *, folder: Path, config: TrainConfig, steps: list[dict[str, Tensor]]) -> bool:
    """Whether head and embedding are one parameter with one and the same values at the start and after each update."""
    engine, mesh = build(rank, folder=folder, config=config, layout=Layout(tp_size=dist.get_world_size()))
    hf: Any = engine.module.model
    always = True
    for batch in [None, *steps]:
        if batch is not None:
            targets = int((batch["labels"] != -100).sum())
            engine.forward_backward(micro_batches(batch, mesh=mesh, count=1), targets=targets)
            engine.step(learning_rate=1e-2)
        always &= hf.lm_head.weight is hf.model.embed_tokens.weight
        always &= "lm_head.weight" not in engine.shapes()
    return always


def dropped(rank: int, *, layout: Layout, tensor: TensorConfig, batch: dict[str, Tensor]) -> list[Tensor]:
    """What the first dropout between the blocks let through, on each rank: booleans of its hidden states."""
    mesh = build_mesh(layout, device_type="cpu")
    hf = family_model("phi3", resid_pdrop=0.5)
    module, _ = cut_model(hf, settings=tensor)
    seen: list[Tensor] = []
    hf.model.layers[0].resid_attn_dropout.register_forward_hook(lambda _, __, out: seen.append(out != 0))
    config = TrainConfig(name="dropped", tp_size=layout.tp_size, tensor=tensor)
    split = splitter(config, model_config=hf.config, group=mesh.axis_groups["cp"], device=torch.device("cpu"))
    seed_everything(0, rank=rank_of_tokens(mesh, sequence_parallel=tensor.sequence_parallel))
    module(**split(batch))
    return all_of(seen[0])
