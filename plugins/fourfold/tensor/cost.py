"""Bytes that tensor parallelism sends, as formulas of the layout. Pure: imports no torch.

Legend: B rows, S tokens of a row on one cp rank, H channels of the hidden states, t = tp_size ranks, N = B S H elements.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Of one micro-batch, and how it is cut."""

    rows: int  # B
    length: int  # S, padded to a multiple of t
    hidden: int  # H
    itemsize: int  # bytes of an activation
    tp_size: int  # t
    sequence_parallel: bool
    regather: bool = False

    @property
    def gather(self) -> int:
        """Bytes that each rank sends in a gather or a reduce-scatter of the hidden states: (t-1)/t of them."""
        assert self.length % self.tp_size == 0 or not self.sequence_parallel, (self.length, self.tp_size)
        return self._bytes * (self.tp_size - 1) // self.tp_size

    @property
    def all_reduce(self) -> int:
        """A reduce-scatter and a gather (Patarasuk & Yuan 2009)."""
        return 2 * self._bytes * (self.tp_size - 1) // self.tp_size

    @property
    def _bytes(self) -> int:
        return self.rows * self.length * self.hidden * self.itemsize


def sent_bytes(shape: Shape, *, layers: int, losses: int, stretches: int = 0) -> dict[str, int]:
    """Bytes that each rank sends for one micro-batch, forward and backward, by purpose and collective, as
    TensorGroup.sent has them.

    A layer has two blocks, attention and MLP. With sequence parallelism each gathers its input and scatters its output's
    sum, and backward the reverse; else each sums its output, and backward its input's gradient. Both are
    8 (t-1)/t N elements a layer (Shoeybi et al. 2019, arXiv:1909.08053, section 3; Korthikanti et al. 2022,
    arXiv:2205.05198, section 4.2.2). `regather` adds a gather a block (ibid.). Activation checkpointing in `stretches`
    sends the forward pass's bytes again in backward, less the sum at the end of each stretch, which no gradient needs
    (in Llama, whose layers end with it).

    Outside of the layers: the sum of the embedding's parts and the entry of the loss, each half a block, and the loss:
    `losses` tokens, those of all chunks with a label, of which the ranks reduce three fp32 numbers each (12 bytes as they
    are, whatever the algorithm). Nothing grows with the vocabulary.

    Not here: gradients of parameters of which each rank sees a part of the tokens or heads (norms: H elements each), summed
    once a step.
    """
    if shape.tp_size == 1:
        return {}
    blocks = 2 * layers
    entered, left = (2 * blocks, 2 * blocks - stretches) if stretches else (blocks, blocks)
    if not shape.sequence_parallel:
        return _times(
            shape.all_reduce,
            {
                "block forward: all_reduce": left,
                "block backward: all_reduce": blocks,
                "embedding forward: all_reduce": 1,
                "loss backward: all_reduce": 1,
            },
            losses=losses,
        )
    counts = {
        "block forward: all_gather": entered,
        "block forward: reduce_scatter": left,
        "block backward: all_gather": blocks,
        "block backward: reduce_scatter": blocks,
        "block regather: all_gather": blocks,
        "embedding forward: reduce_scatter": 1,
        "embedding backward: all_gather": 1,
        "loss forward: all_gather": 1,
        "loss backward: reduce_scatter": 1,
    }
    if not shape.regather:
        del counts["block regather: all_gather"]
    return _times(shape.gather, counts, losses=losses)


def _times(one: int, counts: dict[str, int], *, losses: int) -> dict[str, int]:
    return {"loss": 12 * losses} | {name: one * count for name, count in counts.items()}
