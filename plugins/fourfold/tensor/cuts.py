"""Which rows or columns of a weight each tp rank holds. Pure: numbers in, ranges out, one entry for each rank.

Rows are output channels, columns input channels. Attention is cut between heads, so that each rank has whole heads of
queries and the key/value heads that they look at.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from fourfold.planner.parameters import head_dim

if TYPE_CHECKING:  # it imports torch
    from fourfold.slices import Ranges

Cut: TypeAlias = "tuple[Ranges, ...]"  # ranges of each rank


@dataclass(frozen=True)
class Heads:
    """Attention heads of a model and what a rank of `size` gets of them."""

    heads: int
    kv_heads: int
    head_dim: int
    size: int

    @classmethod
    def of(cls, model_config: Any, *, size: int) -> "Heads":
        heads, kv_heads = model_config.num_attention_heads, model_config.num_key_value_heads
        return cls(heads, kv_heads, head_dim(model_config), size)

    @property
    def fits(self) -> bool:
        """Whole query heads for each rank, and key/value heads that split or repeat evenly."""
        return self.heads % self.size == 0 and (self.kv_heads % self.size == 0 or self.size % self.kv_heads == 0)

    @property
    def copies(self) -> int:
        """Ranks, neighbours, that hold the same key/value head."""
        return max(1, self.size // self.kv_heads)

    @property
    def local(self) -> int:
        return self.heads // self.size

    @property
    def local_kv(self) -> int:
        return max(1, self.kv_heads // self.size)

    def queries(self) -> Cut:
        return even(self.heads * self.head_dim, size=self.size)

    def keys(self) -> Cut:
        """Of the key projection, and of the value projection."""
        width = self.local_kv * self.head_dim
        return tuple(((at, at + width),) for at in (rank // self.copies * width for rank in range(self.size)))


def even(total: int, *, size: int) -> Cut:
    assert total % size == 0, (total, size)
    each = total // size
    return tuple(((rank * each, (rank + 1) * each),) for rank in range(size))


def rounded_up(total: int, *, size: int) -> Cut:
    """Equal parts of `total` filled up to a multiple of `size`; the last ranks may hold less, down to nothing."""
    each = -(-total // size)
    return tuple(((min(rank * each, total), min((rank + 1) * each, total)),) for rank in range(size))


def side_by_side(*parts: tuple[Cut, int]) -> Cut:
    """Of several matrices packed into one, one below the other, each `(its cut, its rows)`."""
    packed: list[Ranges] = [() for _ in parts[0][0]]
    above = 0
    for cut, height in parts:
        packed = [
            (*before, *((above + first, above + last) for first, last in more))
            for before, more in zip(packed, cut, strict=True)
        ]
        above += height
    return tuple(packed)


def legal_sizes(model_config: Any, *, up_to: int = 64) -> list[int]:
    """tp sizes that the heads and the MLP of a model allow."""
    return [
        size
        for size in range(1, up_to + 1)
        if Heads.of(model_config, size=size).fits
        and model_config.intermediate_size % size == 0
        and not repeats_packed_heads(model_config, size=size)
    ]


def repeats_packed_heads(model_config: Any, *, size: int) -> bool:
    """Whether key heads lie on several ranks that are packed with the queries into one matrix: a rank cannot store a part."""
    return bool(model_config.model_type == "phi3" and Heads.of(model_config, size=size).copies > 1)


def refused_sizes(model_config: Any, *, size: int) -> Iterator[str]:
    """Why the heads and the MLP of a model cannot be spread over `size` ranks. Needs no model."""
    heads = Heads.of(model_config, size=size)
    legal = ", ".join(map(str, legal_sizes(model_config)))
    if heads.heads % size:
        yield f"tp_size={size} does not divide the {heads.heads} query heads (num_attention_heads): use tp_size={legal}."
    elif not heads.fits:
        yield (
            f"tp_size={size} and {heads.kv_heads} key/value heads (num_key_value_heads): one must divide the other; use "
            f"tp_size={legal}."
        )
    if model_config.intermediate_size % size:
        yield (
            f"tp_size={size} does not divide the {model_config.intermediate_size} channels of the MLP (intermediate_size): "
            f"use tp_size={legal}."
        )
    if repeats_packed_heads(model_config, size=size):
        yield (
            f"tp_size={size} would repeat the {heads.kv_heads} key/value heads, and {model_config.model_type} packs them "
            f"with the queries into one matrix, of which a rank cannot store one part alone: use tp_size={legal}."
        )
