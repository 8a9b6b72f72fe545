"""ulysses: all-to-all from all heads of S/P tokens to all S tokens of some heads, attention there, and back.

Jacobs et al. 2023 (arXiv:2309.14509), for any number of heads: rank r has query heads [h_r, h_r+1), as evenly as they
divide, and the key heads that those look at; a key head that several ranks need goes to each of them, and its gradients
are summed where it came from. Padded to nothing, repeated nowhere.
Sent by rank r for a layer, forward, with n_i query and m_i key heads on rank i, x = B S/P D e bytes a head:
    q, k, v to heads   sum over i != r of (n_i + 2 m_i) x
    out to tokens      (P-1) n_r x
and the same in the backward pass, the other way round: (P-1) (n_r + 2 m_r) x and the sum over i != r of n_i x.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from fourfold.context.comm import Comm
from fourfold.context.kernels.kernel import Spec, wide
from fourfold.context.local import local_attention
from fourfold.context.sharding import Sharding, everything
from fourfold.context.strategy import AttentionShape, OneGroup, Options
from fourfold.context.work import Work, alone

Heads = tuple[int, int]  # [first, last)


class Ulysses(OneGroup):
    name: ClassVar[str] = "ulysses"
    balances = ("contiguous",)  # heads are split: any other order of tokens would only cost

    @classmethod
    def refusals(cls, *, cp_size: int, heads: int, kv_heads: int, options: Options) -> Iterator[str]:
        if cp_size > heads:
            yield (
                f"attention=ulysses splits {heads} query heads over cp_size={cp_size} ranks, so that some would have none: "
                f"use cp_size={heads} or less, or attention=ring, allgather or hybrid."
            )

    @classmethod
    def sent_bytes(cls, shape: AttentionShape, *, cp_size: int, rank: int, options: Options) -> dict[str, int]:
        queries, keys = head_split(shape.heads, shape.kv_heads, ranks=cp_size)
        head = shape.rows * shape.length // cp_size * shape.head_dim * shape.itemsize
        counts = [(last - first, 2 * (b - a)) for (first, last), (a, b) in zip(queries, keys, strict=True)]
        others = [one for member, one in enumerate(counts) if member != rank]
        own = counts[rank]
        return {
            "heads": sum(n + m for n, m in others) * head,
            "tokens": (cp_size - 1) * own[0] * head,
            "heads_backward": (cp_size - 1) * sum(own) * head,
            "tokens_backward": sum(n for n, _ in others) * head,
        }

    @classmethod
    def work(
        cls, shape: AttentionShape, *, cp_size: int, rank: int, options: Options, balance: str, window: int | None
    ) -> Work:
        queries, keys = head_split(shape.heads, shape.kv_heads, ranks=cp_size)
        (a, b), (c, d) = queries[rank], keys[rank]
        found = alone(rows=shape.rows, length=shape.length, heads=b - a, kv_heads=d - c, window=window)
        sent = shape.head_dim * shape.itemsize * (found.queries + 2 * found.keys)
        return replace(found, again=shape.rows * shape.heads * shape.length // cp_size, buffers=2 * sent)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, spec: Spec, sharding: Sharding) -> Tensor:
        rows = sharding.plan(
            ("ulysses", spec.window), lambda: sharding.rectangles(everything, everything, window=spec.window)
        )
        heads = Split(q.shape[1], k.shape[1], comm=self._comm)
        attention = partial(local_attention, kernel=self._kernel, rows=rows, spec=spec)
        return over_heads(q, k, v, heads=heads, attention=attention)


def head_split(heads: int, kv_heads: int, *, ranks: int) -> tuple[list[Heads], list[Heads]]:
    """(query heads, key heads) of each rank; the latter overlap where a key head serves queries of several ranks."""
    each, more = divmod(heads, ranks)
    firsts = [rank * each + min(rank, more) for rank in range(ranks + 1)]
    group = heads // kv_heads
    queries = list(itertools.pairwise(firsts))
    return queries, [(first // group, (last - 1) // group + 1) for first, last in queries]


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
