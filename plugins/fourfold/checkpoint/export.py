"""A Hugging Face folder from a checkpoint: no process group, no GPU, memory of one weight file.

Everything but the weights is the user's own files, byte for byte, except the keys of config.json that the task changed.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from fourfold.checkpoint.files import Entry, disk_errors, sync, write_safetensors
from fourfold.checkpoint.kept import newest
from fourfold.checkpoint.pieces import INDEX, MASTER, WEIGHT, Pieces, fault, read_index
from fourfold.checkpoint.universal import export_universal
from fourfold.output import CHECKPOINTS

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
WEIGHT_FILES = (
    "*.safetensors",
    "*.safetensors.index.json",
    "*.bin",
    "*.bin.index.json",
    "*.gguf",
    "*.pth",
    "*.pt",
    "*.h5",
    "*.msgpack",
    "*.onnx",
)
SHARD_BYTES = 5 * 10**9


def export(
    checkpoint: Path, *, source: Path, target: Path, dtype: str | None = None, changes: dict[str, Any] | None = None
) -> Path:
    """Write the weights of `checkpoint` with the other files of the model folder `source` to `target`.

    `dtype` is a name of torch's; None keeps the dtype that config.json names. `changes` are keys of config.json.
    The folder appears complete or not at all; one of an earlier export is replaced.
    """
    config = json.loads((source / "config.json").read_text())
    dtype = dtype or config.get("dtype") or config.get("torch_dtype") or "float32"
    if dtype not in DTYPES:
        raise ValueError(f"export_dtype={dtype}: use one of {', '.join(DTYPES)}.")
    pieces = Pieces(checkpoint)
    aside = target.with_name(f".{target.name}.partial")
    try:
        with disk_errors(str(target.absolute())):
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
            _copy_other_files(source, aside)
            _write_config(config, aside / "config.json", dtype=dtype, changes=changes or {})
            _write_weights(pieces, aside, dtype=DTYPES[dtype])
            (aside / "README.md").write_text(_model_card(pieces.index, source=source))
            for path in aside.iterdir():
                sync(path)
            if target.is_symlink():
                target.unlink()
            shutil.rmtree(target, ignore_errors=True)
            aside.rename(target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return target


def _copy_other_files(source: Path, target: Path) -> None:
    weights = {path for pattern in WEIGHT_FILES for path in source.glob(pattern)}
    for path in source.iterdir():
        if path.is_file() and path not in weights and path.name != "README.md" and not path.name.startswith("."):
            shutil.copyfile(path, target / path.name)


def _write_config(config: dict[str, Any], path: Path, *, dtype: str, changes: dict[str, Any]) -> None:
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    if config.get(key) == dtype and not changes:
        return
    config = {**config, key: dtype, **changes}
    if "rope_parameters" in changes:  # the older spelling of the same would contradict it
        for old in ("rope_scaling", "rope_theta"):
            config.pop(old, None)
    path.write_text(json.dumps(config, indent=2) + "\n")


def _write_weights(pieces: Pieces, folder: Path, *, dtype: torch.dtype) -> None:
    groups = _shards(pieces, element_size=dtype.itemsize)
    names = [f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors" for i in range(len(groups))]
    if len(groups) == 1:
        names = ["model.safetensors"]
    weight_map: dict[str, str] = {}
    for file, group in zip(names, groups, strict=True):
        write_safetensors(
            folder / file, [_entry(pieces, name, dtype=dtype) for name in group], metadata={"format": "pt"}
        )
        weight_map |= dict.fromkeys(group, file)
    if len(groups) > 1:
        total = sum(shape.numel() * dtype.itemsize for shape in pieces.shapes().values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _entry(pieces: Pieces, name: str, *, dtype: torch.dtype) -> Entry:
    """From the weights as they were trained if that is the dtype wanted: half the bytes to read."""
    kind = WEIGHT if WEIGHT in pieces.kinds() and pieces.dtype(WEIGHT) is dtype else MASTER

    def values(start: int, stop: int) -> torch.Tensor:
        return pieces.read(name, kind=kind, start=start, count=stop - start)

    return Entry(name, tuple(pieces.shapes()[name]), dtype, values)


def _shards(pieces: Pieces, *, element_size: int) -> list[list[str]]:
    groups: list[list[str]] = [[]]
    size = 0
    for name, shape in pieces.shapes().items():
        grown = size + shape.numel() * element_size
        if groups[-1] and grown > SHARD_BYTES:
            groups.append([])
            grown = shape.numel() * element_size
        groups[-1].append(name)
        size = grown
    return groups


def _model_card(index: dict[str, Any], *, source: Path) -> str:
    run = index.get("run", {})
    progress = index["progress"]
    return (
        f"---\nlibrary_name: transformers\n{_base_model(run)}tags: [fourfold]\n---\n\n"
        f"# {run.get('name', 'fourfold run')}\n\n"
        f"Fine-tuned from `{run.get('model', source.name)}` with fourfold {index['versions']['fourfold']}: "
        f"{progress['step']} updates, {progress['tokens']:,} tokens, rows of {run.get('seq_len', '?')} tokens.\n"
    )


def _base_model(run: dict[str, Any]) -> str:
    """For the hub, which knows no folders of ours."""
    model = str(run.get("model", ""))
    return f"base_model: {model}\n" if model.count("/") == 1 and not model.startswith((".", "~", "/")) else ""


def export_checkpoint(checkpoint: Path, *, target: Path, dtype: str | None = None, to: str = "hf") -> Path:
    """Export a checkpoint, or the newest of a run's folder: `to` hf, with the model folder that its index remembers, or
    to deepspeed. Raises ValueError if there is none, it is damaged, or `target` exists."""
    if not (checkpoint / INDEX).is_file():
        found = newest(checkpoint / CHECKPOINTS)
        if found is None:
            raise ValueError(f"{checkpoint.absolute()} is neither a complete checkpoint nor a run that has one.")
        checkpoint = found
    if target.exists():
        raise ValueError(f"{target.absolute()} exists already: give a folder that does not.")
    damage = fault(checkpoint)
    if damage:
        raise ValueError(f"Checkpoint {checkpoint.absolute()} is damaged: {damage}. Export an earlier one.")
    if to == "deepspeed":
        return export_universal(checkpoint, target=target)
    run = read_index(checkpoint)["run"]
    source = Path(run["folder"])
    if not source.is_dir():
        raise ValueError(f"The model folder {source} that {checkpoint} was trained from is gone; put it back.")
    return export(checkpoint, source=source, target=target, dtype=dtype, changes=run["config_changes"])
