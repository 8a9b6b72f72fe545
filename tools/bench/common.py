"""What the benchmarks share: fresh ranks that run on request, a model folder to run on, peak memory, verdicts."""

import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

PATIENCE = 600.0  # seconds that one request may take


def console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 120)


def table(title: str, columns: tuple[str, ...], *, note: str = "", left: int = 1) -> Table:
    """`left` columns are text, the rest numbers."""
    made = Table(title=title, caption=note, title_justify="left", caption_justify="left")
    for index, name in enumerate(columns):
        made.add_column(name, justify="left" if index < left else "right", no_wrap=True)
    return made


def verdict(value: float, target: float) -> str:
    return "[green]reached[/]" if value <= target else "[red]missed[/]"


def median_ratio(ours: list[float], theirs: list[float]) -> tuple[float, float, float]:
    """(median, lower and upper quartile) of the ratios of runs that were made one right after the other."""
    ratios = sorted(mine / other for mine, other in zip(ours, theirs, strict=True))
    if len(ratios) < 4:
        return statistics.median(ratios), ratios[0], ratios[-1]
    low, _, high = statistics.quantiles(ratios, n=4)
    return statistics.median(ratios), low, high


# ---------------------------------------------------------------- ranks


class Team:
    """`world` fresh processes of one gloo group. Each makes `kind(rank=..., world=..., **options)` and then calls its
    methods on request, so that two teams can take turns, step by step."""

    def __init__(self, world: int, kind: Callable[..., Any], **options: Any) -> None:
        context = multiprocessing.get_context("spawn")
        store = Path(tempfile.gettempdir()) / f"fourfold-bench-{uuid.uuid4().hex}"
        self._store = store
        self._members: list[tuple[Any, Connection]] = []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, kind, rank, world, str(store), options), daemon=True)
            process.start()
            theirs.close()
            self._members.append((process, ours))
        self._answers()

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Results in rank order. RuntimeError with the trace if a rank fails."""
        for _, connection in self._members:
            connection.send((method, arguments))
        return self._answers()

    def _answers(self) -> list[Any]:
        answers = []
        for rank, (_, connection) in enumerate(self._members):
            if not connection.poll(PATIENCE):
                raise RuntimeError(f"rank {rank} gave no answer in {PATIENCE:.0f} s")
            good, value = connection.recv()
            if not good:
                raise RuntimeError(f"rank {rank} failed:\n{value}")
            answers.append(value)
        return answers

    def close(self) -> None:
        for process, connection in self._members:
            connection.close()
            process.kill()
            process.join()
        self._store.unlink(missing_ok=True)

    def __enter__(self) -> "Team":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _serve(connection: Connection, kind: Callable[..., Any], rank: int, world: int, store: str, options: Any) -> None:
    try:
        member = _member(kind, rank, world, store, options)
        connection.send((True, None))
        while True:
            method, arguments = connection.recv()
            connection.send((True, getattr(member, method)(*arguments)))
    except EOFError:
        return
    except BaseException:
        connection.send((False, traceback.format_exc()))


def _member(kind: Callable[..., Any], rank: int, world: int, store: str, options: Any) -> Any:
    import torch.distributed as dist

    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(rank), "TOKENIZERS_PARALLELISM": "false"}
    torch.set_num_threads(1)  # two threads of each rank would fight for the cores, and the ratios with them
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    return kind(rank=rank, world=world, **options)


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


# ---------------------------------------------------------------- memory of a process


def reset_peak() -> int:
    """Forget the peak so far; returns the bytes that are resident now."""
    Path("/proc/self/clear_refs").write_text("5")
    return status_bytes("VmRSS")


def peak() -> int:
    return status_bytes("VmHWM")


def status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


# ---------------------------------------------------------------- a model to run on


def llama_folder(folder: Path, *, layers: int, hidden: int, vocab: int, tied: bool = False) -> Path:
    """A random Llama (head size 64, two query heads for each key) as a Hugging Face folder, float32."""
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3 // 32 * 32,
        num_hidden_layers=layers,
        num_attention_heads=max(2, hidden // 64),
        num_key_value_heads=max(1, hidden // 128),
        max_position_embeddings=4096,
        tie_word_embeddings=tied,
        dtype="float32",
    )
    model = LlamaForCausalLM(config)
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def packed_rows(rows: int, length: int, *, vocab: int, seed: int) -> dict[str, torch.Tensor]:
    """Rows of two documents each. `labels` are shifted already; the last token of a document has no target."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocab, (rows, length), generator=generator)
    first = length * 5 // 8
    positions = torch.cat([torch.arange(first), torch.arange(length - first)]).repeat(rows, 1)
    labels = torch.full_like(ids, -100)
    labels[:, :-1] = ids[:, 1:]
    labels[:, first - 1] = -100
    return {"input_ids": ids, "position_ids": positions, "labels": labels}


def unshifted(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same targets as transformers wants them: it shifts by itself."""
    labels = torch.full_like(batch["labels"], -100)
    labels[:, 1:] = batch["labels"][:, :-1]
    return {**batch, "labels": labels}
