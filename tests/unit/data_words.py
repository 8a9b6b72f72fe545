"""A tokenizer of a few words, for tests that look at every token."""

from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from fourfold.data.tokens import encode

WORDS = ["<pad>", "<s>", "</s>", "<u>", "<a>", "<sys>", "a", "b", "c", "d", "e", "f", "g", "\n", "<unk>"]
MARKED = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}<a>"
    "{% generation %}{{ m.content }}</s>{% endgeneration %}"
    "{% else %}<u>{{ m.content }}</s>{% endif %}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
PLAIN = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def tokenizer(template: str | None = None, *, bos: bool = True, **options: Any) -> PreTrainedTokenizerFast:
    """One token a word; <s> in front of a text if `bos`."""
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(WORDS[:6])
    if bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", **options}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=template, name_or_path="tiny-words", **special
    )


def chat(*turns: str) -> list[dict[str, str]]:
    """`u:text`, `a:text`, `s:text` in order."""
    roles = {"u": "user", "a": "assistant", "s": "system"}
    return [{"role": roles[turn[0]], "content": turn[2:]} for turn in turns]


def shown(document: dict[str, Any], *, by: PreTrainedTokenizerFast) -> list[str]:
    """Words of a document, those to predict in brackets."""
    words = zip(*encode(document, tokenizer=by), strict=True)
    return [f"[{WORDS[number]}]" if wanted else WORDS[number] for number, wanted in words]
