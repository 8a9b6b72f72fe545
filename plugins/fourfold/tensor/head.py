"""The output projection and cross-entropy over a vocabulary that the tp ranks share: no logits are ever sent."""

from typing import Any

from torch import Tensor, nn

from fourfold.model.build import LossHead
from fourfold.slices import slice_of
from fourfold.tensor.group import TensorGroup
from fourfold.tensor.regions import Block


class VocabParallelLossHead(LossHead):
    """hidden[B, S/t, D] with sequence parallelism, else [B, S, D]; labels[B, S] -> sum of token losses, the same on all."""

    def __init__(self, head: nn.Linear, *, tensor: TensorGroup, **settings: Any) -> None:
        """`settings` are LossHead's."""
        super().__init__(head, **settings)
        self.tensor: TensorGroup = tensor
        self.block: Block = Block(tensor, overlap=False, regather=False, purpose="loss")

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        ((first, last),) = slice_of(self.weight).rows
        whole = self.block.enter(hidden)
        return self.loss(whole, labels, group=self.tensor.group, first=first, count=last - first, sent=self.tensor.sent)
