"""Documents to tokens, and which of them the model has to predict.

Text: every token is a target. Messages: only what the assistant says is, the prompt around it is not. Which tokens
those are is told by the chat template itself when it marks them ({% generation %}); otherwise by the difference between
the conversation rendered up to an assistant turn and up to its end, which is checked token by token.
"""

import itertools
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from .sources import Document

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

# Named special tokens of a multimodal sibling that a text-only checkpoint's tokenizer may carry beyond its vocabulary.
MULTIMODAL = ("image", "audio", "video", "boi", "eoi", "boa", "eoa")
BATCH = 64  # documents tokenised in one call


class Encoded(NamedTuple):
    """One document: `input_ids[n]` and, for each, whether it is to be predicted."""

    input_ids: list[int]
    is_target: list[bool]


def encode(document: Document, *, tokenizer: "Tokenizer") -> Encoded:
    """Tokens of a text (bos if the tokenizer adds one, then eos) or of a conversation (by the chat template).

    ValueError: no eos token; no chat template; a template whose assistant turns cannot be told apart.
    """
    return next(encode_all([document], tokenizer=tokenizer))


def encode_all(documents: Iterable[Document], *, tokenizer: "Tokenizer") -> Iterator[Encoded]:
    """`encode` of each document, in order; texts go to the tokenizer a batch at a time, which is faster."""
    stream = iter(documents)
    while batch := list(itertools.islice(stream, BATCH)):
        texts = [document["text"] for document in batch if "text" in document]
        encoded = iter(_texts(texts, tokenizer=tokenizer))
        for document in batch:
            yield next(encoded) if "text" in document else _conversation(document["messages"], tokenizer=tokenizer)


def pad_id(tokenizer: "Tokenizer") -> int:
    """The id at padded positions; it is never a target and no document sees it, so that any id will do."""
    known = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return next(int(token) for token in known if token is not None)


def check_vocabulary(tokenizer: "Tokenizer", vocab_size: int, *, model_path: str) -> None:
    """ValueError when the tokenizer has ids that the model's embedding (`vocab_size` rows) has not."""
    if len(tokenizer) <= vocab_size:
        return
    named = tokenizer.special_tokens_map.items()
    sibling = {str(token) for name, token in named if name.startswith(MULTIMODAL)}
    beyond = [token for token, number in tokenizer.get_vocab().items() if number >= vocab_size and token not in sibling]
    if beyond:
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} tokens but model.path={model_path} has vocab_size={vocab_size} "
            f"(beyond it: {', '.join(sorted(beyond)[:3])}): bring the tokenizer that belongs to the model, "
            "or a model whose embedding was resized to the tokenizer"
        )


def _texts(texts: list[str], *, tokenizer: "Tokenizer") -> Iterator[Encoded]:
    if not texts:
        return
    eos = tokenizer.eos_token_id
    if eos is None:
        raise ValueError(f"{_name(tokenizer)} has no eos token to end a document with: set its eos_token")
    for ids in tokenizer(texts, verbose=False)["input_ids"]:  # verbose: no warning about documents longer than a row
        if not ids or ids[-1] != eos:  # some tokenizers end a text with eos by themselves
            ids.append(eos)
        yield Encoded(ids, [True] * len(ids))


def _conversation(messages: list[dict[str, Any]], *, tokenizer: "Tokenizer") -> Encoded:
    if tokenizer.chat_template is None:
        raise ValueError(
            f"the data has messages but {_name(tokenizer)} has no chat template: bring an instruct model's tokenizer, "
            "set its chat_template, or train on a text column (data.text_column)"
        )
    from jinja2 import TemplateError

    marked = _has_markers(tokenizer)
    try:
        encoded = _by_markers(messages, tokenizer=tokenizer) if marked else _by_prefix(messages, tokenizer=tokenizer)
    except (TemplateError, TypeError) as error:
        roles = [message["role"] for message in messages]
        raise ValueError(f"the chat template of {_name(tokenizer)} cannot render turns {roles}: {error}") from None
    if _answers(messages if marked else messages[1:]) and not any(encoded.is_target):
        raise ValueError(
            f"the chat template of {_name(tokenizer)} marks no token of an assistant turn, so that nothing would be "
            "trained: put its assistant text between {% generation %} and {% endgeneration %}, or take those marks out"
        )
    return encoded


def _answers(messages: list[dict[str, Any]]) -> bool:
    """Whether the assistant says anything; an empty answer may rightly have no token between the marks."""
    said = ("content", "tool_calls")
    return any(message["role"] == "assistant" and any(map(message.get, said)) for message in messages)


def _has_markers(tokenizer: "Tokenizer") -> bool:
    """Whether the template says where the assistant speaks. Needs character offsets, which slow tokenizers lack."""
    template = tokenizer.get_chat_template()
    return tokenizer.is_fast and re.search(r"\{%-?\s*generation\s*-?%\}", template) is not None


def _by_markers(messages: list[dict[str, Any]], *, tokenizer: "Tokenizer") -> Encoded:
    rendered: Any = tokenizer.apply_chat_template(
        messages,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
        tokenizer_kwargs={"verbose": False},
    )
    return Encoded(list(rendered["input_ids"]), [bool(mark) for mark in rendered["assistant_masks"]])


def _by_prefix(messages: list[dict[str, Any]], *, tokenizer: "Tokenizer") -> Encoded:
    """Targets of an assistant turn: what rendering it adds to the prompt before it.

    Exact only if the prompt is a prefix of the conversation up to the turn, and that of the whole conversation. A turn
    that opens the conversation answers no prompt and is no target.
    """
    whole = _render(messages, tokenizer=tokenizer)
    is_target = [False] * len(whole)
    for turn, message in enumerate(messages):
        if turn == 0 or message["role"] != "assistant":
            continue
        before = _render(messages[:turn], tokenizer=tokenizer, add_generation_prompt=True)
        after = _render(messages[: turn + 1], tokenizer=tokenizer)
        if after[: len(before)] != before or whole[: len(after)] != after:
            raise ValueError(
                f"the chat template of {_name(tokenizer)} has no {{% generation %}} marks, and message {turn} cannot be "
                "told from its prompt (the prompt's tokens are no prefix of the conversation's): put the assistant "
                "text of the template between {% generation %} and {% endgeneration %}, or strip white space at the "
                f"start of the answer {str(message.get('content'))[:40]!r}"
            )
        is_target[len(before) : len(after)] = [True] * (len(after) - len(before))
    return Encoded(whole, is_target)


def _render(messages: list[dict[str, Any]], *, tokenizer: "Tokenizer", **options: Any) -> list[int]:
    rendered: Any = tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=True, tokenizer_kwargs={"verbose": False}, **options
    )
    return list(rendered["input_ids"])


def _name(tokenizer: "Tokenizer") -> str:
    return f"tokenizer {tokenizer.name_or_path or type(tokenizer).__name__}"
