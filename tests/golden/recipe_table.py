"""The table of tiers in recipes/README.md, made of the headers of recipes/tier/*.yaml and of what they compose to."""

import re
from dataclasses import dataclass
from pathlib import Path

from fourfold.paths import RECIPES
from fourfold.schema import Offload, TrainConfig
from tests.golden.composing import TIERS, typed

README = RECIPES / "README.md"
BEGIN, END = "<!-- tiers: pytest --update -->", "<!-- end -->"
FIELDS = ("GPUs", "launch", "next", "traffic")
PUBLISHED = ("source", "MFU")  # of recipes that follow a publication
ORDER = (
    "dp",
    "zero1",
    "zero2",
    "zero3",
    "zero3_checkpointed",
    "hsdp",
    "tensor",
    "pipeline",
    "long_context",
    "nd",
    "zero3_offload",
    "olmo_7b_fsdp",
    "llama3_70b",
    "deepseek_style",
    "megatron_1t",
    "llama3_405b_8k_8192gpus",
    "llama3_405b_8k_16384gpus",
    "llama3_405b_128k",
)


@dataclass(frozen=True)
class Header:
    """Comment lines at the top of a recipe: what it is, then `#   name    text` fields that may go on below."""

    about: str
    fields: dict[str, str]


def read_header(path: Path) -> Header:
    lines = path.read_text().splitlines()
    comment = [line[1:] for line in lines[: next(i for i, line in enumerate(lines) if not line.startswith("#"))]]
    about: list[str] = []
    fields: dict[str, str] = {}
    name = ""
    for line in comment[1:]:  # the first is `@package _global_`
        start = re.match(r" {3}(\w[\w ]*?) {2,}(.+)", line)
        if start:
            name = start[1]
            fields[name] = start[2].strip()
        elif name:
            fields[name] += " " + line.strip()
        else:
            about.append(line.strip())
    return Header(" ".join(about), fields)


def tier_paths() -> dict[str, Path]:
    """Recipes in the order in which one moves from one to the next."""
    names = [name for name in TIERS if name != "none"]
    return {name: RECIPES / "tier" / f"{name}.yaml" for name in sorted(names, key=lambda n: (_place(n), n))}


def table() -> str:
    rows = [
        "| tier | GPUs | models | sharded | traffic a step | move on to | launch |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, path in tier_paths().items():
        fields = read_header(path).fields
        gpus, _, models = fields["GPUs"].partition(", models ")
        sharded = what_is_sharded(typed("task=quickstart", f"tier={name}"))
        command, note = launch_command(fields["launch"])
        cells = [f"`{name}`", gpus, models or "any", sharded, fields["traffic"], fields["next"], f"`{command}`{note}"]
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def launch_command(field: str) -> tuple[str, str]:
    """The command, and what stands behind it in parentheses ("" or " (32 servers of 8)")."""
    command, _, note = field.partition("  ")
    return command, f" {note.strip()}" if note else ""


def what_is_sharded(config: TrainConfig) -> str:
    what = ("nothing", "optimizer state", "optimizer state, gradients", "optimizer state, gradients, parameters")
    text = what[config.zero.stage]
    if config.zero.stage:
        text += " over all GPUs" if config.dp_replicate_size == 1 else " inside a server, replicas across"
    if config.pp_size > 1:
        text += "; layers over servers"
    if config.tp_size > 1:
        text = text.replace("all GPUs", "the GPUs of the same rank in each server")
        text += "; matrices, vocabulary and activations over the GPUs of a server"
    if config.cp_size > 1:
        text += "; rows over the GPUs of a server" if config.tp_size == 1 else "; rows over servers"
    if config.zero.offload.optimizer is not Offload.none:
        text += f"; kept in {config.zero.offload.optimizer.value} memory"
    if config.activation.checkpointing.value != "none":
        text += "; activations recomputed"
    return text


def with_table(readme: str) -> str:
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin, f"recipes/README.md lacks {BEGIN}"
    assert end, f"recipes/README.md lacks {END}"
    return f"{before}{begin}\n{table()}\n{end}{after}"


def _place(name: str) -> int:
    return ORDER.index(name) if name in ORDER else len(ORDER)
