"""One run, from a checked config to a Hugging Face folder. Read it top to bottom."""

import logging
import math
import os
import warnings
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fourfold import legality, summary
from fourfold.beginning import go_on, refuse_other_data
from fourfold.checkpoint.board import Board
from fourfold.checkpoint.export import export
from fourfold.checkpoint.files import write_json
from fourfold.checkpoint.find import ToResume, checkpoint_to_resume, data_identity, settings_that_must_not_change
from fourfold.checkpoint.kept import tidy
from fourfold.checkpoint.save import Progress, Saver
from fourfold.context import select
from fourfold.context.attention import IMPLEMENTATION, register
from fourfold.data.fingerprint import stream_state, tokenizer_digest
from fourfold.data.loader import Loader, eval_batches, total_updates
from fourfold.data.prefetch import prefetch
from fourfold.data.prepared import Prepared, prepare_for
from fourfold.data.stream import StreamRowSet
from fourfold.data.vocabulary import pad_id
from fourfold.device import choose_device, device_name, start_process_group
from fourfold.errors import INTERRUPTED_EXIT, rank, world_size
from fourfold.launch import command_to_go_on, launched_at
from fourfold.layout import Layout
from fourfold.log import Reporter
from fourfold.loop import Outcome, TrainingLoop, evaluate_loss
from fourfold.lost import lost_ranks_named, quiet_rank_told
from fourfold.mesh import Mesh, build_mesh
from fourfold.model import source
from fourfold.model.build import build_on_meta
from fourfold.model.load import check, refuse_contradicting_ties, stored_shapes
from fourfold.model.weights import Weights
from fourfold.output import CHECKPOINTS, EXPORT, begin, claimed
from fourfold.parallelize import parallelize
from fourfold.planner.hardware import peak_flops
from fourfold.schema import Precision, TrainConfig
from fourfold.trackers import Trackers, refuse_unknown_trackers, start_trackers
from fourfold.zero.engine import ZeroEngine
from fourfold.zero.schedule import learning_rates
from fourfold.zero.settings import deepspeed_json

RANDOM = "seeded anew for every update by (seed, update, rank of the tokens): there is no state to keep"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All that is known before a process group exists."""

    config: TrainConfig
    layout: Layout
    device: torch.device
    folder: Path  # of the model that was brought
    weights: Weights
    model: Any  # on the meta device
    tokenizer: Any
    data: Prepared
    total_steps: int
    learning_rate: Callable[[int], float]
    data_identity: dict[str, Any]  # of the rows, for checkpoints
    resume: ToResume | None

    @property
    def output_dir(self) -> Path:
        return Path(self.config.output_dir).expanduser().absolute()


def train(config: TrainConfig, *, plain: dict[str, Any]) -> int:
    """Run on this process; returns the exit code. Raises ValueError for what the user can mend."""
    known = source.config_at_hand(config.model)
    layout = legality.check(config, world_size=world_size(), environment=os.environ, model_config=known)
    device = choose_device(config.cluster.device)
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    _quiet_libraries()
    output_dir = Path(config.output_dir).expanduser().absolute()
    with claimed(output_dir, config=config) if rank() == 0 else nullcontext():
        plan = prepare_run(config, layout=layout, device=device)
        start_process_group(device, cluster=config.cluster)
        with (
            Board(rank=rank(), world_size=layout.world_size, quiet=quiet_rank_told(layout, config)) as board,
            lost_ranks_named(board, layout=layout, pipeline=config.pipeline, rank=rank()),
        ):
            mesh = build_mesh(layout, device_type=device.type)
            engine = parallelize(plan.model, plan.weights, config=config, mesh=mesh, device=device)
            outcome, newest = run(plan, engine=engine, mesh=mesh, board=board, plain=plain)
            dist.barrier()
        dist.destroy_process_group()  # the others need not wait for an export
        if mesh.is_main:
            exported = _export(plan, newest) if config.export and not outcome.stopped else None
            summary.print_end(
                outcome,
                newest=newest,
                exported=exported,
                go_on=command_to_go_on(outcome.progress.step, config=config, stopped=bool(outcome.stopped)),
            )
    return INTERRUPTED_EXIT if outcome.interrupted else 0


def prepare_run(config: TrainConfig, *, layout: Layout, device: torch.device) -> Plan:
    """Read the model's headers and make the data's rows. No collective: ranks wait for each other on file locks."""
    refuse_unknown_trackers(config.tracker)
    folder = source.resolve_folder(config.model)
    model_config = source.read_config(folder, model=config.model)
    attention = source.attention_implementation(model_config, model=config.model)
    if select.is_ours(config, model_config=model_config, device=device):
        attention = IMPLEMENTATION
        register()
    legality.check(config, world_size=layout.world_size, model_config=model_config, attn_implementation=attention)
    dtype = torch.bfloat16 if config.precision is Precision.bf16 else torch.float32
    weights = Weights(folder)
    model = build_on_meta(model_config, dtype=dtype, attn_implementation=attention)
    if config.tp_size > 1:
        legality.check_layers(config, model=model)
    check(model, weights)
    refuse_contradicting_ties(model, weights)
    tokenizer = source.read_tokenizer(folder)
    data = prepare_for(config, tokenizer=tokenizer, vocab_size=model_config.vocab_size, show_progress=rank() == 0)
    total = total_updates(
        None if isinstance(data.train, StreamRowSet) else len(data.train),
        global_batch_size=config.global_batch_size,
        num_epochs=config.num_epochs,
        max_steps=config.max_steps,
    )
    if rank() == 0:
        tidy(Path(config.output_dir).expanduser().absolute() / CHECKPOINTS)
    identity = data_identity(
        config.data,
        digest=data.digest,
        rows=data.stats.rows,
        tokens=data.stats.tokens,
        vocabulary=len(tokenizer),
        tokenizer=tokenizer_digest(tokenizer),
        state=stream_state(config.data) if config.data.streaming else None,
    )
    return Plan(
        config=config,
        layout=layout,
        device=device,
        folder=folder,
        weights=weights,
        model=model,
        tokenizer=tokenizer,
        data=data,
        total_steps=total,
        learning_rate=learning_rates(config.optim, total_steps=total),
        data_identity=identity,
        resume=checkpoint_to_resume(config, total_steps=total, shapes=stored_shapes(model), identity=identity),
    )


def run(plan: Plan, *, engine: ZeroEngine, mesh: Mesh, board: Board, plain: dict[str, Any]) -> tuple[Outcome, Path]:
    """Train from the start or a checkpoint to the end; returns the outcome and the newest checkpoint."""
    config = plan.config
    refuse_other_data(plan, board=board)
    if mesh.is_main:
        begin(plan.output_dir, config=config, plain=plain)
    accelerator = start_trackers(config.tracker, output_dir=plan.output_dir, device=plan.device, config=plain)
    progress, resumed, remarks = go_on(plan, engine=engine, mesh=mesh, board=board)
    if mesh.is_main:
        write_json(plan.output_dir / "deepspeed.json", deepspeed_json(config, layout=plan.layout))
        summary.print_start(plan, device_name=device_name(plan.device), step=progress.step, resumed=remarks)
    reporter = Reporter(
        enabled=mesh.is_main, total_steps=plan.total_steps, first_step=progress.step, output_dir=plan.output_dir
    )
    split = select.splitter(config, model_config=plan.model.config, group=mesh.axis_groups["cp"], device=plan.device)
    trackers = Trackers(accelerator, say=reporter.say)
    loop = TrainingLoop(
        config=config,
        engine=engine,
        mesh=mesh,
        device=plan.device,
        model_config=plan.model.config,
        split=split,
        learning_rate=plan.learning_rate,
        reporter=reporter,
        track=trackers.log,
        peak_flops=peak_flops(config.cluster.accelerator or device_name(plan.device), config.precision.value),
    )
    saver = Saver(
        plan.output_dir / CHECKPOINTS,
        engine=engine,
        mesh=mesh,
        board=board,
        about={"run": _about(plan), "random": RANDOM},
        config=plain,
        keep_last=config.keep_last,
        keep_every=config.keep_every,
        in_background=config.save_async,
        say=reporter.say,
        resumed=resumed,
    )

    def evaluate(at: Progress) -> None:
        if plan.data.eval is None:
            return
        loss, targets = evaluate_loss(map(split, _eval_batches(plan, mesh=mesh)), engine=engine, mesh=mesh)
        metrics = {"eval/loss": loss, "eval/perplexity": math.exp(min(loss, 700.0)), "eval/targets": targets}
        reporter.record(at.step, metrics=metrics)
        reporter.say(f"evaluation after update {at.step}: loss {loss:.4f}, perplexity {metrics['eval/perplexity']:.2f}")
        trackers.log(metrics, at.step)

    with reporter:
        updates = _loader(plan, mesh=mesh).updates(
            progress.rows, num_epochs=config.num_epochs, max_steps=config.max_steps, shortcut=progress.shortcut
        )
        try:
            outcome = loop.run(
                prefetch(updates), progress=progress, saver=saver, evaluate=evaluate, started=launched_at()
            )
            newest = saver.finish(outcome.progress)
            if not outcome.stopped and outcome.evaluated != outcome.progress.step:
                evaluate(outcome.progress)
        except Exception:
            with suppress(Exception):  # a rank may be gone
                saver.settle()  # what is being written is from before
            raise
        finally:
            trackers.finish()
    if outcome.bad_data:
        raise outcome.bad_data
    return outcome, newest


def _loader(plan: Plan, *, mesh: Mesh) -> Loader:
    config = plan.config
    return Loader(
        plan.data.train,
        seed=config.seed,
        global_batch_size=config.global_batch_size,
        micro_batch_size=config.micro_batch_size,
        data_rank=mesh.data_rank,
        data_size=mesh.layout.data_size,
        pad_id=pad_id(plan.tokenizer),
    )


def _eval_batches(plan: Plan, *, mesh: Mesh) -> Any:
    assert plan.data.eval is not None
    return eval_batches(
        plan.data.eval,
        micro_batch_size=plan.config.micro_batch_size,
        data_rank=mesh.data_rank,
        data_size=mesh.layout.data_size,
        pad_id=pad_id(plan.tokenizer),
    )


def _about(plan: Plan) -> dict[str, Any]:
    """What a checkpoint remembers of its run, so that it can be exported by itself."""
    return {
        "name": plan.config.name,
        "total_steps": plan.total_steps,
        "model": plan.config.model.path,
        "folder": str(plan.folder.absolute()),
        "config_changes": source.config_changes(plan.model.config, model=plan.config.model),
        "seq_len": plan.config.seq_len,
        "settings": settings_that_must_not_change(plan.config),
        "data": plan.data_identity,
    }


def _export(plan: Plan, newest: Path) -> Path:
    return export(
        newest,
        source=plan.folder,
        target=plan.output_dir / EXPORT,
        dtype=plan.config.export_dtype,
        changes=source.config_changes(plan.model.config, model=plan.config.model),
    )


def _quiet_libraries() -> None:
    """Progress and warnings are ours to show, once; libraries speak on every rank. When a rank is lost torch would print the
    schedule's whole table, hundreds of lines."""
    logging.getLogger("torch.distributed.pipelining").setLevel(logging.CRITICAL)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if rank() != 0:
        warnings.simplefilter("ignore")
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
