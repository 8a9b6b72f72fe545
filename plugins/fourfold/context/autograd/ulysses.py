"""What ulysses.py describes: the all-to-alls between tokens and heads, forward and backward."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fourfold.context.comm import Comm
from fourfold.context.kernels.kernel import wide
from fourfold.context.ulysses import Heads, head_split


class Split:
    """Heads over the ranks of `comm`."""

    def __init__(self, heads: int, kv_heads: int, *, comm: Comm) -> None:
        self.queries, self.keys = head_split(heads, kv_heads, ranks=comm.size)
        self.comm = comm
        self._group = heads // kv_heads

    def to_heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, H, s, D] and twice [B, K, s, D] -> [B, n, P s, D] and twice [B, m, P s, D], tokens in the order of ranks."""
        found: tuple[Tensor, Tensor, Tensor] = _ToHeads.apply(q, k, v, self)
        return found

    def to_tokens(self, out: Tensor) -> Tensor:
        """[B, n, P s, D] -> [B, H, s, D]."""
        back: Tensor = _ToTokens.apply(out, self)
        return back

    def calls(self) -> Iterator[tuple[slice, slice]]:
        """(query heads, key heads) on this rank in runs of key heads that serve equally many of them: a kernel's call each."""
        first, last = self.queries[self.comm.rank]
        runs: list[list[int]] = []  # [key heads, queries of each]
        for key in range(*self.keys[self.comm.rank]):
            served = min((key + 1) * self._group, last) - max(key * self._group, first)
            if runs and runs[-1][1] == served:
                runs[-1][0] += 1
            else:
                runs.append([1, served])
        query = key = 0
        for keys, served in runs:
            yield slice(query, query + keys * served), slice(key, key + keys)
            query, key = query + keys * served, key + keys


def over_heads(
    q: Tensor, k: Tensor, v: Tensor, *, heads: Split, attention: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> Tensor:
    """`attention` over all tokens of this rank's heads, between the two all-to-alls."""
    if heads.comm.size == 1:
        return attention(q, k, v)
    queries, keys, values = heads.to_heads(q, k, v)
    outs = [attention(queries[:, query], keys[:, key], values[:, key]) for query, key in heads.calls()]
    return heads.to_tokens(outs[0] if len(outs) == 1 else torch.cat(outs, dim=1))


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, split: Split) -> Any:
        ctx.split, ctx.shapes = split, (q.shape, k.shape)
        wanted = zip(split.queries, split.keys, strict=True)
        parts = [(q[:, slice(*query)], k[:, slice(*key)], v[:, slice(*key)]) for query, key in wanted]
        return _to_heads(parts, split=split, tokens=q.shape[2], like=q, purpose="heads")

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        split, (q_shape, k_shape) = ctx.split, ctx.shapes
        chunks = [gradient.chunk(split.comm.size, dim=2) for gradient in grads]
        parts = [[chunk[member] for chunk in chunks] for member in range(split.comm.size)]
        rows, _, tokens, size = q_shape
        counts = [(b - a, d - c) for (a, b), (c, d) in zip(split.queries, split.keys, strict=True)]
        shapes = [(rows * (n + 2 * m) * tokens * size,) for n, m in counts]
        received = split.comm.all_to_all(parts, shapes, purpose="heads_backward")
        pieces = [
            [one.view(rows, -1, tokens, size) for one in flat.split([rows * one * tokens * size for one in (n, m, m)])]
            for flat, (n, m) in zip(received, counts, strict=True)
        ]
        d_q, d_k, d_v = zip(*pieces, strict=True)
        return torch.cat(d_q, dim=1), _summed(d_k, split.keys, k_shape), _summed(d_v, split.keys, k_shape), None


def _summed(pieces: Sequence[Tensor], heads: list[Heads], shape: torch.Size) -> Tensor:
    """Gradients of key heads, where several ranks have one: their sum, in wide floats."""
    if sum(last - first for first, last in heads) == shape[1]:
        return torch.cat(list(pieces), dim=1)
    found = torch.zeros(shape, dtype=wide(pieces[0].dtype), device=pieces[0].device)
    for piece, where in zip(pieces, heads, strict=True):
        found[:, slice(*where)] += piece
    return found.to(pieces[0].dtype)


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, split: Split) -> Tensor:
        ctx.split = split
        rows, _, tokens, size = out.shape
        parts = [(part,) for part in out.chunk(split.comm.size, dim=2)]
        shapes = [(rows, last - first, tokens // split.comm.size, size) for first, last in split.queries]
        return torch.cat(split.comm.all_to_all(parts, shapes, purpose="tokens"), dim=1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        split, grad = ctx.split, grads[0]
        rows, _, tokens, size = grad.shape
        first, last = split.queries[split.comm.rank]
        parts = [(grad[:, slice(*heads)],) for heads in split.queries]
        shapes = [(rows, last - first, tokens, size)] * split.comm.size
        return torch.cat(split.comm.all_to_all(parts, shapes, purpose="tokens_backward"), dim=2), None


def _to_heads(
    parts: Sequence[Sequence[Tensor]], *, split: Split, tokens: int, like: Tensor, purpose: str
) -> tuple[Tensor, ...]:
    (a, b), (c, d) = split.queries[split.comm.rank], split.keys[split.comm.rank]
    rows, size = like.shape[0], like.shape[3]
    heads = (b - a, d - c, d - c)
    received = split.comm.all_to_all(parts, [(rows * sum(heads) * tokens * size,)] * split.comm.size, purpose=purpose)
    pieces = [flat.split([rows * one * tokens * size for one in heads]) for flat in received]
    return tuple(
        torch.cat([piece[kind].view(rows, heads[kind], tokens, size) for piece in pieces], dim=2) for kind in range(3)
    )
