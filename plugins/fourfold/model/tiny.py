"""A small Llama with random weights and its own tokenizer, written as a Hugging Face folder: a model on any machine.

2.0 million parameters, 4 layers, grouped-query attention, tied embeddings. The byte-level BPE tokenizer of 2048 tokens
is trained on a handful of standard-library sources. Nothing is downloaded; two calls write the same bytes.
"""

import os
import shutil
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

VOCAB_SIZE = 2048
SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>")  # ids 0, 1, 2...
CORPUS = ("argparse.py", "ast.py", "datetime.py", "inspect.py", "pathlib.py", "statistics.py", "subprocess.py")
# What the assistant has to say, its end included, lies between the generation marks: those tokens are the targets.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] + eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
COMPLETE = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def create_tiny_llama(path: str | Path, *, seed: int = 0) -> Path:
    """Write the folder `path` (8 MB, float32) unless it is there; any number of processes may call at once.

    ValueError: `path` holds something else.
    """
    folder = Path(path).expanduser().absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if all((folder / name).is_file() for name in COMPLETE):
            return folder
        if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
            raise ValueError(
                f"model.path={folder} exists but is no complete tiny Llama: remove it or name another path"
            )
        scratch = folder.with_name(f"{folder.name}.tmp-{os.getpid()}")
        try:
            _write(scratch, seed=seed)
            os.replace(scratch, folder)  # whole or not at all
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _write(folder: Path, *, seed: int) -> None:
    """Without model.save_pretrained, which imports DeepSpeed where it is installed: seconds, for one small file."""
    from safetensors.torch import save_file

    model = _model(seed)
    for part in (model.config, model.generation_config, _tokenizer()):
        part.save_pretrained(folder)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}  # tied ones once
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    # safetensors makes its file readable by its owner alone; like its neighbours, it follows the umask
    (folder / "model.safetensors").chmod((folder / "config.json").stat().st_mode)


def _model(seed: int) -> "LlamaForCausalLM":
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=VOCAB_SIZE,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):  # the caller's random numbers go on as if nothing happened
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def _tokenizer() -> "PreTrainedTokenizerFast":
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library = Path(sysconfig.get_path("stdlib"))
    bpe.train_from_iterator([(library / name).read_text(encoding="utf-8") for name in CORPUS], trainer)
    bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=2048,
    )
