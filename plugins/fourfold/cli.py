"""The commands: `fourfold [train] <overrides>`, and `fourfold data`, `plan`, `dry-run`, `verify`, `advise`, `export`. Nothing
heavy is imported before a run is certain."""

import argparse
import os
import select
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import hydra
from omegaconf import DictConfig

from fourfold.config import register_schema
from fourfold.errors import let_the_first_speak, local_rank, run_and_exit, tell_and_exit
from fourfold.paths import CONF
from fourfold.words import refuse

if TYPE_CHECKING:
    from fourfold.schema import TrainConfig


def main() -> None:
    """`fourfold train ...` and `fourfold ...` are the same, so that shell completion works with both."""
    os.environ["COMP_LINE"] = os.environ.get("COMP_LINE", "").replace("fourfold train ", "fourfold ", 1)
    command = sys.argv[1] if len(sys.argv) > 1 else ""
    if command in COMMANDS:
        COMMANDS[command](sys.argv[2:])
        return
    if command == "train":
        del sys.argv[1]
    register_schema()
    with_one_voice(lambda: _of_sound_words(_compose_and_train))


def with_one_voice(compose: Callable[[], None]) -> None:
    """Hydra reports what it cannot compose on every rank; let only one of each node be heard."""
    if local_rank() != 0:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # until training begins
    try:
        compose()
    except SystemExit as leaving:
        if leaving.code == 1:  # Hydra's, for what it cannot compose
            let_the_first_speak()
        raise


def _of_sound_words(compose: Callable[[], None]) -> None:
    """Those of the command line, before Hydra reads them."""
    try:
        refuse(sys.argv[1:])
    except ValueError as error:
        sys.stderr = sys.__stderr__
        tell_and_exit(error)
    compose()


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="train")
def _compose_and_train(composed: DictConfig) -> None:
    sys.stderr = sys.__stderr__
    run_and_exit(lambda: _train(composed))


def _train(composed: DictConfig) -> int:
    from fourfold.config import to_plain, to_train_config

    config = to_train_config(composed)
    from fourfold.train import train

    return train(config, plain=to_plain(composed))


def data_command(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="fourfold data",
        usage="fourfold data [--rows N] [--full] task=... [key=value ...]",
        description="Show what a run would learn from: counts, lengths of documents, and packed rows with their targets.",
        epilog="Whatever else is given goes to Hydra, as for a run: task=quickstart data=jsonl data.path=chats.jsonl",
    )
    parser.add_argument("--rows", type=int, default=2, help="how many rows to show, as the run gets them (default: 2)")
    parser.add_argument("--full", action="store_true", help="show them from end to end")
    options, overrides = parser.parse_known_args(arguments)

    def show(config: "TrainConfig") -> None:
        from fourfold.data.look import look

        look(config, rows=options.rows, full=options.full)

    _compose_and_show(overrides, show)


def _compose_and_show(
    overrides: list[str],
    show: Callable[["TrainConfig"], int | None],
    *,
    complete: Callable[[DictConfig], None] = lambda composed: None,
    needs_data: bool = True,
) -> None:
    """For commands that look at the settings of a run and exit. `complete` fills in what may be missing."""

    @hydra.main(version_base="1.3", config_path=str(CONF), config_name="train")
    def compose(composed: DictConfig) -> None:
        complete(composed)
        run_and_exit(lambda: _show(composed, show, needs_data=needs_data))

    sys.argv[1:] = overrides
    register_schema()
    _of_sound_words(compose)


def _show(composed: DictConfig, show: Callable[["TrainConfig"], int | None], *, needs_data: bool) -> int:
    from fourfold.config import to_train_config

    return _to_a_reader(lambda: show(to_train_config(composed, needs_data=needs_data)) or 0)


def _to_a_reader(show: Callable[[], int]) -> int:
    """1, and no trace, where the reader has seen enough, as in `fourfold plan ... | head`."""
    try:
        code = show()
        sys.stdout.flush()
    except BrokenPipeError:
        output = select.poll()
        output.register(sys.stdout, 0)
        if not output.poll(0):
            raise  # another pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def plan_command(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="fourfold plan",
        usage="fourfold plan [--gpus N] [--gpu-memory GB] [--timeline FILE.svg] task=... tier=... [key=value ...]",
        description="Show what a run will hold, send and compute on a GPU, and its pipeline's schedule. No GPU needed.",
    )
    _add_gpus(parser)
    parser.add_argument("--timeline", type=Path, metavar="FILE.svg", help="also draw the schedule")
    options, overrides = parser.parse_known_args(arguments)

    def show(config: "TrainConfig") -> None:
        from fourfold.planner.show import show_plan

        show_plan(config, gpus=options.gpus, timeline=options.timeline, gpu_gb=options.gpu_memory)

    _compose_and_show(overrides, show, needs_data=False)


def dry_run_command(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="fourfold dry-run",
        usage="fourfold dry-run [--gpus N] [--gpu-memory GB] [--rank R | --all-stages] task=... tier=... [key=value ...]",
        description="Build what ranks of a run would hold, on the meta device in one process, and count it. No GPU needed.",
    )
    _add_gpus(parser)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--rank", type=int, help="this one alone, with its groups")
    which.add_argument("--all-stages", action="store_true", help="every pipeline rank (default)")
    options, overrides = parser.parse_known_args(arguments)

    def show(config: "TrainConfig") -> None:
        from fourfold.dryrun.show import show_dry_run

        show_dry_run(config, gpus=options.gpus, rank=options.rank, gpu_gb=options.gpu_memory)

    _compose_and_show(overrides, show, needs_data=False)


def _add_gpus(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpus", type=int, help="processes of the run (default: as many as one data rank needs)")
    parser.add_argument("--gpu-memory", type=float, default=80, metavar="GB", help="of a GPU, 1e9 bytes (default: 80)")


def verify_command(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="fourfold verify",
        usage="fourfold verify [--max-axis N] [--max-processes N] [--timeout S] tier=... [task=... key=value ...]",
        description="Run a recipe's layout on a few CPU processes, with a small model of the same kind and rows of its own data, and "
        "compare loss, gradients, weights and bytes with one process of plain transformers and torch. Exit code 0: equal, 1: not.",
        epilog="Whatever else is given goes to Hydra, as for a run; without a task it is task=quickstart.",
    )
    parser.add_argument("--max-axis", type=int, default=2, help="ranks of an axis at most (default: 2)")
    parser.add_argument("--max-processes", type=int, default=8, help="of a pass (default: 8, three axes of 2)")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that a pass may take (default: 300)")
    options, overrides = parser.parse_known_args(arguments)
    if not any(one.startswith(("task=", "name=")) for one in overrides):
        overrides = [*overrides, "task=quickstart"]
    notes: list[str] = []

    def complete(composed: DictConfig) -> None:
        from omegaconf import OmegaConf

        if composed.data.sources is None and OmegaConf.is_missing(composed.data, "path"):
            composed.data.kind, composed.data.path = "text", "stdlib"
            notes.append("data.path is not set: the rows are of Python's standard library")

    def show(config: "TrainConfig") -> int:
        from fourfold.verify.command import Options, verify

        return verify(config, options=Options(**vars(options)), notes=notes)

    _compose_and_show(overrides, show, complete=complete)


def advise_command(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="fourfold advise",
        description="The recipe that the scaling guide has for a model and a cluster, its reasons and its memory. No GPU needed.",
    )
    parser.add_argument("--model", required=True, help="Hugging Face folder, or a size such as 8B or 1.2B")
    parser.add_argument("--gpus", type=int, required=True, help="of the cluster, in servers of 8")
    parser.add_argument("--seq-len", type=int, required=True, help="tokens of a row")
    parser.add_argument(
        "--global-batch-tokens", type=int, metavar="T", help="of an update (default: 4M, above 50B parameters 16M)"
    )
    parser.add_argument("--gpu-memory", type=float, default=80, metavar="GB", help="of a GPU, 1e9 bytes (default: 80)")
    options = parser.parse_args(arguments)

    def show() -> int:
        from fourfold.planner.advise_show import show_advice

        show_advice(
            options.model,
            gpus=options.gpus,
            seq_len=options.seq_len,
            batch_tokens=options.global_batch_tokens,
            gpu_gb=options.gpu_memory,
        )
        return 0

    run_and_exit(lambda: _to_a_reader(show))


def export_command(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="fourfold export",
        usage="fourfold export CHECKPOINT TARGET [--to hf|deepspeed] [--dtype DTYPE]\n"
        "       fourfold export --to megatron|torchtitan|accelerate|deepspeed [--gpus N] key=value ...",
        description="Make something else of a run's newest or of a given checkpoint, or print a recipe's settings for another "
        "launcher.",
        epilog="CHECKPOINT: folder of a run, or of one checkpoint (step-00000040). TARGET: folder to write; must not exist yet. "
        "key=value: as for a run, task=llama3_8b tier=nd; what the launcher has no words for goes to stderr.",
    )
    parser.add_argument(
        "--to",
        choices=("hf", "deepspeed", "megatron", "torchtitan", "accelerate"),
        default="hf",
        help="Hugging Face folder, DeepSpeed universal checkpoint or JSON, or the launcher's own settings",
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="of hf; default: that of the model")
    parser.add_argument("--gpus", type=int, help="of a recipe (default: as many as one data rank needs)")
    options, rest = parser.parse_known_args(arguments)
    if options.to in ("hf", "deepspeed") and not _is_recipe(rest):
        if len(rest) != 2:
            parser.error("give a CHECKPOINT and a TARGET folder, or key=value of a recipe and --to")
        run_and_exit(lambda: _export_checkpoint(*map(Path, rest), options=options))
    if options.to == "hf":
        parser.error("--to hf needs a checkpoint; a recipe goes to megatron, torchtitan, accelerate or deepspeed")

    def show(config: "TrainConfig") -> None:
        from fourfold.interop.show import show_settings

        show_settings(config, to=options.to, gpus=options.gpus)

    _compose_and_show(rest, show, needs_data=False)


def _is_recipe(arguments: list[str]) -> bool:
    """Hydra's own options, `--config-dir mine`, may be among its key=value."""
    first = arguments[0] if arguments else ""
    return first.startswith("-") or ("=" in first and not Path(first).exists())


def _export_checkpoint(checkpoint: Path, target: Path, *, options: argparse.Namespace) -> int:
    from fourfold.checkpoint.export import export_checkpoint

    print(export_checkpoint(checkpoint, target=target, dtype=options.dtype, to=options.to))
    return 0


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "data": data_command,
    "plan": plan_command,
    "dry-run": dry_run_command,
    "verify": verify_command,
    "advise": advise_command,
    "export": export_command,
}
