"""The training loop: one normaliser, one update at a time, stop with the reason."""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fourfold.checkpoint.save import Progress, Saver
from fourfold.counts import Counts, count
from fourfold.data.loader import MicroBatch, Update
from fourfold.device import peak_memory, seed_everything
from fourfold.log import Reporter, gibibytes, short
from fourfold.mesh import Mesh
from fourfold.planner.flops import Flops, step_flops, windowed_layers
from fourfold.schema import TrainConfig
from fourfold.signals import StopRequest
from fourfold.zero.engine import ZeroEngine


class NotFinite(ValueError):
    """A loss or gradient norm that is not finite: which rank, update and micro-batch; nothing was updated or saved."""


@dataclass
class Outcome:
    """What the loop did, for the table at the end."""

    progress: Progress
    first_loss: float = math.nan
    last_loss: float = math.nan
    tokens_per_second: float = 0.0
    seconds_to_first_step: float = 0.0
    data_wait: float = 0.0  # share of the time from the second update on that was spent waiting for rows
    stopped: str = ""  # why, if it did not come to its end
    interrupted: bool = False  # by a signal
    bad_data: Exception | None = None  # what ended the rows before their time
    evaluated: int = -1  # update after which was evaluated last


class TrainingLoop:
    """Runs updates on one rank. `split` makes this rank's part of whole rows. `saver` and `evaluate` are called on all ranks alike."""

    def __init__(
        self,
        *,
        config: TrainConfig,
        engine: ZeroEngine,
        mesh: Mesh,
        device: torch.device,
        model_config: Any,
        split: Callable[[dict[str, Tensor]], dict[str, Any]],
        learning_rate: Callable[[int], float],
        reporter: Reporter,
        track: Callable[[dict[str, Any], int], None],
        peak_flops: float | None,
    ) -> None:
        self._config, self._engine, self._mesh, self._device = config, engine, mesh, device
        self._model_config, self._split = model_config, split
        self._learning_rate = learning_rate
        self._reporter, self._track = reporter, track
        self._peak_flops = peak_flops
        windowed = windowed_layers(model_config)
        self._window = model_config.sliding_window if windowed else None

    def run(
        self,
        updates: Iterable[Update],
        *,
        progress: Progress,
        saver: Saver,
        evaluate: Callable[[Progress], None],
        started: float,
    ) -> Outcome:
        """`started` is the time.time() at which the launch began."""
        outcome = Outcome(progress)
        stop = StopRequest()
        timed_tokens, timed_seconds, timed_waits, longest = 0, 0.0, 0.0, 0.0
        begin = time.perf_counter()
        for update, wait in self._with_waits(updates, outcome):
            left = self._seconds_left(started, longest=longest, saver=saver) if longest else math.inf  # one at least
            counts = self._count(
                update.micro_batches,
                asked_to_stop=stop.requested,
                out_of_time=left < 0,
                bad_data=outcome.bad_data is not None,
            )
            if counts.stop:
                outcome.interrupted, outcome.stopped = counts.stop == "on request", counts.stop
                break
            loss, norm, rate = self._update(update, counts=counts, step=progress.step + 1)
            now = time.perf_counter()
            seconds, begin = now - begin, now
            progress = Progress(
                step=progress.step + 1,
                rows=update.rows_after,
                tokens=progress.tokens + counts.tokens,
                skipped=progress.skipped + (counts.targets == 0),
                shortcut=update.shortcut,
            )
            outcome.progress, longest = progress, max(longest, seconds)
            if math.isnan(outcome.first_loss):
                outcome.first_loss, outcome.seconds_to_first_step = loss, time.time() - started
            else:  # the first update warms up
                timed_tokens, timed_seconds = timed_tokens + counts.tokens, timed_seconds + seconds
                timed_waits += wait
            if counts.targets:
                outcome.last_loss = loss
            times = {"train/epoch": update.epoch, "train/seconds": seconds, "train/data_seconds": wait}
            self._report(progress, counts=counts, loss=loss, norm=norm, rate=rate, times=times)
            if self._due(self._config.save_every, progress):  # before anything that may fail
                saver.save(progress)
                begin = time.perf_counter()
            if self._due(self._config.eval_every, progress):
                evaluate(progress)
                outcome.evaluated, begin = progress.step, time.perf_counter()
        if timed_seconds:
            outcome.tokens_per_second, outcome.data_wait = timed_tokens / timed_seconds, timed_waits / timed_seconds
        return outcome

    @staticmethod
    def _with_waits(updates: Iterable[Update], outcome: Outcome) -> Iterator[tuple[Update, float]]:
        """Each update with the seconds that it was waited for. Data that cannot be read end the run like a request to stop,
        so that nothing is lost: an update of nothing, and the reason in `outcome`."""
        iterator = iter(updates)
        while outcome.bad_data is None:
            start = time.perf_counter()
            try:
                update = next(iterator, None)
            except Exception as error:  # of a file, a service, or what a row holds
                outcome.bad_data, update = error, Update([], rows=0, rows_after=0, epoch=0)
            if update is None:
                return
            yield update, time.perf_counter() - start

    def _seconds_left(self, started: float, *, longest: float, saver: Saver) -> float:
        """Until the last moment at which one more update may begin: it and a save have to fit into max_time."""
        if self._config.max_time is None:
            return math.inf
        return self._config.max_time - (time.time() - started) - 2 * longest - saver.expected_seconds()

    def _count(self, micro_batches: list[MicroBatch], **reasons: bool) -> Counts:
        return count(
            micro_batches,
            window=self._window,
            reasons=reasons,
            group=self._mesh.world_group,
            copies=self._mesh.layout.world_size // self._mesh.layout.data_size,
            device=self._device,
        )

    def _update(self, update: Update, *, counts: Counts, step: int) -> tuple[float, float, float]:
        """(mean loss over the targets, gradient norm, learning rate). Without any target nothing changes."""
        rate = self._learning_rate(step)
        if counts.targets == 0:
            self._reporter.say(f"update {step}: no target in the whole global batch; skipped, weights unchanged")
            return math.nan, math.nan, rate
        rank = rank_of_tokens(self._mesh, sequence_parallel=self._config.tensor.sequence_parallel)
        seed_everything(self._config.seed + step, rank=rank)
        losses = self._engine.forward_backward(list(map(self._split, update.micro_batches)), targets=counts.targets)
        everywhere = self._gather(losses)
        self._refuse_infinite_loss(everywhere, step=step)
        norm = self._engine.step(learning_rate=rate)
        if not math.isfinite(norm):
            raise NotFinite(
                f"The gradient norm of update {step} is {norm}, its losses were finite. Nothing was updated and no "
                f"checkpoint written; the newest is from before. Lower optim.learning_rate, or use precision=fp32."
            )
        return everywhere.sum().item() / counts.targets, norm, rate

    def _gather(self, losses: Tensor) -> Tensor:
        """losses[M] of each rank -> [ranks, M], float64."""
        losses = losses.double()
        everywhere = [torch.empty_like(losses) for _ in range(dist.get_world_size(self._mesh.loss_group))]
        dist.all_gather(everywhere, losses, group=self._mesh.loss_group)
        return torch.stack(everywhere)

    def _refuse_infinite_loss(self, losses: Tensor, *, step: int) -> None:
        bad = (~losses.isfinite()).nonzero()
        if len(bad):
            member, micro = bad[0].tolist()
            rank = dist.get_process_group_ranks(self._mesh.loss_group)[member]
            raise NotFinite(
                f"The loss of update {step} is {losses[member, micro].item()} on rank {rank}, micro-batch {micro} "
                f"({len(bad)} of {losses.numel()} micro-batches are not finite). Nothing was updated and no checkpoint "
                f"written; the newest is from before. Look at that rank's rows, lower optim.learning_rate, or use "
                f"precision=fp32."
            )

    def _report(
        self,
        progress: Progress,
        *,
        counts: Counts,
        loss: float,
        norm: float,
        rate: float,
        times: dict[str, float],
    ) -> None:
        if not self._mesh.is_main:
            return
        seconds = times["train/seconds"]
        flops, speed = self._flops(counts), counts.tokens / seconds
        metrics = {
            "train/loss": loss,
            "train/grad_norm": norm,
            "train/learning_rate": rate,
            "train/tokens_per_second": speed,
            "train/tokens": progress.tokens,
            "train/targets": counts.targets,
            "train/padding": counts.padding,
            **times,
            "train/model_flops_per_second": flops.model / seconds,
            "train/memory_bytes": peak_memory(self._device),
        }
        peak = self._peak_flops * self._mesh.layout.world_size if self._peak_flops else None
        if peak:
            metrics |= {"train/mfu": flops.model / seconds / peak, "train/hfu": flops.hardware / seconds / peak}
        use = f"MFU {metrics['train/mfu']:.1%}" if peak else short(flops.model / seconds, "FLOP/s")
        memory = gibibytes(metrics["train/memory_bytes"])
        text = [f"loss {loss:.4f}", f"lr {rate:.2e}", f"norm {norm:.3f}", f"{short(speed)} tok/s", use, memory]
        every = self._config.log_every
        self._reporter.step(progress.step, text=text, metrics=metrics, show=progress.step % every == 0)
        self._track(metrics, progress.step)

    def _flops(self, counts: Counts) -> Flops:
        return step_flops(
            self._model_config,
            tokens=counts.tokens,
            pairs_full=counts.pairs_full,
            pairs_windowed=counts.pairs_windowed,
            checkpointing=self._config.activation.checkpointing,
            every_n=self._config.activation.every_n,
        )

    @staticmethod
    def _due(every: int, progress: Progress) -> bool:
        return every > 0 and progress.step % every == 0


def rank_of_tokens(mesh: Mesh, *, sequence_parallel: bool) -> int:
    """Equal on ranks that hold copies of the same hidden states, so that their dropout is, and on no others."""
    rank, size = dist.get_rank(mesh.loss_group), dist.get_world_size(mesh.loss_group)
    for axis in ("tp", "pp") if sequence_parallel else ("pp",):
        rank += dist.get_rank(mesh.axis_groups[axis]) * size
        size *= mesh.layout.size(axis)
    return rank


def evaluate_loss(batches: Iterable[dict[str, Tensor]], *, engine: ZeroEngine, mesh: Mesh) -> tuple[float, int]:
    """(mean loss over all targets of the evaluation rows, number of targets); the same on any number of ranks."""
    total, targets = 0.0, 0
    for batch in batches:
        total += engine.forward_only(batch).double().item()
        targets += int((batch["labels"] >= 0).sum())
    sums = torch.tensor([total, targets], dtype=torch.float64, device=engine.device)
    dist.all_reduce(sums, group=mesh.loss_group)
    return float(sums[0] / sums[1].clamp(min=1)), int(sums[1])
