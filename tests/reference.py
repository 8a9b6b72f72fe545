"""Tiny models, uneven batches, and the truth: one process, plain torch, no DeepSpeed."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, WIDTH, LAYERS, LENGTH = 96, 32, 2, 12


def tiny_model(
    *, tied: bool = False, seed: int = 0, dtype: torch.dtype = torch.float32, heads: tuple[int, int] = (4, 2)
) -> Any:
    """Llama with grouped queries: `heads` of queries and of keys."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        use_cache=False,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config).to(dtype).train()


def batches(step: int, *, rows: int, length: int = LENGTH) -> dict[str, Tensor]:
    """`rows` packed rows of uneven documents; row r has about r/rows of its labels masked."""
    generator = torch.Generator().manual_seed(1000 + step)
    ids = torch.randint(0, VOCABULARY, (rows, length), generator=generator)
    labels = torch.full_like(ids, -100)
    positions = torch.zeros_like(ids)
    for row in range(rows):
        cut = 3 + row % (length - 5)
        positions[row] = torch.cat([torch.arange(cut), torch.arange(length - cut)])
        labels[row, :-1] = ids[row, 1:]
        labels[row, cut - 1] = -100
        labels[row, : int(row / rows * (length - 2))] = -100
    return {"input_ids": ids, "position_ids": positions, "labels": labels}


def token_losses(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Sum of token losses, computed document by document: no packing, no mask, no chunks."""
    total = torch.zeros(())
    for ids, positions, labels in zip(*(batch[key] for key in ("input_ids", "position_ids", "labels")), strict=True):
        starts = (positions == 0).nonzero().flatten().tolist()
        for begin, end in zip(starts, [*starts[1:], len(ids)], strict=True):
            logits = model(ids[None, begin:end], use_cache=False).logits[0].float()
            total = total + F.cross_entropy(logits, labels[begin:end], ignore_index=-100, reduction="sum")
    return total


class Reference:
    """One process: gradients of the mean over all targets of the batch, torch optimizer on fp32 weights."""

    def __init__(self, model: Any, optimizer: torch.optim.Optimizer | None = None, max_grad_norm: float = 0.0) -> None:
        self.model, self.optimizer, self.max_grad_norm = model, optimizer, max_grad_norm

    def step(self, batch: dict[str, Tensor]) -> tuple[float, float, dict[str, Tensor]]:
        """(loss, gradient norm before clipping, gradients by name); updates if there is an optimizer."""
        targets = int((batch["labels"] != -100).sum())
        loss = token_losses(self.model, batch) / targets
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in self.model.named_parameters()}
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm or float("inf"))
        if self.optimizer is not None:
            self.optimizer.step()
        self.model.zero_grad()
        return loss.item(), norm.item(), gradients

    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}


def worst(got: dict[str, Tensor], want: dict[str, Tensor]) -> tuple[float, str]:
    """Largest distance of a tensor from the reference relative to the reference's norm, and whose it is."""
    assert got.keys() == want.keys(), got.keys() ^ want.keys()
    return max((float((got[n].float() - want[n].float()).norm() / (want[n].float().norm() + 1e-12)), n) for n in want)
