"""Rows of a micro-batch to this rank's part of them: inputs, labels and positions by one and the same ownership."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fourfold.context.attention import Context
from fourfold.context.sharding import RowShares, Sharding, documents_of, positions
from fourfold.context.strategy import ContextStrategy
from fourfold.context.work import unit

PADDED = {"input_ids": 0, "labels": -100, "position_ids": 0, "document_ids": -1}


class Splitter:
    """Called on all cp ranks with the same rows. The labels are shifted already, so that no border loses a target.

    The ranks compare the rows of the first `compared` calls: those of the first update.
    """

    def __init__(
        self,
        strategy: ContextStrategy,
        *,
        group: dist.ProcessGroup,
        balance: str,
        device: torch.device,
        compared: int,
        parts: int = 1,
    ) -> None:
        """A rank's tokens will be cut into `parts` once more, by tensor parallelism."""
        self._strategy, self._group, self._balance, self._device = strategy, group, balance, device
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._parts = parts
        self._to_compare = compared if self._size > 1 else 0

    def __call__(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        """Columns [B, S] -> [B, S/P] of this rank and `context`; S is filled up to what P needs first."""
        if self._to_compare > 0:
            self._to_compare -= 1
            self._refuse_other_rows(batch)
        length = batch["input_ids"].shape[1]
        padding = -length % unit(self._size, parts=self._parts)
        whole = {name: F.pad(values, (0, padding), value=PADDED[name]) for name, values in batch.items()}
        rows = []
        for document_ids in whole["document_ids"]:
            documents = documents_of(document_ids)
            rows.append(
                RowShares(
                    self._strategy.ownership(length + padding, documents, balance=self._balance, ranks=self._size),
                    documents,
                )
            )
        mine = torch.stack([positions(row.ownership[self._rank]) for row in rows])
        part: dict[str, Any] = {name: values.gather(1, mine) for name, values in whole.items()}
        last = int(batch["position_ids"].max())
        return {**part, "context": Context(self._strategy, Sharding(tuple(rows)), last)}

    def _refuse_other_rows(self, batch: dict[str, Tensor]) -> None:
        """Ranks that read different rows would exchange what does not belong together, or wait for ever."""
        weights = torch.arange(1, batch["input_ids"].numel() + 1)
        mine = torch.stack([(values.flatten() * weights).sum() for _, values in sorted(batch.items())]).to(self._device)
        everywhere = [torch.empty_like(mine) for _ in range(self._size)]
        dist.all_gather(everywhere, mine, group=self._group)
        others = [rank for rank, one in enumerate(everywhere) if not torch.equal(one, everywhere[0])]
        if others:
            ranks = dist.get_process_group_ranks(self._group)
            raise RuntimeError(
                f"ranks {ranks[0]} and {ranks[others[0]]} of one context-parallel group read different rows or document "
                f"borders: they need the same data, tokenizer and cache"
            )
