"""Linear layers and the embedding, cut over the tp ranks. Parameters are plain tensors that know their slice (slices.py).

Two linears need one communication. With t ranks, A cut by output channels and B by input channels:

    y = B f(A x),   A = [A_1; ...; A_t],   B = [B_1 ... B_t]
    f(A x) = [f(A_1 x); ...; f(A_t x)]     f is elementwise (or, in attention, head by head): nothing is sent
    y = sum over i of B_i f(A_i x)         one sum over the ranks

and backward the same with the roles of A and B exchanged. Source: Shoeybi et al. 2019 (arXiv:1909.08053) section 3.

`from_...` takes the whole layer (on any device, also meta) and copies this rank's slice; `to_...` makes the whole layer
again on every rank, collective over the group.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.slices import Slice
from fourfold.tensor.cuts import Cut, rounded_up
from fourfold.tensor.group import TensorGroup
from fourfold.tensor.regions import Block, leave


class ColumnParallelLinear(nn.Module):
    """Some output channels: x[B, S, in], whole on every rank -> [B, S, out/t]."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, *, block: Block) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self.block, self._number = block, len(block.products)
        block.products.append(self)

    @classmethod
    def from_linear(cls, linear: nn.Linear, cut: Cut, *, block: Block, copies: int = 1) -> "ColumnParallelLinear":
        """`cut` is of the output channels. Each slice lies on `copies` neighbouring ranks, of which the first counts it."""
        rank = block.tensor.rank
        parameters = [
            None if whole is None else _sliced(whole, _rows(whole, cut[rank]), counted=rank % copies == 0)
            for whole in (linear.weight, linear.bias)
        ]
        assert parameters[0] is not None
        return cls(parameters[0], parameters[1], block=block)

    def to_linear(self) -> nn.Linear:
        return _whole_linear(self.weight, self.bias, tensor=self.block.tensor)

    def forward(self, x: Tensor) -> Tensor:
        return self.block.product(self._number, x, self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """Some input channels: x[B, S, in/t] -> the sum over ranks, [B, S/t, out] with sequence parallelism, else [B, S, out]."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, *, tensor: TensorGroup) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias  # the bias whole, added once to the sum
        self.tensor = tensor

    @classmethod
    def from_linear(cls, linear: nn.Linear, cut: Cut, *, tensor: TensorGroup) -> "RowParallelLinear":
        """`cut` is of the input channels."""
        height = linear.weight.shape[0]
        weight = _sliced(linear.weight, Slice(linear.weight.shape, ((0, height),), cut[tensor.rank]))
        return cls(weight, linear.bias, tensor=tensor)

    def to_linear(self) -> nn.Linear:
        return _whole_linear(self.weight, self.bias, tensor=self.tensor)

    def forward(self, x: Tensor) -> Tensor:
        total = leave(F.linear(x, self.weight), self.tensor)
        return total if self.bias is None else total + self.bias


class VocabParallelEmbedding(nn.Module):
    """Some rows of the table: ids[B, S] -> [B, S/t, D] with sequence parallelism, else [B, S, D].

    A token that another rank holds is zero here; the sum over ranks has each token once. The vocabulary is filled up to a
    multiple of the ranks with rows that no token has. `scale` multiplies what is looked up (Gemma); `padding_idx` is the
    token whose row gets no gradient."""

    def __init__(
        self, weight: nn.Parameter, *, first: int, padding_idx: int | None, scale: float | None, tensor: TensorGroup
    ) -> None:
        super().__init__()
        self.weight = weight
        self.first, self.scale, self.tensor = first, scale, tensor
        self.padding_idx = padding_idx

    @classmethod
    def from_embedding(cls, embedding: nn.Embedding, *, tensor: TensorGroup) -> "VocabParallelEmbedding":
        part = vocabulary_slice(embedding.weight, tensor=tensor)
        scale = getattr(embedding, "scalar_embed_scale", None)
        return cls(
            _sliced(embedding.weight, part),
            first=part.rows[0][0],
            padding_idx=embedding.padding_idx,
            scale=scale,
            tensor=tensor,
        )

    def to_embedding(self) -> nn.Embedding:
        """Without the scale."""
        whole = _whole(self.weight, tensor=self.tensor)
        frozen = not self.weight.requires_grad
        return nn.Embedding.from_pretrained(whole, freeze=frozen, padding_idx=self.padding_idx)

    def forward(self, ids: Tensor) -> Tensor:
        local = ids - self.first
        elsewhere = (local < 0) | (local >= len(self.weight))
        padding = None if self.padding_idx is None else self.padding_idx - self.first
        if padding is not None and not 0 <= padding < len(self.weight):
            padding = None
        found = F.embedding(local.masked_fill(elsewhere, 0), self.weight, padding_idx=padding)
        found = leave(found.masked_fill(elsewhere.unsqueeze(-1), 0.0), self.tensor, purpose="embedding")
        return found if self.scale is None else found * torch.tensor(self.scale, dtype=found.dtype)


def vocabulary_slice(weight: Tensor, *, tensor: TensorGroup) -> Slice:
    """Of an embedding or output projection [V, D]."""
    height, width = weight.shape
    rows = rounded_up(height, size=tensor.size)[tensor.rank]
    held = rows[0][1] - rows[0][0]
    return Slice(weight.shape, rows, ((0, width),), padding=-(-height // tensor.size) - held)


def sliced_vocabulary(weight: nn.Parameter, *, tensor: TensorGroup) -> nn.Parameter:
    """This rank's rows of an output projection."""
    return _sliced(weight, vocabulary_slice(weight, tensor=tensor))


def _rows(whole: Tensor, ranges: Sequence[tuple[int, int]]) -> Slice:
    return Slice(whole.shape, tuple(ranges), Slice.whole(whole.shape).columns)


def _sliced(whole: Tensor, part: Slice, *, counted: bool = True) -> nn.Parameter:
    """The parameter that holds `part`, with Megatron's attributes."""
    parameter: nn.Parameter = nn.Parameter(part.cut(whole.detach()), requires_grad=whole.requires_grad)
    by_rows = part.columns == Slice.whole(part.shape).columns
    marks = {"tensor_slice": part, "tensor_model_parallel": counted}
    for name, value in {**marks, "partition_dim": 0 if by_rows else 1, "partition_stride": 1}.items():
        setattr(parameter, name, value)
    return parameter


def _whole_linear(weight: nn.Parameter, bias: nn.Parameter | None, *, tensor: TensorGroup) -> nn.Linear:
    whole = _whole(weight, tensor=tensor)
    linear = nn.Linear(whole.shape[1], whole.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(whole, requires_grad=weight.requires_grad)
    if bias is not None:
        linear.bias = nn.Parameter(_whole(bias, tensor=tensor), requires_grad=bias.requires_grad)
    return linear


def _whole(parameter: nn.Parameter, *, tensor: TensorGroup) -> Tensor:
    """The tensor that the ranks hold slices of."""
    part: Slice | None = getattr(parameter, "tensor_slice", None)
    if part is None:
        return parameter.detach().clone()
    slices: list[Slice] = [part] * tensor.size
    dist.all_gather_object(slices, part, group=tensor.group)
    held = [torch.empty_like(parameter) for _ in slices]
    dist.all_gather(held, parameter.detach().contiguous(), group=tensor.group)
    whole = parameter.detach().new_empty(part.shape)
    for one, values in zip(slices, held, strict=True):
        one.place(values, into=whole)
    return whole
