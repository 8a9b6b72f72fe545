"""One forward and backward pass of what a rank trains, on tensors without storage: what it keeps, sends and computes."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from fourfold.activation.measure import Live
from fourfold.context import select
from fourfold.context.kernels.cpu import BACKWARD, FORWARD, CpuKernel, band_mask
from fourfold.context.kernels.kernel import Spec
from fourfold.context.rectangles import Rectangle
from fourfold.context.split import Splitter
from fourfold.mesh import Mesh
from fourfold.planner.passes import whole_length
from fourfold.planner.traffic import Sent
from fourfold.schema import TrainConfig
from fourfold.slices import carry_marks


@dataclass(frozen=True, kw_only=True)
class Traced:
    """Of one pass of one stage over one micro-batch."""

    held: int  # bytes from the forward to the backward pass, without those of the head; the input of a later stage too
    head: int  # the same of the head
    flops: int  # products, and the pairs that the mask allows
    sent: Sent


class PairCounter:
    """A kernel that counts the operations of what the fused one really computes: torch's own count takes all pairs of a
    rectangle, whatever the mask, and 2.5 times the forward pass for the backward one, which computes the scores again."""

    name = CpuKernel.name

    def __init__(self) -> None:
        self._kernel = CpuKernel()
        self._pairs = 0  # of the call at hand

    def forward(self, q: Tensor, k: Tensor, v: Tensor, one: Rectangle, spec: Spec) -> tuple[Tensor, Tensor]:
        self._pairs = one.pairs(spec.window)
        return self._kernel.forward(q, k, v, one, spec)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, one: Rectangle, spec: Spec
    ) -> tuple[Tensor, Tensor, Tensor]:
        self._pairs = one.pairs(spec.window)
        return self._kernel.backward(grad, q, k, v, out, lse, one, spec)

    def mapping(self) -> dict[Any, Any]:
        """For FlopCounterMode, which asks as often as the operations run: not where checkpointing kept their output."""

        def forward(q: Any, *shapes: Any, **keywords: Any) -> int:
            rows, heads, _, size = q
            return int(4 * rows * heads * size * self._pairs)

        def backward(gradient: Any, q: Any, *shapes: Any, **keywords: Any) -> int:
            return 2 * forward(q)

        def product(out: Any, left: Any, right: Any, *shapes: Any, **keywords: Any) -> int:
            return int(2 * left[0] * left[1] * right[1])

        return {FORWARD: forward, BACKWARD: backward, torch.ops.aten.addmm_: product}  # torch 2.15 passes the last over


class Tracer:
    """Of one rank, whose process group moves nothing (world.py)."""

    def __init__(self, config: TrainConfig, *, model_config: Any, mesh: Mesh, sent: Mapping[str, int] | None) -> None:
        """`sent` is what the rank's tensor parallelism counts, None without."""
        self._counter, self._tensor = PairCounter(), sent if sent is not None else {}
        group = mesh.axis_groups["cp"]
        self._strategy = select.with_kernel(config, model_config=model_config, group=group, kernel=self._counter)
        self._batch = self._of_one_document(config, mesh=mesh, group=group)
        self._between = mesh.layout.tp_size if config.tensor.sequence_parallel else 1

    def _of_one_document(self, config: TrainConfig, *, mesh: Mesh, group: Any) -> dict[str, Any]:
        rows, length = config.micro_batch_size, whole_length(config, layout=mesh.layout)
        split = Splitter(
            self._strategy,
            group=group,
            balance=config.attention.balance,
            device=torch.device("cpu"),
            compared=0,
            parts=select.sequence_parts(config),
        )
        zeros = torch.zeros(rows, length, dtype=torch.long)
        positions = torch.arange(length).expand(rows, -1)
        return split({"input_ids": zeros, "labels": zeros, "position_ids": positions, "document_ids": zeros})

    def trace(self, module: nn.Module, *, head: nn.Module | None, hidden: tuple[int, torch.dtype] | None) -> Traced:
        """`hidden` is the width and type of what a later stage receives, None of a module that takes ids."""
        with _without_storage(module) as mode:
            batch = {name: mode.from_tensor(x) if torch.is_tensor(x) else x for name, x in self._batch.items()}
            ids = batch.pop("input_ids")
            x = ids if hidden is None else self._received(ids, *hidden)
            given = [*module.parameters(), x, *(one for one in batch.values() if torch.is_tensor(one))]
            before = Counter(self._tensor), Counter(self._strategy.sent())
            with FlopCounterMode(display=False, custom_mapping=self._counter.mapping()) as operations:
                with Live(given) as live, _memory_of(head, live) as of_head:
                    output = module(x, **batch)
                held = live.bytes + (0 if hidden is None else x.nbytes)
                output.backward(torch.empty_like(output))
            sent = Counter(self._tensor) - before[0], Counter(self._strategy.sent()) - before[1]
        return Traced(
            held=held - of_head[0],
            head=of_head[0],
            flops=int(operations.get_total_flops()),
            sent=Sent(tensor={k: n for k, n in sent[0].items() if not k.endswith("calls")}, context=dict(sent[1])),
        )

    def _received(self, ids: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        rows, tokens = ids.shape
        return torch.empty(rows, tokens // self._between, width, dtype=dtype, requires_grad=True)


@contextmanager
def _without_storage(module: nn.Module) -> Iterator[FakeTensorMode]:
    """Parameters on meta become fake ones of a CPU, whose operations the module may then be asked for."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        for part in module.modules():
            for name, parameter in list(part.named_parameters(recurse=False, remove_duplicate=False)):
                if parameter not in made:
                    values = torch.empty(parameter.shape, dtype=parameter.dtype)
                    made[parameter] = nn.Parameter(values, requires_grad=parameter.requires_grad)
                    carry_marks(parameter, made[parameter])
                part._parameters[name] = made[parameter]
        try:
            yield mode
        finally:
            band_mask.cache_clear()  # of masks without values


@contextmanager
def _memory_of(head: nn.Module | None, live: Live) -> Iterator[list[int]]:
    """[bytes that a forward pass of `head` leaves]"""
    found = [0]
    if head is None:
        yield found
        return
    begin = head.register_forward_pre_hook(lambda *_: found.__setitem__(0, -live.bytes))
    end = head.register_forward_hook(lambda *_: found.__setitem__(0, found[0] + live.bytes))
    try:
        yield found
    finally:
        begin.remove()
        end.remove()
