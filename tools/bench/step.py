"""Our step against plain ones on the same weights, tokens and activation checkpointing: ratios of time and memory.

    uv run python tools/bench/step.py                       random Llama, 8 layers, hidden 384, vocabulary 32768
    uv run python tools/bench/step.py --model /tmp/smollm2  any Hugging Face folder
    uv run python tools/bench/step.py --only one            or two: one process only, or two

One process: parallelize, ZeroEngine.forward_backward and step, against `model(input_ids, position_ids, labels).loss`,
backward, clip_grad_norm_ and AdamW(fused=True), both fp32. Each side lives in fresh processes of its own; steps are made
in turns and compared in pairs, in wall-clock and in CPU seconds (which a busy machine disturbs less). Memory: growth of the peak resident set (VmHWM) above what imports left, over loading and
all steps, and over the steps alone; freed memory goes back to the system at once (mallopt-like environment, both sides).

Two processes: the same against the script that an accelerate user has. Accelerate's own DeepSpeed integration cannot run
on CPU (Accelerator(cpu=True) never selects it), so the peer calls deepspeed.initialize with the config that
DeepSpeedPlugin would write (stage N, its accumulation steps, clipping, all else DeepSpeed's defaults), the model's own
loss, and what accelerator.backward does: set_gradient_accumulation_boundary, engine.backward, engine.step. For fairness
it gets our AdamW(fused=True), and DeepSpeed's shared-memory collective is off on both sides (it needs a compiler).
"""

import argparse
import os
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from common import Team, console, llama_folder, median_ratio, packed_rows, peak, reset_peak, table, timed, unshifted
from common import verdict as verdict_of

TIME_ONE, MEMORY_ONE, TIME_TWO = 1.03, 1.0, 1.0
NOISE = 0.03  # of a ratio of two equal runs on a busy machine
RATE = 1e-4
MiB = 2**20
# Let go of freed memory at once, so that the resident set is what is held: the same for both sides.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(128 * 1024), "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_ARENA_MAX": "2"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="Hugging Face folder; default: a random Llama")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--rows", type=int, default=2, help="of one micro-batch")
    parser.add_argument("--length", type=int, default=512, help="tokens of a row")
    parser.add_argument("--steps", type=int, default=9, help="timed pairs of steps")
    parser.add_argument("--only", choices=("one", "two"))
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.model or llama_folder(
            Path(scratch) / "llama", layers=options.layers, hidden=options.hidden, vocab=options.vocab
        )
        if options.only != "two":
            console().print(one_process(folder, options))
        if options.only != "one":
            console().print(two_processes(folder, options))


# ---------------------------------------------------------------- the sides


class Side:
    """One rank of a side. `step` returns (seconds, CPU seconds, mean loss of this rank's targets)."""

    def __init__(
        self,
        *,
        rank: int,
        world: int,
        folder: str,
        stage: int,
        accumulation: int,
        checkpointing: str,
        rows: int,
        length: int,
    ) -> None:
        from transformers import AutoConfig
        from transformers.utils import logging

        from fourfold.zero.deepspeed_internals import quiet_start

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        quiet_start(torch.device("cpu"))
        self.folder, self.rank, self.world = Path(folder), rank, world
        self.stage, self.accumulation, self.checkpointing = stage, accumulation, checkpointing
        self.rows, self.length = rows, length
        self.config = AutoConfig.from_pretrained(folder)
        self._done = 0
        self._warm_up_imports()
        self._base = reset_peak()
        self.build()
        self._built_peak = peak()
        reset_peak()

    def _warm_up_imports(self) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        tiny = LlamaForCausalLM(
            LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
        )
        tiny(input_ids=torch.zeros(1, 4, dtype=torch.long), labels=torch.zeros(1, 4, dtype=torch.long)).loss.backward()

    def build(self) -> None:
        raise NotImplementedError

    def update(self, micro_batches: list[dict[str, torch.Tensor]]) -> float:
        raise NotImplementedError

    def step(self) -> tuple[float, float, float]:
        self._done += 1
        seeds = [
            (self._done * self.accumulation + index) * self.world + self.rank for index in range(self.accumulation)
        ]
        batches = [packed_rows(self.rows, self.length, vocab=self.config.vocab_size, seed=seed) for seed in seeds]
        begin = time.process_time()
        seconds, loss = timed(lambda: self.update(batches))
        return seconds, time.process_time() - begin, loss

    def memory(self) -> tuple[int, int]:
        """Bytes above what imports left: most since the start, most during the steps."""
        steps = peak()
        return max(self._built_peak, steps) - self._base, steps - self._base


class Ours(Side):
    def build(self) -> None:
        from fourfold.layout import Layout
        from fourfold.mesh import build_mesh
        from fourfold.model.build import build_on_meta
        from fourfold.model.weights import Weights
        from fourfold.parallelize import parallelize
        from fourfold.schema import ActivationConfig, Checkpointing, Precision, TrainConfig, ZeroConfig

        config = TrainConfig(
            name="bench",
            precision=Precision.fp32,
            micro_batch_size=self.rows,
            zero=ZeroConfig(stage=self.stage),
            activation=ActivationConfig(Checkpointing(self.checkpointing)),
        )
        model = build_on_meta(self.config, dtype=torch.float32, attn_implementation="sdpa")
        layout = Layout(
            dp_shard_size=self.world if self.stage else 1, dp_replicate_size=1 if self.stage else self.world
        )
        mesh = build_mesh(layout, device_type="cpu")
        self.engine = parallelize(model, Weights(self.folder), config=config, mesh=mesh, device=torch.device("cpu"))

    def update(self, micro_batches: list[dict[str, torch.Tensor]]) -> float:
        mine = sum(int((batch["labels"] >= 0).sum()) for batch in micro_batches)
        losses = self.engine.forward_backward(micro_batches, targets=mine * self.world)
        self.engine.step(learning_rate=RATE)
        return float(losses.sum()) / mine


class Bare(Side):
    def load(self) -> Any:
        from transformers import AutoModelForCausalLM

        from fourfold.activation import checkpointing
        from fourfold.schema import ActivationConfig, Checkpointing

        model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32, attn_implementation="sdpa")
        checkpointing.apply(model, ActivationConfig(Checkpointing(self.checkpointing)))
        return model.train()

    def optimizer(self, model: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1, betas=(0.9, 0.95), fused=True)

    def build(self) -> None:
        self.model = self.load()
        self.adamw = self.optimizer(self.model)

    def update(self, micro_batches: list[dict[str, torch.Tensor]]) -> float:
        total = 0.0
        for batch in micro_batches:
            loss = self.model(**unshifted(batch), use_cache=False).loss / self.accumulation
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.adamw.step()
        self.adamw.zero_grad()
        return total


class PlainDeepSpeed(Bare):
    def build(self) -> None:
        import deepspeed

        settings = {  # accelerate.DeepSpeedPlugin(zero_stage, gradient_accumulation_steps, gradient_clipping=1.0)
            "train_micro_batch_size_per_gpu": self.rows,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": 1.0,
            "steps_per_print": 10**9,
            "zero_optimization": {
                "stage": self.stage,
                "offload_optimizer": {"device": "none"},
                "offload_param": {"device": "none"},
                "stage3_gather_16bit_weights_on_model_save": False,
            },
            "zero_allow_untested_optimizer": True,
        }
        model = self.load()
        self.ds, *_ = deepspeed.initialize(model=model, optimizer=self.optimizer(model), config=settings)

    def update(self, micro_batches: list[dict[str, torch.Tensor]]) -> float:
        total = 0.0
        for index, batch in enumerate(micro_batches):
            last = index == len(micro_batches) - 1
            loss = self.ds(**unshifted(batch), use_cache=False).loss
            self.ds.set_gradient_accumulation_boundary(is_boundary=last)
            self.ds.backward(loss)
            if last:
                self.ds.step()
            total += loss.item() / self.accumulation
        return total


# ---------------------------------------------------------------- comparing


@dataclass
class Raced:
    """Of each step: seconds of the slowest rank, CPU seconds of all ranks."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


def race(ours: Team, theirs: Team, *, steps: int) -> tuple[Raced, Raced]:
    """Steps of both sides in turns; both must have the same loss."""
    sides = (Raced(), Raced())
    for step in range(steps + 1):
        order = (0, 1) if step % 2 else (1, 0)
        losses = [0.0, 0.0]
        for side in order:
            found = (ours, theirs)[side].call("step")
            losses[side] = sum(loss for _, _, loss in found) / len(found)
            if step:  # the first warms up
                sides[side].wall.append(max(wall for wall, _, _ in found))
                sides[side].cpu.append(sum(cpu for _, cpu, _ in found))
        if abs(losses[0] - losses[1]) > 1e-4 * abs(losses[1]):
            raise RuntimeError(f"step {step}: our loss {losses[0]} and theirs {losses[1]} differ: not the same work")
    return sides


def one_process(folder: Path, options: argparse.Namespace) -> Any:
    made = table(
        "One process: fourfold / bare transformers and AdamW",
        ("checkpointing", "measured", "ours", "bare", "ratio", "quartiles", "target", ""),
        note=f"{name_of(folder, options)}; fp32, one thread, {options.rows} rows of {options.length} tokens a step",
        left=2,
    )
    for mode in ("none", "full"):
        common = side_options(folder, options, stage=2, accumulation=1, checkpointing=mode)
        with Team(1, Ours, **common) as ours, Team(1, Bare, **common) as bare:
            mine, other = race(ours, bare, steps=options.steps)
        for what, a, b in (("step", mine.wall, other.wall), ("step, CPU seconds", mine.cpu, other.cpu)):
            ratio, low, high = median_ratio(a, b)
            made.add_row(
                mode,
                what,
                f"{median(a):.3f} s",
                f"{median(b):.3f} s",
                f"{ratio:.3f}",
                f"{low:.3f}..{high:.3f}",
                f"{TIME_ONE:.2f}",
                verdict_of(ratio, TIME_ONE),
            )
        peaks = [memory_of(kind, common) for kind in (Ours, Bare)]
        for index, what in enumerate(("peak memory, all", "peak memory, steps")):
            ours_bytes, bare_bytes = peaks[0][index], peaks[1][index]
            made.add_row(
                mode,
                what,
                f"{ours_bytes / MiB:.0f} MiB",
                f"{bare_bytes / MiB:.0f} MiB",
                f"{ours_bytes / bare_bytes:.3f}",
                "",
                f"{MEMORY_ONE:.2f}",
                verdict_of(ours_bytes / bare_bytes, MEMORY_ONE),
            )
    return made


def memory_of(kind: type[Side], common: dict[str, Any]) -> tuple[int, int]:
    kept = {key: os.environ.get(key) for key in MALLOC}
    os.environ |= MALLOC
    try:
        with Team(1, kind, **common) as team:
            for _ in range(3):
                team.call("step")
            found: tuple[int, int] = team.call("memory")[0]
            return found
    finally:
        for key, value in kept.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value


def two_processes(folder: Path, options: argparse.Namespace) -> Any:
    made = table(
        "Two processes: fourfold / plain script with accelerate's DeepSpeed config",
        ("stage", "accumulation", "ours", "plain", "ratio", "quartiles", "CPU ratio", "target", ""),
        note=f"{name_of(folder, options)}; fp32, one thread a rank, {options.rows} rows of {options.length} tokens a "
        f"micro-batch and rank. Target {TIME_TWO:.2f}, reached within noise up to {TIME_TWO + NOISE:.2f}.",
        left=0,
    )
    for stage in (1, 2, 3):
        for accumulation in (1, 4):
            common = side_options(folder, options, stage=stage, accumulation=accumulation, checkpointing="none")
            with Team(2, Ours, **common) as ours, Team(2, PlainDeepSpeed, **common) as plain:
                mine, other = race(ours, plain, steps=max(5, options.steps // (1 if accumulation == 1 else 2)))
            ratio, low, high = median_ratio(mine.wall, other.wall)
            made.add_row(
                str(stage),
                str(accumulation),
                f"{median(mine.wall):.3f} s",
                f"{median(other.wall):.3f} s",
                f"{ratio:.3f}",
                f"{low:.3f}..{high:.3f}",
                f"{median_ratio(mine.cpu, other.cpu)[0]:.3f}",
                f"{TIME_TWO:.2f}",
                verdict_of(ratio, TIME_TWO + NOISE),
            )
    return made


def side_options(
    folder: Path, options: argparse.Namespace, *, stage: int, accumulation: int, checkpointing: str
) -> dict[str, Any]:
    return {
        "folder": str(folder),
        "stage": stage,
        "accumulation": accumulation,
        "checkpointing": checkpointing,
        "rows": options.rows,
        "length": options.length,
    }


def name_of(folder: Path, options: argparse.Namespace) -> str:
    if options.model:
        return str(folder)
    return f"Llama, {options.layers} layers, hidden {options.hidden}, vocabulary {options.vocab}"


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


if __name__ == "__main__":
    main()
