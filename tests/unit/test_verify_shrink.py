"""Cutting a recipe down for `fourfold verify`: what is kept of models, layouts, batches and rows. No process group."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fourfold.data.pack import COLUMNS
from fourfold.layout import AXES, Layout
from fourfold.legality import check
from fourfold.model.source import read_config
from fourfold.planner.parameters import head_dim, parameter_count
from fourfold.schema import AttentionConfig, ModelConfig, PipelineConfig, TrainConfig
from fourfold.tensor.cuts import legal_sizes
from fourfold.verify.axes import apart, cut_sizes, passes
from fourfold.verify.recipe import batch_of, recipe, remarks
from fourfold.verify.reference import Reference, grows
from fourfold.verify.rows import KnownRows, key_of
from fourfold.verify.shrink import Target, shrunken, write_model
from tests.families import FAMILIES, STRETCHED, family_config

LARGE = {"hidden_size": 512, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 16, "vocab_size": 4000}
LONG = {"num_hidden_layers": 24, "intermediate_size": 1536, "max_position_embeddings": 4096}


def target(**changes: int) -> Target:
    given = {"seq_len": 64, "of_seq_len": 2048, "stages": 1, "tp_size": 2, "of_tp_size": 4, "cp_size": 1}
    return Target(**{**given, **changes})


def large(name: str) -> Any:
    changes: dict[str, Any] = {**LARGE, **LONG}
    config = family_config(name)
    if getattr(config, "layer_types", None):
        changes["layer_types"] = (["sliding_attention"] * 5 + ["full_attention"]) * 4 if "gemma" in name else None
    if name == "phi3_longrope":
        rope = {**STRETCHED[name][1]["rope_parameters"], "original_max_position_embeddings": 2048}
        factors = {"short_factor": [1.0 + n / 8 for n in range(8)], "long_factor": [2.0 + n for n in range(8)]}
        changes |= {"rope_parameters": {**rope, **factors}, "original_max_position_embeddings": 2048}
    return family_config(name, **{key: value for key, value in changes.items() if value is not None})


@pytest.mark.parametrize("name", [*FAMILIES, *STRETCHED])
def test_a_small_model_is_of_the_same_kind(tmp_path: Path, name: str) -> None:
    config = large(name)
    before = config.to_dict()
    small = shrunken(config, target())
    assert config.to_dict() == before
    assert (small.num_attention_heads, small.num_key_value_heads) == (8, 2), "4 queries a key, split over 2 of 2"
    assert 2 in legal_sizes(small)
    if getattr(config, "query_pre_attn_scalar", None):
        assert small.query_pre_attn_scalar == config.query_pre_attn_scalar * head_dim(small) / head_dim(config)
    for key in ("model_type", "tie_word_embeddings", "hidden_act", "attn_logit_softcapping", "final_logit_softcapping"):
        assert getattr(small, key, None) == getattr(config, key, None), key
    assert bool(getattr(small, "sliding_window", None)) == bool(getattr(config, "sliding_window", None))
    kinds = [set(getattr(one, "layer_types", None) or []) for one in (config, small)]
    assert kinds[0] == kinds[1]
    assert parameter_count(small) < 200_000
    assert grows(small) == (name in STRETCHED)
    count = write_model(tmp_path / "model", small, seed=0)
    weights = load_file(tmp_path / "model" / "model.safetensors")
    assert count == parameter_count(small) == sum(one.numel() for one in weights.values())
    assert all(float(one.std()) > 0 for one in weights.values()), "norms and biases too"
    model = Reference(tmp_path / "model").model  # loads every weight
    read = read_config(tmp_path / "model", model=ModelConfig(path=str(tmp_path)))
    assert read.layer_types == small.layer_types if getattr(small, "layer_types", None) else True
    assert torch.isfinite(model(torch.arange(24)[None]).logits).all()


def test_key_heads_that_tensor_ranks_repeat_are_repeated() -> None:
    config = family_config("llama", **{**LARGE, "num_key_value_heads": 2}, **LONG)
    assert shrunken(config, target(of_tp_size=8)).num_key_value_heads == 1, "2 ranks, one key head"
    assert shrunken(config, target(of_tp_size=2)).num_key_value_heads == 2
    assert shrunken(config, target(tp_size=1, of_tp_size=1)).num_attention_heads == 32, "16 queries a key"


def test_sizes_keep_what_matters_to_tensor_ranks() -> None:
    config = family_config("llama", **LARGE, **LONG)
    assert shrunken(config, target()).vocab_size % 2 == 0
    config.vocab_size = 4001
    assert shrunken(config, target()).vocab_size % 2 == 1, "filled up over the ranks, as in a run"
    assert shrunken(config, target(cp_size=8)).num_attention_heads >= 16, "heads for each of 2 x 8"
    config.vocab_size = 300
    assert shrunken(config, target()).vocab_size == 300


def test_thresholds_of_positions_move_with_the_rows() -> None:
    small = shrunken(large("phi3_longrope"), target(seq_len=64, of_seq_len=4096))
    assert small.max_position_embeddings == 64
    assert small.rope_parameters["original_max_position_embeddings"] == 32, "rows are twice as long, as they were"
    assert len(small.rope_parameters["long_factor"]) == head_dim(small) // 2
    llama3 = shrunken(large("llama3_rope"), target(seq_len=128, of_seq_len=256)).rope_parameters
    assert (llama3["rope_type"], llama3["factor"], llama3["original_max_position_embeddings"]) == ("llama3", 8.0, 8)


def test_layers_are_one_more_than_stages() -> None:
    config = family_config("llama", **LARGE, **LONG)
    assert [shrunken(config, target(stages=stages)).num_hidden_layers for stages in (1, 2, 4)] == [2, 3, 5]


# ---------------------------------------------------------------------------------------------------------- layouts


def sized(**sizes: int) -> TrainConfig:
    return TrainConfig(name="x", **sizes)  # type: ignore[arg-type]


def test_axes_are_cut_and_those_left_open_are_spread() -> None:
    config = sized(tp_size=8, cp_size=16, pp_size=1, dp_shard_size=-1)
    assert cut_sizes(config, max_axis=2, max_processes=8) == {"tp": 2, "cp": 2, "dp_shard": 2}
    assert cut_sizes(sized(tp_size=3, dp_shard_size=1), max_axis=4, max_processes=8) == {"tp": 3}
    hybrid = replace(config, attention=AttentionConfig(name="hybrid"))
    assert cut_sizes(hybrid, max_axis=2, max_processes=8)["cp"] == 4
    with pytest.raises(ValueError, match="every size is 1"):
        cut_sizes(sized(dp_shard_size=1), max_axis=2, max_processes=8)
    with pytest.raises(ValueError, match="--max-axis 1: use 2 or more"):
        cut_sizes(config, max_axis=1, max_processes=8)


@pytest.mark.parametrize(("processes", "together", "count"), [(8, 3, 10), (4, 2, 10), (16, 4, 5), (32, 5, 1)])
def test_every_combination_that_fits_is_in_a_pass(processes: int, together: int, count: int) -> None:
    layouts = passes(dict.fromkeys(AXES, 2), max_processes=processes)
    assert len(layouts) == count
    assert {layout.world_size for layout in layouts} == {2**together}
    assert apart(dict.fromkeys(AXES, 2), layouts) == []


def test_axes_of_other_sizes() -> None:
    sizes = {"tp": 2, "cp": 4, "dp_shard": 2}
    layouts = passes(sizes, max_processes=8)
    assert layouts == [
        Layout(tp_size=2, cp_size=4),
        Layout(tp_size=2, dp_shard_size=2),
        Layout(cp_size=4, dp_shard_size=2),
    ]
    assert apart(sizes, passes(sizes, max_processes=4)) == [("tp", "cp"), ("cp", "dp_shard")]
    assert passes({"tp": 2}, max_processes=8) == [Layout(tp_size=2)]


SCHEDULES = ["gpipe", "1f1b", "looped_bfs", "interleaved_1f1b", "zero_bubble", "zbv", "dualpipe_v"]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("rows", [8, 512])
def test_batches_are_legal_in_every_pass(schedule: str, rows: int) -> None:
    config = sized(tp_size=8, cp_size=2, pp_size=4, dp_shard_size=-1, dp_replicate_size=2, global_batch_size=rows)
    config.max_steps, config.data.path = 1, "stdlib"
    config.zero.stage, config.pipeline = 1, PipelineConfig(schedule=schedule)
    sizes = cut_sizes(config, max_axis=2, max_processes=8)
    batch = batch_of(config, sizes=sizes, row_by_row=False)
    stages = 2 if schedule in ("gpipe", "1f1b") else 4
    small = shrunken(family_config("llama", **LARGE, **LONG), target(stages=stages))
    for layout in passes(sizes, max_processes=8):
        made = recipe(config, layout=layout, folder="x", batch=batch, layers=5)
        assert check(made, world_size=8, model_config=small, attn_implementation="fourfold") == layout
        if layout.pp_size > 1:
            assert made.global_batch_size // layout.data_size >= 2, "accumulation"


def test_what_is_not_verified_is_told() -> None:
    config = sized(tp_size=2)
    config.zero.offload.optimizer = type(config.zero.offload.optimizer).cpu
    config.pipeline.split = [1, 2]
    told = " ".join(remarks(config))
    for part in ("precision=bf16", "offload", "kernels of a GPU", "pipeline.split=[1, 2]"):
        assert part in told, part


# ------------------------------------------------------------------------------------------------------------- rows


def test_rows_are_kept_and_found_again(tmp_path: Path) -> None:
    columns = {name: np.arange(6).reshape(2, 3) + number for number, name in enumerate(COLUMNS)}
    KnownRows(columns).save(tmp_path / "rows.npz")
    rows = KnownRows.load(tmp_path / "rows.npz")
    assert (len(rows), rows.seq_len, rows.documents) == (2, 3, [6, 9])
    row = rows.row(1)
    assert json.dumps(row["labels"].tolist()) == "[4, 5, 6]"
    ids, labels = (torch.from_numpy(row[name]) for name in ("input_ids", "labels"))
    assert key_of(ids, labels) == key_of(row["input_ids"], row["labels"]) != key_of(labels, ids)
