"""Prompt and completion to tokens: the completion and the eos behind it are to be predicted, the prompt is not.

Both are tokenised as one text, as they will be when the model is used. A token that begins in the prompt and ends in the
completion belongs to the latter.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from .document import Encoded
from .vocabulary import eos_id, name

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer


def encode_answers(pairs: list[tuple[str, str]], *, tokenizer: "Tokenizer") -> Iterator[Encoded]:
    """(prompt, completion) each. ValueError: no eos token; a slow tokenizer that joins the two otherwise than alone."""
    if not pairs:
        return
    eos = eos_id(tokenizer)
    encoded = _by_offsets(pairs, tokenizer=tokenizer) if tokenizer.is_fast else _by_prefix(pairs, tokenizer=tokenizer)
    for ids, is_target in encoded:
        if tokenizer.bos_token_id is not None and ids[:2] == [tokenizer.bos_token_id] * 2:  # the prompt brings its own
            del ids[0], is_target[0]
        if ids and ids[-1] == eos:  # some tokenizers end a text with eos by themselves
            del ids[-1], is_target[-1]
        yield Encoded([*ids, eos], [*is_target, any(is_target)])  # no answer, nothing to learn


def _by_offsets(pairs: list[tuple[str, str]], *, tokenizer: "Tokenizer") -> Iterator[tuple[list[int], list[bool]]]:
    joined = [prompt + completion for prompt, completion in pairs]
    found = tokenizer(joined, return_offsets_mapping=True, verbose=False)
    for (prompt, _), ids, offsets in zip(pairs, found["input_ids"], found["offset_mapping"], strict=True):
        yield ids, [end > len(prompt) for _, end in offsets]  # what the tokenizer adds lies at (0, 0)


def _by_prefix(pairs: list[tuple[str, str]], *, tokenizer: "Tokenizer") -> Iterator[tuple[list[int], list[bool]]]:
    for prompt, completion in pairs:
        before = list(tokenizer(prompt, verbose=False)["input_ids"])
        if before and before[-1] == tokenizer.eos_token_id:
            del before[-1]
        ids = list(tokenizer(prompt + completion, verbose=False)["input_ids"])
        if ids[: len(before)] != before:
            raise ValueError(
                f"{name(tokenizer)} tells no character offsets, and the tokens of the prompt ending in {prompt[-20:]!r} "
                f"are no prefix of those of prompt and completion {completion[:20]!r}: use a fast tokenizer, or move "
                "white space at the border into the completion"
            )
        yield ids, [position >= len(before) for position in range(len(ids))]
