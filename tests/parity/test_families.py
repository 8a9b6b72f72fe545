"""Every supported model family on packed rows on two ranks, against plain transformers: ZeRO-3 all of them, ZeRO-2, which
leaves modules as they are, one of each kind."""

from pathlib import Path

import pytest
import torch

from fourfold.layout import Layout
from fourfold.schema import OptimConfig
from tests.families import FAMILIES, family_model, save_family
from tests.parity.strategies import settings
from tests.parity.zero_ranks import train
from tests.pool import RankPool
from tests.reference import Reference, batches, worst

FLAT = ["llama", "llama_tied", "gemma3_text", "phi3"]  # under ZeRO-2 too


@pytest.mark.parametrize(("name", "stage"), [*((name, 2) for name in FLAT), *((name, 3) for name in FAMILIES)])
def test_family_equals_transformers(ranks: RankPool, tmp_path: Path, name: str, stage: int) -> None:
    folder = save_family(name, tmp_path)
    model = family_model(name)
    reference = Reference(model, torch.optim.SGD(model.parameters(), lr=0.2), max_grad_norm=0.5)
    steps = [batches(step, rows=8) for step in range(2)]
    losses, norms, gradients = zip(*(reference.step(batch) for batch in steps), strict=True)
    optim = OptimConfig(name="sgd", learning_rate=0.2, weight_decay=0.0, max_grad_norm=0.5)
    for result in ranks.run(
        2,
        train,
        folder=folder,
        config=settings(stage=stage, optim=optim),
        layout=Layout(dp_shard_size=2),
        steps=steps,
        accumulation=2,
    ):
        assert result["loss"] == pytest.approx(losses, rel=2e-6)
        assert result["norm"] == pytest.approx(norms, rel=1e-5)
        for got, want in zip(result["gradients"], gradients, strict=True):
            distance, tensor = worst(got, want)
            assert distance < 1e-5, tensor
        distance, tensor = worst(result["weights"], reference.weights())
        assert distance < 1e-5, tensor
