"""DeepSpeed itself loads what `fourfold export --to deepspeed` writes, at every stage, and goes on as we would have."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fourfold.checkpoint.universal import export_universal
from fourfold.layout import Layout
from fourfold.schema import OptimConfig
from tests.parity.resume_ranks import ROWS, save_after_two, whole_tensors
from tests.parity.strategies import settings
from tests.pool import RankPool
from tests.reference import batches, tiny_model, token_losses, worst

ADAM = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8}


@pytest.fixture(scope="module")
def exported(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """(universal folder after two updates, what the third saw and left)."""
    folder = tmp_path_factory.mktemp("universal")
    tiny_model(tied=True).save_pretrained(folder / "model")
    optim = OptimConfig(max_grad_norm=0.3, weight_decay=0.1)
    third, *_ = ranks.run(
        2,
        save_after_two,
        folder=folder / "model",
        config=settings(stage=3, optim=optim),
        layout=Layout(dp_shard_size=2),
        output=folder / "run",
        in_background=False,
    )
    export_universal(folder / "run" / "step-00000002", target=folder / "exported")
    return folder / "exported", third


def go_on(rank: int, *, folder: Path, stage: int) -> dict[str, Any]:
    """A user's own script: DeepSpeed, its own settings, one update after load_checkpoint."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    from fourfold.zero.deepspeed_internals import quiet_start

    quiet_start(torch.device("cpu"))
    world = dist.get_world_size()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.3,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "checkpoint": {"load_universal": True},
    }
    model = tiny_model(tied=True, seed=7)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    names = {id(p): name for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(groups, **ADAM)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    path, state = engine.load_checkpoint(str(folder))
    assert path
    for entry in optimizer.state.values():  # see universal.py
        entry["step"] = entry["step"].clone()
    loaded = {names[id(p)]: safe_get_full_fp32_param(p).clone() for p in model.parameters()}
    batch = batches(2, rows=ROWS)
    targets = int((batch["labels"] != -100).sum())
    mine = {key: value[rank::world] for key, value in batch.items()}
    loss = token_losses(engine, mine) * world / targets
    engine.backward(loss)
    engine.step()
    after = {names[id(p)]: safe_get_full_fp32_param(p).clone() for p in model.parameters()}
    return {"loaded": loaded, "after": after, "step": engine.global_steps, "state": state, "loss": loss.item() / world}


@pytest.mark.parametrize(("stage", "world"), [(1, 2), (2, 1), (2, 4), (3, 1), (3, 2)])
def test_deepspeed_goes_on(ranks: RankPool, exported: tuple[Path, dict[str, Any]], stage: int, world: int) -> None:
    folder, third = exported
    results = ranks.run(world, go_on, folder=folder, stage=stage)
    stored = whole_tensors(folder.parent / "run" / "step-00000002")
    assert sum(result["loss"] for result in results) == pytest.approx(third["loss"], rel=1e-6)
    for result in results:
        assert result["step"] == 3
        assert result["state"]["fourfold"]["rows"] == 2 * ROWS
        for name, tensor in result["loaded"].items():
            assert torch.equal(tensor.reshape(-1), stored[f"master:{name}"]), name
        want = {name: third["state"][f"master:{name}"] for name in result["after"]}
        distance, name = worst(result["after"], want)
        assert distance < 1e-5, name


def test_sgd_has_no_moments(ranks: RankPool, tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / "model")
    ranks.run(
        1,
        save_after_two,
        folder=tmp_path / "model",
        config=settings(stage=2, optim=OptimConfig(name="sgd")),
        layout=Layout(),
        output=tmp_path / "run",
        in_background=False,
    )
    with pytest.raises(ValueError, match="has no exp_avg, exp_avg_sq"):
        export_universal(tmp_path / "run" / "step-00000002", target=tmp_path / "exported")
    assert not (tmp_path / "exported").exists()
