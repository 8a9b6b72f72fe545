"""Checkpoints that change the number of ranks along every axis: state bit by bit, and the next update of the uninterrupted
run."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fourfold.checkpoint.export import export
from fourfold.checkpoint.pieces import Pieces
from fourfold.layout import Layout
from fourfold.schema import OptimConfig, PipelineConfig, Precision, TrainConfig
from tests.families import save_family
from tests.parity.resume_ranks import resume_from_all, save_after_two
from tests.parity.strategies import settings
from tests.pool import RankPool
from tests.reference import worst

WAYS = {  # ZeRO stage, layout, schedule of the pipeline
    "one": (2, Layout(), "1f1b"),
    "zero3": (3, Layout(dp_shard_size=2), "1f1b"),
    "hsdp": (2, Layout(dp_shard_size=2, dp_replicate_size=2), "1f1b"),
    "tp4": (1, Layout(tp_size=4), "1f1b"),
    "V": (1, Layout(pp_size=2), "zbv"),
    "tp2 cp2 pp2": (3, Layout(tp_size=2, cp_size=2, pp_size=2), "interleaved_1f1b"),
    "tp2": (3, Layout(tp_size=2), "1f1b"),
}


def config(name: str, precision: Precision = Precision.fp32) -> TrainConfig:
    stage, _, schedule = WAYS[name]
    made = settings(stage=stage, optim=OptimConfig(max_grad_norm=0.3), precision=precision)
    return replace(made, pipeline=PipelineConfig(schedule=schedule))


@pytest.mark.parametrize(
    ("family", "kv_heads", "names"),
    [
        ("llama_tied", 2, ["one", "V", "tp2 cp2 pp2"]),
        ("phi3", 4, ["tp2", "tp4"]),
        pytest.param("llama_tied", 2, [name for name in WAYS if name != "tp2"], marks=pytest.mark.slow),
    ],
)
def test_every_layout_goes_on_from_every_other(
    ranks: RankPool, tmp_path: Path, family: str, kv_heads: int, names: list[str]
) -> None:
    """Padded vocabularies, key heads on several ranks, packed projections; each resumed by each."""
    folder = save_family(family, tmp_path / "model", num_hidden_layers=5, vocab_size=97, num_key_value_heads=kv_heads)
    checkpoints, thirds = {}, {}
    for name in names:
        thirds[name], *_ = ranks.run(
            WAYS[name][1].world_size,
            save_after_two,
            folder=folder,
            config=config(name),
            layout=WAYS[name][1],
            output=tmp_path / name,
            in_background=False,
        )
        checkpoints[name] = tmp_path / name / "step-00000002"
        torch.save(
            thirds[name].pop("saved"), tmp_path / f"{name}.pt"
        )  # not handed on: there is a limit of shared tensors
    truths = {name: tmp_path / f"{name}.pt" for name in names}
    for name in names:
        results = ranks.run(
            WAYS[name][1].world_size,
            resume_from_all,
            folder=folder,
            config=config(name),
            layout=WAYS[name][1],
            checkpoints=checkpoints,
            truths=truths,
        )
        for result in results:
            for before, found in result.items():
                assert not found["wrong"], (before, name, found["wrong"])
                assert found["loss"] == pytest.approx(thirds[before]["loss"], rel=1e-6), (before, name)
                assert found["norm"] == pytest.approx(thirds[before]["norm"], rel=1e-5), (before, name)
                distance, tensor = worst(found["state"], thirds[before]["state"])
                assert distance < 1e-4, (before, name, tensor)


def test_a_checkpoint_of_slices_is_exported_whole(ranks: RankPool, tmp_path: Path) -> None:
    """K01, P03: the export of tied embeddings has one matrix of the vocabulary's own size, which transformers loads."""
    from transformers import AutoModelForCausalLM

    folder = save_family("llama_tied", tmp_path / "model", vocab_size=97)
    third, *_ = ranks.run(
        4,
        save_after_two,
        folder=folder,
        config=config("tp4", Precision.bf16),
        layout=WAYS["tp4"][1],
        output=tmp_path / "run",
        in_background=True,
    )
    checkpoint = tmp_path / "run" / "step-00000002"
    model = AutoModelForCausalLM.from_pretrained(
        export(checkpoint, source=folder, target=tmp_path / "export", dtype="float32"), dtype=torch.float32
    )
    assert model.lm_head.weight is model.model.embed_tokens.weight
    weights: dict[str, Tensor] = dict(model.named_parameters())
    pieces = Pieces(checkpoint)
    assert weights.keys() == pieces.shapes().keys()
    for name, weight in weights.items():
        assert torch.equal(weight, third["saved"][f"master:{name}"]), name
        assert torch.equal(pieces.read(name, kind="weight"), weight.detach().bfloat16().view(-1)), name
