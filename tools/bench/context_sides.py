"""The sides of context.py on one rank: our strategies, one process, DeepSpeed's Ulysses and torch's templated ring."""

import gc
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from held_bytes import held_by
from torch import Tensor

from fourfold.context.allgather import AllGather
from fourfold.context.balance import zigzag
from fourfold.context.hybrid import Hybrid
from fourfold.context.kernels.cpu import BACKWARD, FORWARD, CpuKernel
from fourfold.context.kernels.kernel import Spec
from fourfold.context.local import Local
from fourfold.context.needed_only import NeededOnly, exchange, exchanged_bytes
from fourfold.context.rectangles import Interval, Rectangle
from fourfold.context.ring import Ring
from fourfold.context.sharding import RowShares, Sharding, positions
from fourfold.context.strategy import AttentionShape, ContextStrategy
from fourfold.context.ulysses import Ulysses

HEADS, KV_HEADS, HEAD_DIM = 8, 2, 64
OURS: dict[str, type[ContextStrategy]] = {
    "ulysses": Ulysses,
    "ring": Ring,
    "allgather": AllGather,
    "hybrid": Hybrid,
    "needed_only": NeededOnly,
}
PEERS = {"DeepSpeed": "ulysses", "torch ring": "ring"}  # and which of ours does the same
OPTIONS = {"ulysses_size": "auto", "outer": "ring"}
SCALE = HEAD_DIM**-0.5
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]  # [B, H, s, D] -> [B, s, H, D]


@dataclass(frozen=True)
class Run:
    """Of one rank. Pairs are of a query head."""

    seconds: float
    pairs: float = 0.0
    sent: int = 0
    formula: int = 0


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank, one layer, with what they may be; `spare` is what merging partial results takes beside."""

    saved: int
    saved_figure: int
    most: int
    most_figure: int
    spare: int


def documents_of(row: str, length: int, *, seed: int = 17) -> tuple[Interval, ...]:
    if row == "one":
        return ((0, length),)
    rng = random.Random(seed)
    cuts = sorted(rng.sample(range(1, length), 16))
    return tuple(zip([0, *cuts], [*cuts, length], strict=True))


def needed_share(documents: tuple[Interval, ...], *, length: int, ranks: int, window: int | None) -> float:
    """Bytes of needed_only over those of allgather, of all ranks, for the balance that it would take."""
    ownership = NeededOnly.ownership(object.__new__(NeededOnly), length, documents, balance="auto", ranks=ranks)
    size = shape(length)
    plans = [[exchange(RowShares(ownership, documents), rank=rank, window=window)] for rank in range(ranks)]
    ours = sum(sum(exchanged_bytes(plan, shape=size).values()) for plan in plans)
    gathered = AllGather.sent_bytes(size, cp_size=ranks, rank=0, options=OPTIONS)
    return ours / (ranks * sum(gathered.values()))


def shape(length: int) -> AttentionShape:
    return AttentionShape(rows=1, length=length, heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, itemsize=4)


class Counting(CpuKernel):
    """The kernel, with the pairs that it is asked for counted while `on`."""

    def __init__(self) -> None:
        self.pairs, self.on = 0.0, True

    def forward(self, q: Tensor, k: Tensor, v: Tensor, one: Rectangle, spec: Spec) -> tuple[Tensor, Tensor]:
        if self.on:
            self.pairs += one.pairs(spec.window) * q.shape[1]
        return super().forward(q, k, v, one, spec)


class Sides:
    """One rank. `run` makes a side on first use and runs it forward and backward."""

    def __init__(self, *, rank: int, world: int, length: int, row: str) -> None:
        self.rank, self.world, self.length = rank, world, length
        self.documents = documents_of(row, length)
        assert dist.group.WORLD is not None
        self.group = dist.group.WORLD
        self._made: dict[str, Any] = {}

    def run(self, name: str) -> Run:
        if name == "local" and self.rank > 1:
            return Run(0.0)
        if name not in self._made:
            self._made[name] = self._peer(name) if name in PEERS else _Ours(self, name)
            if name not in PEERS:
                return self._made[name].run(self)
        if name in PEERS:
            attention, held = self._made[name]
            return Run(self.timed(attention, held, together=True))
        return self._made[name].run(self)

    def memory(self, name: str) -> Memory:
        """Of a strategy that has run."""
        return self._made[name].memory(self)

    def _peer(self, name: str) -> tuple[Attention, tuple[Interval, ...]]:
        share = self.length // self.world
        if name == "DeepSpeed":
            return deepspeed_ulysses(self.group), ((self.rank * share, (self.rank + 1) * share),)
        return torch_ring(self.group), zigzag(self.length, self.world, self.documents)[self.rank]

    def timed(self, attention: Attention, held: tuple[Interval, ...], *, together: bool) -> float:
        """CPU seconds of this rank's part of the row."""
        q, k, v, grad = self.part(held)
        gc.collect()
        if together:
            dist.barrier()
        begin = time.process_time()
        attention(q, k, v).backward(grad)
        return time.process_time() - begin

    def part(self, held: tuple[Interval, ...]) -> list[Tensor]:
        """q, k and v, [1, heads, s, D], and the gradient of the output, [1, s, H, D]."""
        mine = positions(held)
        *inputs, grad = (tensor[:, mine] for tensor in self._row())
        return [*(tensor.transpose(1, 2).requires_grad_() for tensor in inputs), grad]

    def _row(self) -> list[Tensor]:
        """q, k, v and the gradient of the output, [1, S, heads, D]."""
        generator = torch.Generator().manual_seed(5)
        counts = (HEADS, KV_HEADS, KV_HEADS, HEADS)
        return [torch.randn(1, self.length, count, HEAD_DIM, generator=generator) for count in counts]


class _Ours:
    def __init__(self, sides: Sides, name: str) -> None:
        self.name, self.kernel = name, Counting()
        kind, ranks = (Local, 1) if name == "local" else (OURS[name], sides.world)
        self.strategy = kind(sides.group, kernel=self.kernel, heads=HEADS, kv_heads=KV_HEADS, options=OPTIONS)
        ownership = self.strategy.ownership(sides.length, sides.documents, balance="auto", ranks=ranks)
        self.held = ownership[0 if name == "local" else sides.rank]
        self.sharding = Sharding((RowShares(ownership, sides.documents),))
        self.formula = self._formula(sides, self.sharding.rows[0])

    def run(self, sides: Sides) -> Run:
        before = sum(self.strategy.sent().values())
        seconds = sides.timed(self._attend, self.held, together=self.name != "local")
        self.kernel.on = False
        return Run(seconds, self.kernel.pairs, sum(self.strategy.sent().values()) - before, self.formula)

    def memory(self, sides: Sides) -> Memory:
        """The figure: local q, k, v, out and lse are saved; beside the inputs there are at most out, lse and, of keys and
        values, all (allgather, needed_only) or two blocks (ring); ulysses and hybrid have q, k, v of their heads instead."""
        q, k, v, _ = sides.part(self.held)
        inputs, lse = q.nbytes + k.nbytes + v.nbytes, q.nbytes // HEAD_DIM
        blocks = {"allgather": sides.world, "needed_only": sides.world, "ring": 2, "hybrid": 2}
        kv = blocks.get(self.name, 0) * (k.nbytes + v.nbytes) + (inputs if self.name in ("ulysses", "hybrid") else 0)
        attend = partial(self.strategy.attend, spec=Spec(SCALE), sharding=self.sharding)
        found = held_by(attend, q, k, v)
        out = q.nbytes + lse
        return Memory(found.saved, inputs + out, found.most, out + kv, q.nbytes + 4 * lse)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.strategy.attend(q, k, v, Spec(SCALE), self.sharding).transpose(1, 2).contiguous()

    def _formula(self, sides: Sides, row: RowShares) -> int:
        size = shape(sides.length)
        if self.name == "needed_only":
            plan = [exchange(row, rank=sides.rank, window=None)]
            return sum(exchanged_bytes(plan, shape=size).values())
        sent = self.strategy.sent_bytes(size, cp_size=sides.world, rank=sides.rank, options=OPTIONS)
        return sum(sent.values())


def deepspeed_ulysses(group: dist.ProcessGroup) -> Attention:
    import deepspeed.comm
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    from fourfold.zero.deepspeed_internals import quiet_start

    quiet_start(torch.device("cpu"))
    deepspeed.comm.init_distributed(dist_backend="gloo", verbose=False)
    world = dist.get_world_size(group)
    theirs = UlyssesSPAttentionHF(
        attn=sdpa_attention_forward,
        batch_size=1,
        attn_head_count=HEADS,
        attn_head_size=HEAD_DIM,
        kv_head_count=KV_HEADS,
        num_hidden_layers=1,
        process_group=group,
        seq_length_is_variable=True,
    )
    module = torch.nn.Module()
    module.num_key_value_groups = (HEADS // world) // max(1, KV_HEADS // world)
    module.is_causal = True

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        tokens = q.shape[2]
        own = torch.arange(tokens)[None] + dist.get_rank(group) * tokens
        out, _ = theirs(module, q, k, v, None, position_ids=own, scaling=SCALE, dropout=0.0)
        return out.view(1, tokens, HEADS, HEAD_DIM)

    return attention


def torch_ring(group: dist.ProcessGroup) -> Attention:
    from torch.distributed.tensor.experimental import _attention as face
    from torch.distributed.tensor.experimental._context_parallel import _attention as ring

    face.set_rotate_method("alltoall")
    face._cp_options.enable_load_balance = True

    def forward(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False, scale: float) -> Any:
        return FORWARD(q, k, v, 0.0, is_causal, scale=scale)

    def backward(*, grad_out: Tensor, logsumexp: Tensor, is_causal: bool, scale: float, **tensors: Tensor) -> Any:
        q, k, v, out = (tensors[name] for name in ("query", "key", "value", "out"))
        return BACKWARD(grad_out, q, k, v, out, logsumexp.contiguous(), 0.0, is_causal, scale=scale)

    class TorchRing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out, lse = ring._templated_ring_attention(group, 2, forward, q, k, v, is_causal=True, scale=SCALE)
            ctx.save_for_backward(q, k, v, out, lse)
            return out

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            found = ring._templated_ring_attention_backward(
                group, 2, backward, grads[0], "grad_out", *ctx.saved_tensors, True, scale=SCALE
            )
            return found[:3]

    return lambda q, k, v: TorchRing.apply(q, k, v).transpose(1, 2).contiguous()
