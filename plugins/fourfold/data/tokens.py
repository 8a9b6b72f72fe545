"""Documents to tokens, and which of them the model has to predict.

text                      every token; bos in front if the tokenizer adds one, eos at the end
prompt and completion     the completion and eos (completion.py)
messages                  what the assistant says (chat.py)
input_ids                 what its labels say (tokenised.py)
"""

import itertools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from .chat import encode_chat
from .completion import encode_answers
from .document import Document, Encoded
from .tokenised import encode_tokens
from .vocabulary import eos_id

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

BATCH = 64  # documents tokenised in one call


def encode(document: Document, *, tokenizer: "Tokenizer") -> Encoded:
    """Tokens of one document; a blank one has none.

    ValueError: no eos token; no chat template; a template whose assistant turns cannot be told apart; a completion that
    cannot be told from its prompt; ids that are none of the tokenizer's, labels that do not belong to them.
    """
    return next(encode_all([document], tokenizer=tokenizer))


def encode_all(documents: Iterable[Document], *, tokenizer: "Tokenizer") -> Iterator[Encoded]:
    """`encode` of each document, in order; texts go to the tokenizer a batch at a time, which is faster."""
    stream = iter(documents)
    while batch := list(itertools.islice(stream, BATCH)):
        texts = _texts([one["text"] for one in batch if one.get("text")], tokenizer=tokenizer)
        pairs = [(one["prompt"], one["completion"]) for one in batch if "prompt" in one]
        answers = encode_answers(pairs, tokenizer=tokenizer)
        for document in batch:
            if "text" in document:
                yield next(texts) if document["text"] else Encoded([], [])
            elif "prompt" in document:
                yield next(answers)
            elif "messages" in document:
                yield encode_chat(document["messages"], tokenizer=tokenizer)
            else:
                yield encode_tokens(document, tokenizer=tokenizer)


def _texts(texts: list[str], *, tokenizer: "Tokenizer") -> Iterator[Encoded]:
    if not texts:
        return
    bos, eos = tokenizer.bos_token_id, eos_id(tokenizer)
    # verbose: no warning about documents longer than a row
    for ids in tokenizer(texts, return_attention_mask=False, return_token_type_ids=False, verbose=False)["input_ids"]:
        if bos is not None and ids[:2] == [bos, bos]:  # the text brings its own, e.g. of a rendered conversation
            del ids[0]
        if not ids or ids[-1] != eos:  # some tokenizers end a text with eos by themselves
            ids.append(eos)
        yield Encoded(ids, [True] * len(ids))
