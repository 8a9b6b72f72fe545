"""One process, plain transformers and plain torch: what every layout has to equal.

Nothing here is of this package but the rows it is given: no attention, loss, packing, engine or optimizer. Documents go through
the model one by one, so that none can see another; attention is eager, and the whole model is in fp32.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

GROWING = ("dynamic", "longrope")  # rotary embeddings that depend on the longest document of a row


@dataclass(frozen=True)
class Truth:
    """Of one update."""

    loss: float
    norm: float  # of the gradients, before clipping
    gradients: dict[str, Tensor]
    before: dict[str, Tensor]  # weights
    after: dict[str, Tensor]
    row_losses: Tensor  # [rows]: sums of token losses


@dataclass(frozen=True)
class Settings:
    """Of torch.optim.SGD: matrices decay, norms and biases do not."""

    learning_rate: float
    weight_decay: float
    momentum: float
    max_grad_norm: float


class Reference:
    def __init__(self, folder: Path) -> None:
        from safetensors.torch import load_file
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(folder)
        self.model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
        missing, unexpected = self.model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
        assert not unexpected, unexpected
        assert set(missing) <= ({"lm_head.weight"} if config.tie_word_embeddings else set()), missing
        self.model.tie_weights()
        self.model.train()
        self._rotary = self.model.model.rotary_emb
        self.whole_rows: bool = grows(config)

    def updates(self, rows: dict[str, Tensor], *, count: int, settings: Settings) -> Iterator[Truth]:
        """`count` updates by the same rows, columns [rows, S]; weights are left as the last one makes them."""
        parameters = list(self.model.parameters())
        optimizer = torch.optim.SGD(
            [
                {"params": [one for one in parameters if one.ndim > 1], "weight_decay": settings.weight_decay},
                {"params": [one for one in parameters if one.ndim < 2], "weight_decay": 0.0},
            ],
            lr=settings.learning_rate,
            momentum=settings.momentum,
        )
        targets = int((rows["labels"] != -100).sum())
        for _ in range(count):
            before = self._weights()
            losses = [self.row_loss(row) for row in unstacked(rows)]
            loss = torch.stack(losses).sum() / targets
            loss.backward()
            gradients = {name: one.grad.clone() for name, one in self.model.named_parameters()}
            norm = float(nn.utils.clip_grad_norm_(parameters, settings.max_grad_norm or float("inf")))
            optimizer.step()
            optimizer.zero_grad()
            rowwise = torch.stack([one.detach() for one in losses])
            yield Truth(loss.item(), norm, gradients, before, self._weights(), rowwise)

    def row_loss(self, row: dict[str, Tensor]) -> Tensor:
        """Sum of the token losses of one row [S], a document at a time."""
        if self.whole_rows:
            return self.packed_loss(row)
        total = torch.zeros(())
        for begin, end in documents(row["document_ids"]):
            total = total + self._sum(self._logits(row["input_ids"][begin:end]), row["labels"][begin:end])
        return total

    def packed_loss(self, row: dict[str, Tensor]) -> Tensor:
        """As transformers packs: it tells documents apart by positions that begin again."""
        filled = int((row["document_ids"] >= 0).sum())
        logits = self._logits(row["input_ids"][:filled], position_ids=row["position_ids"][:filled])
        return self._sum(logits, row["labels"][:filled])

    def leaking_loss(self, row: dict[str, Tensor]) -> Tensor:
        """As it would be if every token saw all before it in the row, of whatever document."""
        filled = int((row["document_ids"] >= 0).sum())
        everything = torch.ones(1, filled, dtype=torch.long)
        logits = self._logits(
            row["input_ids"][:filled], position_ids=row["position_ids"][:filled], attention_mask=everything
        )
        return self._sum(logits, row["labels"][:filled])

    def _logits(self, ids: Tensor, **rest: Tensor) -> Tensor:
        """[S] -> [S, vocabulary]; a rotary embedding that remembers is fresh for each call."""
        if self.whole_rows:
            self.model.model.rotary_emb = copy.deepcopy(self._rotary)
        given = {key: value if value.ndim == 2 else value[None] for key, value in rest.items()}
        logits: Tensor = self.model(ids[None], use_cache=False, **given).logits[0]
        return logits.float()

    @staticmethod
    def _sum(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")

    def _weights(self) -> dict[str, Tensor]:
        return {name: one.detach().clone() for name, one in self.model.named_parameters()}


def grows(config: Any) -> bool:
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope.get("rope_type"), *(one.get("rope_type") for one in rope.values() if isinstance(one, dict))]
    return any(kind in GROWING for kind in kinds)


def documents(document_ids: Tensor) -> Iterator[tuple[int, int]]:
    """[begin, end) of each in a row; padding is none."""
    ids, counts = torch.unique_consecutive(document_ids, return_counts=True)
    at = 0
    for number, count in zip(ids.tolist(), counts.tolist(), strict=True):
        if number >= 0:
            yield at, at + count
        at += count


def unstacked(rows: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    return [{name: values[number] for name, values in rows.items()} for number in range(len(rows["labels"]))]
