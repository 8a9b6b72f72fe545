"""How much one rank allocates in a pass over a long row."""

from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.autograd.profiler import profile

from fourfold.context.kernels.kernel import Spec
from fourfold.schema import AttentionConfig
from tests.parity.context_model_ranks import Watched
from tests.parity.context_ranks import Case, made, part, sharded
from tests.reference import VOCABULARY
from tools.bench.held_bytes import Held, held_by


def long_row(length: int) -> dict[str, torch.Tensor]:
    """Three documents, of 1/8, 1/8 and 3/4 of the row."""
    sizes = [length // 8, length // 8, length - length // 4]
    ids = torch.arange(length) * 7 % VOCABULARY
    return {
        "input_ids": ids[None],
        "labels": ids.roll(-1)[None],
        "position_ids": torch.cat([torch.arange(size) for size in sizes])[None],
    }


def allocated(
    rank: int, *, folder: Path, attentions: list[AttentionConfig | None], lengths: list[int]
) -> list[list[tuple[int, int]]]:
    """(bytes of the largest allocation, most bytes held at one time) in forward and backward, for each way of attention
    and each length."""
    found = []
    for one in attentions:
        model = Watched(folder, attention=one)
        model.loss(long_row(64)).backward()  # whatever is made once
        found.append([_measured(model, length) for length in lengths])
    return found


def held(rank: int, *, cases: list[Case]) -> list[tuple[Held, int, int]]:
    """Of each case (bytes that this rank holds for the layer, those of q and out, those of its keys and values)."""
    group = dist.group.WORLD
    assert group is not None
    found = []
    for case in cases:
        strategy = made(case, group=group)
        sharding = sharded(strategy, case, ranks=group.size())
        *inputs, _ = (part(x, sharding, rank=rank).to(case.dtype).requires_grad_() for x in case.tensors())
        attend = partial(strategy.attend, spec=Spec(0.3), sharding=sharding)
        found.append((held_by(attend, *inputs), inputs[0].nbytes, inputs[1].nbytes + inputs[2].nbytes))
    return found


def _measured(model: Watched, length: int) -> tuple[int, int]:
    model.hf.zero_grad()
    batch = long_row(length)
    with profile(profile_memory=True) as watched:
        model.loss(batch).backward()
    return _summed(watched)


def _summed(watched: profile) -> tuple[int, int]:
    largest = held = most = 0
    results = watched.kineto_results
    assert results is not None
    for event in sorted((e for e in results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        held += event.nbytes()
        largest, most = max(largest, event.nbytes()), max(most, held)
    return largest, most
