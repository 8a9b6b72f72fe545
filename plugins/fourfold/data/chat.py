"""Conversations to tokens: only what the assistant says is to be predicted, the prompt around it is not.

Which tokens those are is told by the chat template itself when it marks them ({% generation %}); otherwise by the
difference between the conversation rendered up to an assistant turn and up to its end, which is checked token by token.
Special tokens are the template's own: none is added to what it renders.
"""

import re
from typing import TYPE_CHECKING, Any

from .document import Encoded
from .vocabulary import name

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer


def encode_chat(messages: list[dict[str, Any]], *, tokenizer: "Tokenizer") -> Encoded:
    if tokenizer.chat_template is None:
        raise ValueError(
            f"the data has messages but {name(tokenizer)} has no chat template: bring an instruct model's tokenizer, "
            "set its chat_template, or train on a text column (data.text_column)"
        )
    from jinja2 import TemplateError

    marked = _has_markers(tokenizer)
    try:
        encoded = _by_markers(messages, tokenizer=tokenizer) if marked else _by_prefix(messages, tokenizer=tokenizer)
    except (TemplateError, TypeError) as error:
        roles = [message["role"] for message in messages]
        raise ValueError(f"the chat template of {name(tokenizer)} cannot render turns {roles}: {error}") from None
    if _answers(messages if marked else messages[1:]) and not any(encoded.is_target):
        raise ValueError(
            f"the chat template of {name(tokenizer)} marks no token of an assistant turn, so that nothing would be "
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
                f"the chat template of {name(tokenizer)} has no {{% generation %}} marks, and message {turn} cannot be "
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
