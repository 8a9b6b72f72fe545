"""Documents that come as tokens: checked against the tokenizer and against their labels, then taken as they are."""

from typing import TYPE_CHECKING

from .document import Document, Encoded

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

NO_TARGET = -100  # of labels in the data; as Hugging Face has it


def encode_tokens(document: Document, *, tokenizer: "Tokenizer") -> Encoded:
    """`labels` as Hugging Face has them: as long as `input_ids`, not shifted, the token itself or -100. None: all count.

    ValueError with row and position: an id that is no token, a label that is neither; labels of another length.
    """
    ids, labels, where = document["input_ids"], document["labels"], document["where"]
    _check_ids(ids, vocabulary=len(tokenizer), where=where)
    if labels is None:
        return Encoded(ids, [True] * len(ids))
    if len(labels) != len(ids):
        raise ValueError(f"{where}: {len(labels)} labels for {len(ids)} input_ids; there must be one for each")
    for position, (token, label) in enumerate(zip(ids, labels, strict=True)):
        if label not in (token, NO_TARGET):
            shifted = position + 1 < len(ids) and label == ids[position + 1]
            hint = " (they seem to be shifted by one, which is done here)" if shifted else ""
            raise ValueError(
                f"{where}, position {position}: label {label} is neither the token there ({token}) nor -100{hint}"
            )
    return Encoded(ids, [label != NO_TARGET for label in labels])


def _check_ids(ids: list[int], *, vocabulary: int, where: str) -> None:
    for position, token in enumerate(ids):
        if type(token) is not int or not 0 <= token < vocabulary:  # True is an int to isinstance
            raise ValueError(
                f"{where}, position {position}: {token!r} is no id of the tokenizer, which has 0 to {vocabulary - 1}: "
                "tokenise with the tokenizer of model.path"
            )
