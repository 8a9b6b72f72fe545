"""What is asked of a tokenizer beside its tokens: its name, its ids, and whether they fit the model."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

# Named special tokens of a multimodal sibling that a text-only checkpoint's tokenizer may carry beyond its vocabulary.
MULTIMODAL = ("image", "audio", "video", "boi", "eoi", "boa", "eoa")


def name(tokenizer: "Tokenizer") -> str:
    return f"tokenizer {tokenizer.name_or_path or type(tokenizer).__name__}"


def eos_id(tokenizer: "Tokenizer") -> int:
    """ValueError when there is none to end a document with."""
    if tokenizer.eos_token_id is None:
        raise ValueError(f"{name(tokenizer)} has no eos token to end a document with: set its eos_token")
    return int(tokenizer.eos_token_id)


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
