"""Cut Llama layers for tensor.py: bytes sent, elements kept, CPU seconds beside the same layers whole, and their tables."""

import gc
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from common import Team, console, median_ratio, table, verdict
from torch import Tensor

from fourfold.activation.measure import Live, saved_tensors
from fourfold.context.attention import IMPLEMENTATION, KEYWORD, register
from fourfold.context.select import splitter
from fourfold.planner.memory import Cut, layer_bytes, layer_elements
from fourfold.schema import TensorConfig, TrainConfig
from fourfold.tensor.apply import apply
from fourfold.tensor.cost import Shape, sent_bytes
from fourfold.tensor.group import TensorGroup
from fourfold.tensor.head import VocabParallelLossHead
from fourfold.tensor.measure import Collectives

WAYS = {
    "sequence parallel": TensorConfig(),
    "and regather": TensorConfig(regather=True),
    "without": TensorConfig(sequence_parallel=False),
}
OPERATIONS = {"all_gather": "_allgather_base_", "reduce_scatter": "_reduce_scatter_base_", "all_reduce": "allreduce_"}

MANY, FEW = 3, 1  # layers; of the difference, all that lies outside of them drops out
NEAR, TIME = 0.01, 1.15


@dataclass(frozen=True)
class Layers:
    """SmolLM2-135M's, but for heads that 2 and 4 ranks can share; rows of one document."""

    layers: int
    length: int
    rows: int = 1
    hidden: int = 576
    inner: int = 1536
    heads: int = 8
    kv_heads: int = 4
    vocabulary: int = 1109  # small, so that layers are what is timed

    def config(self, *, layers: int | None = None) -> Any:
        from transformers import LlamaConfig

        return LlamaConfig(
            hidden_size=self.hidden,
            intermediate_size=self.inner,
            num_hidden_layers=layers or self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            vocab_size=self.vocabulary,
            max_position_embeddings=self.length,
            attn_implementation=IMPLEMENTATION,
        )

    def shape(self, settings: TensorConfig, *, size: int) -> Shape:
        return Shape(
            rows=self.rows,
            length=self.length,
            hidden=self.hidden,
            itemsize=4,
            tp_size=size,
            sequence_parallel=settings.sequence_parallel,
            regather=settings.regather,
        )

    def batch(self) -> dict[str, Tensor]:
        ids = torch.arange(self.rows * self.length).view(self.rows, self.length) % self.vocabulary
        positions = torch.arange(self.length).repeat(self.rows, 1)
        return {"input_ids": ids, "labels": ids, "position_ids": positions, "document_ids": torch.zeros_like(ids)}


def cut_of(settings: TensorConfig, *, size: int) -> Cut:
    return Cut(size, sequence_parallel=settings.sequence_parallel, regather=settings.regather)


@dataclass(frozen=True)
class Count:
    """Of one rank and one micro-batch."""

    sent: dict[str, int]  # as TensorGroup counts, without calls
    seen: dict[str, int]  # as c10d's operations are called
    losses: int
    shapes: set[tuple[int, ...]]  # of what they are called with
    saved: int  # elements
    alive: int  # bytes


class Rank:
    """One rank. Models are made on first use; "whole" is that of one process, run by the first two ranks at a time."""

    def __init__(self, *, rank: int, world: int, shape: Layers) -> None:
        register()
        self.rank, self.world, self.shape = rank, world, shape
        self.alone = dist.new_group([rank], use_local_synchronization=True)
        self._models: dict[str, tuple[Any, dict[str, Any]]] = {}

    def count(self, name: str, layers: int) -> Count:
        from fourfold.model.build import CausalLMLoss

        hf, inputs, tensor = self._cut(WAYS[name], layers=layers)
        module = CausalLMLoss(hf, head=VocabParallelLossHead(hf.lm_head, tensor=tensor, softcap=None, chunk_size=None))
        with Collectives(self.world) as seen:
            with Live(module.parameters()) as live, saved_tensors(module) as saved:
                loss = module(**inputs)
            alive = live.bytes
            loss.backward()
        sent = {key: count for key, count in tensor.sent.items() if not key.endswith("calls")}
        return Count(sent, dict(seen.sent), seen.losses, seen.shapes, saved.elements, alive)

    def seconds(self, name: str) -> float:
        """CPU seconds of forward and backward of the embedding and the layers."""
        if name == "whole" and self.rank > 1:
            return 0.0
        hf, inputs = self._model(name)
        gc.collect()
        if name != "whole":
            dist.barrier()
        begin = time.process_time()
        out = hf.model(
            input_ids=inputs["input_ids"],
            position_ids=inputs["position_ids"],
            use_cache=False,
            **{KEYWORD: inputs["context"]},
        ).last_hidden_state
        out.backward(torch.ones_like(out))
        spent = time.process_time() - begin
        hf.zero_grad()
        return spent

    def _model(self, name: str) -> tuple[Any, dict[str, Any]]:
        if name not in self._models:
            if name == "whole":
                self._models[name] = self._whole(self.shape.layers), self._inputs(TrainConfig(name="whole"))
            else:
                self._models[name] = self._cut(WAYS[name], layers=self.shape.layers)[:2]
        return self._models[name]

    def _whole(self, layers: int) -> Any:
        from transformers import LlamaForCausalLM

        torch.manual_seed(0)
        return LlamaForCausalLM(self.shape.config(layers=layers)).train()

    def _cut(self, settings: TensorConfig, *, layers: int) -> tuple[Any, dict[str, Any], TensorGroup]:
        assert dist.group.WORLD is not None
        hf, group = self._whole(layers), dist.group.WORLD
        tensor = TensorGroup(group, sequence_parallel=settings.sequence_parallel)
        assert self.shape.kv_heads >= self.world
        apply(hf, tensor=tensor, plan={}, overlap=settings.overlap, regather=settings.regather)
        return hf, self._inputs(TrainConfig(name="cut", tp_size=self.world, tensor=settings)), tensor

    def _inputs(self, config: TrainConfig) -> dict[str, Any]:
        split = splitter(config, model_config=self.shape.config(), group=self.alone, device=torch.device("cpu"))
        return split(self.shape.batch())


# ---------------------------------------------------------------- tables


def counted(shape: Layers, *, worlds: list[int]) -> None:
    found = {}
    for world in worlds:
        with Team(world, Rank, shape=shape) as team:
            for name in WAYS:
                found[world, name] = [team.call("count", name, layers) for layers in (MANY, FEW)]
    console().print(sent(shape, found))
    console().print(kept(shape, found))


def sent(shape: Layers, found: dict[tuple[int, str], list[list[Count]]]) -> Any:
    made = table(
        f"Bytes that each rank sends, {shape.rows} x {shape.length} tokens of {shape.hidden}, fp32",
        ("tp", "", "a layer, MB", "in B S H", "8(t-1)/t", "embedding", "head", "loss a token", "c10d's", "formula"),
        left=2,
        note=(
            "c10d's: by the operations that torch runs. Loss: bytes a token in a chunk with labels. Tensors sent that have a "
            f"dimension of the vocabulary or of a rank's part of it: {_of_vocabulary(shape, found)}."
        ),
    )
    tokens = shape.rows * shape.length
    for (world, name), (many, few) in found.items():
        formula = sent_bytes(shape.shape(WAYS[name], size=world), layers=MANY, losses=tokens)
        parts = [_by_purpose(one.sent) for one in (many[0], few[0])]
        layer = (parts[0]["block"] - parts[1]["block"]) / (MANY - FEW)
        exact = all(one.sent == formula for one in many)
        made.add_row(
            str(world),
            name,
            f"{layer / 1e6:.3f}",
            f"{layer / 4 / tokens / shape.hidden:.4f}",
            f"{8 * (world - 1) / world:.4f}",
            f"{parts[0]['embedding'] / 1e6:.3f}",
            f"{parts[0]['head'] / 1e6:.3f}",
            f"{many[0].sent['loss'] / tokens:g}",
            _equal(all(_seen_by(formula) == one.seen and one.losses == formula["loss"] for one in many)),
            _equal(exact),
        )
    return made


def _of_vocabulary(shape: Layers, found: dict[tuple[int, str], list[list[Count]]]) -> int:
    """1109 rows, 555 or 278 on a rank: no other dimension here is like them."""
    return sum(
        bool({shape.vocabulary, -(-shape.vocabulary // world)} & set(sizes))
        for (world, _), (many, _) in found.items()
        for one in many
        for sizes in one.shapes
    )


def _by_purpose(sent: dict[str, int]) -> dict[str, int]:
    found = {"block": 0, "embedding": 0, "head": 0}
    for key, count in sent.items():
        purpose = key.split()[0]
        if key != "loss":
            found["head" if purpose == "loss" else purpose] += count
    return found


def _seen_by(formula: dict[str, int]) -> dict[str, int]:
    """The same bytes by c10d's operations."""
    by_kind = {op: sum(n for key, n in formula.items() if key.endswith(kind)) for kind, op in OPERATIONS.items()}
    return {op: count for op, count in by_kind.items() if count}


def _equal(agrees: bool) -> str:
    return "[green]equal[/]" if agrees else "[red]differs[/]"


def kept(shape: Layers, found: dict[tuple[int, str], list[list[Count]]]) -> Any:
    config, tokens = shape.config(), shape.rows * shape.length
    gpt = layer_bytes(config, batch=1, seq_len=1, flash=True) / 34  # s b h of one token
    made = table(
        "Elements kept for backward, a layer and token",
        ("tp", "", "autograd", "all tensors", "formula", "off by", "target", "", "GPT, bytes/sbh", "ours"),
        left=2,
        note=(
            "All tensors: those that a forward pass leaves, whoever holds them. GPT: Korthikanti et al. 2022 with flash "
            "attention, 34/t with regather (30/t + 4 if inputs of blocks are kept whole), 24/t + 10 without sequence "
            "parallelism; ours: twice the elements (16 bits) in the same unit; planner/memory.py: which term is which."
        ),
    )
    for (world, name), (many, few) in found.items():
        cut = cut_of(WAYS[name], size=world)
        plan = layer_elements(config, seq_len=shape.length, attention="fourfold", tokens=tokens, cut=cut)
        saved, alive = (max(ranks) / (MANY - FEW) for ranks in zip(*map(_difference, many, few), strict=True))
        off = max(abs(saved - plan), abs(alive - plan)) / plan
        made.add_row(
            str(world),
            name,
            *(f"{one / tokens:.2f}" for one in (saved, alive, plan)),
            f"{off:.4%}",
            f"{NEAR:.0%}",
            verdict(off, NEAR),
            f"{_gpt(cut):.2f}",
            f"{2 * plan / tokens / gpt:.2f}",
        )
    return made


def _difference(many: Count, few: Count) -> tuple[float, float]:
    return many.saved - few.saved, (many.alive - few.alive) / 4


def _gpt(cut: Cut) -> float:
    """Korthikanti et al. 2022 table 2, without scores; the inputs of the two blocks are 4 of the 34."""
    if not cut.sequence_parallel:
        return 10 + 24 / cut.size
    return 34 / cut.size if cut.regather else 4 + 30 / cut.size


def seconds(shape: Layers, *, rounds: int) -> Any:
    names = ["whole", *WAYS]
    found: dict[str, list[list[float]]] = {name: [] for name in names}
    with Team(2, Rank, shape=shape) as team:
        for turn in range(rounds + 1):
            for name in names:
                spent = team.call("seconds", name)
                if turn:  # the first makes models, buffers, connections
                    found[name].append(spent)
    alone = [statistics.mean(ranks) for ranks in found["whole"]]
    made = table(
        f"CPU seconds of {shape.layers} layers, forward and backward, both ranks of tp 2 together",
        ("", "both, s", "one process, s", "ratio", "quartiles", "target", ""),
        note="One process is run on both ranks at a time: it meets the same neighbour on the other core.",
    )
    for name in WAYS:
        both = [sum(ranks) for ranks in found[name]]
        ratio, low, high = median_ratio(both, alone)
        made.add_row(
            name,
            f"{statistics.median(both):.2f}",
            f"{statistics.median(alone):.2f}",
            f"{ratio:.3f}",
            f"{low:.3f} to {high:.3f}",
            f"{TIME:.2f}",
            verdict(ratio, TIME),
        )
    return made
