"""The output projection and cross-entropy over a vocabulary that the tp ranks share: no logits are ever sent."""

from torch import Tensor, nn

from fourfold.model.build import default_chunk
from fourfold.model.cross_entropy import linear_cross_entropy
from fourfold.slices import slice_of
from fourfold.tensor.group import TensorGroup
from fourfold.tensor.regions import Block


class VocabParallelLossHead(nn.Module):
    """hidden[B, S/t, D] with sequence parallelism, else [B, S, D]; labels[B, S] -> sum of token losses, the same on all."""

    def __init__(
        self,
        head: nn.Linear,
        *,
        tensor: TensorGroup,
        softcap: float | None,
        chunk_size: int | None,
        twice: bool = False,
    ) -> None:
        super().__init__()
        assert head.bias is None, "none of the supported models has a bias in its head"
        self.weight: nn.Parameter = head.weight
        self.softcap: float | None = softcap
        self.chunk_size: int | None = chunk_size
        self.twice: bool = twice  # LossHead's
        self.tensor: TensorGroup = tensor
        self.block: Block = Block(tensor, overlap=False, regather=False, purpose="loss")

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        ((first, last),) = slice_of(self.weight).rows
        whole, labels = self.block.enter(hidden).flatten(0, 1), labels.flatten()
        return linear_cross_entropy(
            whole,
            self.weight,
            labels,
            group=self.tensor.group,
            first=first,
            count=last - first,
            softcap=self.softcap,
            chunk_size=self.chunk_size or default_chunk(len(labels), self.weight),
            sent=self.tensor.sent,
            twice=self.twice,
        )
