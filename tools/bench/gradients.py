"""Gradient elements that each rank holds under ZeRO, counted in the live tensors, beside the plan; and its share of the
optimizer state.

    uv run python tools/bench/gradients.py

Counted: distinct storages of param.grad, DeepSpeed's grad_accum, its reduced shards, its buckets and master.grad, by
hooks of every parameter's gradient (before and after DeepSpeed's own), after each micro-batch, and at the update.
Not to be seen from Python: what autograd itself has in hand, which is one more gradient of a tied embedding (the head's
waits for the embedding's), and the copy of a bucket that a collective makes.
"""

import argparse
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Held:
    """Gradient elements of one rank."""

    between: int  # after the backward of a micro-batch that is not the last
    peak: int  # while a backward runs
    update: int  # while the optimizer runs


# ---------------------------------------------------------------- the plan


def planned(
    groups: list[list[int]], *, stage: int, shards: int, bucket: int, buckets: int, accumulation: int, flat_copy: bool
) -> Held:
    """`groups`: elements of each parameter by optimizer group; no parameter larger than a bucket, except with `bucket`
    1, which means none (a shard group of one).

    Stages 2 and 3 keep the rank's shard for the whole update. While a backward runs there are the buckets as well (two
    at stage 2 under overlap_comm, else one) and the one gradient that has just been computed. Stages 0 and 1 keep
    whole gradients and reduce at the end. `flat_copy`: stage 3 copies its shard for the optimizer, group by group.
    """
    shard = shard_elements(groups, stage=stage, shards=shards)
    whole = sum(map(sum, groups))
    largest = max(map(max, groups))
    copied = max(shard_elements([group], stage=3, shards=shards) for group in groups)
    if stage < 2:
        return Held(between=whole if accumulation > 1 else 0, peak=whole + largest, update=shard)
    resident = bucket if stage == 3 else 0  # stage 3 never frees its bucket
    return Held(
        between=(shard if accumulation > 1 else 0) + resident,
        peak=shard + bucket * (buckets if stage < 3 else 1) + largest,
        update=shard + resident + (copied if stage == 3 and flat_copy else 0),
    )


def shard_elements(groups: list[list[int]], *, stage: int, shards: int) -> int:
    """Stages 0 to 2 cut the padded concatenation of a group, stage 3 every parameter."""
    if stage == 3:
        return sum(-(-numel // shards) for group in groups for numel in group)
    return sum(-(-sum(group) // (2 * shards)) * 2 for group in groups)


# ---------------------------------------------------------------- counting


class Gauge:
    """Counts the gradient elements of a live ZeroEngine."""

    def __init__(self, engine: Any) -> None:
        self._optimizer = engine._deepspeed.optimizer
        self._parameters = [p for p in engine.module.parameters() if p.requires_grad]
        self.peak = 0
        self.update = 0
        self.between: list[int] = []
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._sample)
            hooks = parameter._post_accumulate_grad_hooks
            theirs = list(hooks.items())
            hooks.clear()  # torch walks the dictionary in the order of insertion
            parameter.register_post_accumulate_grad_hook(
                self._sample
            )  # while the gradient is still the parameter's own
            hooks.update(theirs)
        engine.optimizer.register_step_pre_hook(self._at_update)
        forward = engine._deepspeed.forward
        engine._deepspeed.forward = lambda *a, **k: (self.between.append(self.held()), forward(*a, **k))[1]

    def held(self) -> int:
        storages: dict[int, int] = {}
        for tensor in self._tensors():
            storage = tensor.untyped_storage()
            if storage.nbytes():
                storages[storage.data_ptr()] = storage.nbytes() // tensor.element_size()
        return sum(storages.values())

    def _sample(self, *_: Any) -> None:
        self.peak = max(self.peak, self.held())

    def _at_update(self, *_: Any) -> None:
        self.update = max(self.update, self.held())

    def _tensors(self) -> Iterable[Tensor]:
        optimizer = self._optimizer
        found: list[Any] = []
        for parameter in self._parameters:
            found += [parameter.grad, getattr(parameter, "grad_accum", None)]
        for holder in ("averaged_gradients", "all_grad_tensors"):
            for group in getattr(optimizer, holder, {}).values():
                found += [getattr(group, "flat_partition", None), *(group or [])]
        found += [
            getattr(optimizer, "grads_in_partition", None),
            getattr(optimizer, "grad_partitions_flat_buffer", None),
        ]
        for bucket in optimizer.ipg_buckets.values():
            found += bucket.buffer if isinstance(bucket.buffer, list) else [bucket.buffer]
        masters = getattr(optimizer, "fp32_partitioned_groups_flat", None) or optimizer.single_partition_of_fp32_groups
        found += [master.grad for master in masters]
        return [tensor for tensor in found if isinstance(tensor, Tensor)]


def groups_of(engine: Any) -> list[list[int]]:
    """Global elements of each parameter, by group of the optimizer: matrices, then the rest."""
    shapes = [getattr(p, "ds_shape", p.shape) for p in engine.module.parameters() if p.requires_grad]
    return [
        group
        for group in ([s.numel() for s in shapes if len(s) > 1], [s.numel() for s in shapes if len(s) < 2])
        if group
    ]


def optimizer_state_elements(engine: Any) -> int:
    """Elements of the moments of this rank (scalars excluded)."""
    return sum(
        value.numel()
        for state in engine.optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor) and value.dim() > 0
    )


def measure(engine: Any, micro_batches: list[dict[str, Tensor]], *, targets: int) -> dict[str, Any]:
    """One update to allocate everything, then one that is measured."""
    for _ in range(2):
        gauge = Gauge(engine)
        engine.forward_backward(micro_batches, targets=targets)
        engine.step(learning_rate=1e-4)
    groups = groups_of(engine)
    return {
        "held": Held(between=max(gauge.between[1:], default=0), peak=gauge.peak, update=gauge.update),
        "groups": groups,
        "parameters": sum(map(sum, groups)),
        "state": optimizer_state_elements(engine),
    }


# ---------------------------------------------------------------- the table


class Rank:
    def __init__(self, *, rank: int, world: int, folder: str) -> None:
        from transformers.utils import logging

        logging.set_verbosity_error()
        self.rank, self.world, self.folder = rank, world, Path(folder)

    def measure(self, stage: int, precision: str, overlap: bool, bucket: int, accumulation: int) -> dict[str, Any]:
        from common import packed_rows
        from transformers import AutoConfig

        from fourfold.layout import Layout
        from fourfold.mesh import build_mesh
        from fourfold.model.build import build_on_meta
        from fourfold.model.weights import Weights
        from fourfold.parallelize import parallelize
        from fourfold.schema import Precision, TrainConfig, ZeroConfig

        zero = ZeroConfig(stage=stage, reduce_bucket_size=bucket, overlap_comm=overlap)
        config = TrainConfig(name="bench", precision=Precision(precision), zero=zero)
        dtype = torch.float32 if precision == "fp32" else torch.bfloat16
        model_config = AutoConfig.from_pretrained(self.folder)
        model = build_on_meta(model_config, dtype=dtype, attn_implementation="sdpa")
        mesh = build_mesh(Layout(dp_shard_size=self.world), device_type="cpu")
        engine = parallelize(model, Weights(self.folder), config=config, mesh=mesh, device=torch.device("cpu"))
        rows = [
            packed_rows(1, 32, vocab=model_config.vocab_size, seed=self.rank * accumulation + index)
            for index in range(accumulation)
        ]
        targets = self.world * sum(int((row["labels"] >= 0).sum()) for row in rows)
        return measure(engine, rows, targets=targets)


def beside(measured: int, plan: int) -> str:
    return f"{measured:,}" if measured == plan else f"{measured:,} [red]({plan:,})[/]"


def main() -> None:
    from common import Team, console, llama_folder, table

    from fourfold.zero import deepspeed_internals

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--accumulation", type=int, default=4)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    bucket = 300_000
    flat_copy = not hasattr(deepspeed_internals, "use_flat_gradients")
    made = table(
        "Gradient elements a rank",
        (
            "stage",
            "precision",
            "buckets",
            "between micro-batches",
            "peak in backward",
            "at the update",
            "Adam's state",
            "",
        ),
        left=2,
    )
    with tempfile.TemporaryDirectory() as scratch:
        folder = llama_folder(Path(scratch) / "llama", layers=4, hidden=128, vocab=2048)
        for stage in (1, 2, 3):
            for precision in ("fp32", "bf16"):
                for buckets in (1, 2) if stage < 3 else (1,):
                    with Team(options.ranks, Rank, folder=str(folder)) as team:
                        found = team.call("measure", stage, precision, buckets == 2, bucket, options.accumulation)
                    total = found[0]["parameters"]
                    plan = planned(
                        found[0]["groups"],
                        stage=stage,
                        shards=options.ranks,
                        bucket=bucket,
                        buckets=buckets,
                        accumulation=options.accumulation,
                        flat_copy=flat_copy,
                    )
                    held = found[0]["held"]
                    made.add_row(
                        str(stage),
                        precision,
                        str(buckets),
                        beside(held.between, plan.between),
                        beside(held.peak, plan.peak),
                        beside(held.update, plan.update),
                        f"{max(one['state'] for one in found) / (2 * total):.4f}",
                        "[green]exact[/]" if all(one["held"] == plan for one in found) else "[red]off[/]",
                    )
    made.caption = (
        f"{options.ranks} ranks, accumulation {options.accumulation}, {total:,} parameters, buckets of {bucket:,}; where "
        f"the plan says something else, it stands behind. Adam's state: the largest share of a rank."
    )
    console().print(made)


if __name__ == "__main__":
    main()
