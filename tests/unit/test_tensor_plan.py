"""Which layers of a model are cut how, and what is refused by name."""

import pytest
import torch
from torch import nn

from fourfold.model.build import build_on_meta
from fourfold.tensor.plan import Part, parts, refusals
from tests.families import FAMILIES, family_config


def model(name: str) -> object:
    return build_on_meta(family_config(name), dtype=torch.float32, attn_implementation="eager")


@pytest.mark.parametrize("name", FAMILIES)
def test_every_linear_and_embedding_of_a_family_is_cut(name: str) -> None:
    hf = model(name)
    found = parts(hf, more={})
    layers = {key for key, module in hf.named_modules() if isinstance(module, nn.Linear | nn.Embedding)}  # type: ignore[attr-defined]
    assert {key for key, part in found.items() if part is not Part.partial} == layers
    assert found["model.embed_tokens"] is Part.embedding
    assert found["lm_head"] is Part.head
    assert found["model.layers.0.self_attn.o_proj"] is Part.row
    norms = {"model.layers.0.self_attn.q_norm", "model.layers.2.self_attn.k_norm"}
    assert (norms <= {key for key, part in found.items() if part is Part.partial}) == (name in ("qwen3", "gemma3_text"))


def test_a_style_that_is_not_known_is_refused_by_name() -> None:
    problem, *_ = refusals(model("llama"), more={"model.layers.*.mlp.side_proj": "moe_tp_experts"}, size=2)
    assert all(word in problem for word in ("moe_tp_experts", "model.layers.*.mlp.side_proj", "tensor.plan", "colwise"))


REFUSED = [
    ("model.layers.*.mlp.up_proj", "rowwise", ["rowwise", "model.layers.*.mlp.up_proj", "colwise", "leave it out"]),
    ("model.layers.*.self_attn.o_proj", "colwise", ["colwise", "rowwise"]),
    ("lm_head", "rowwise", ["lm_head", "rowwise", "colwise_gather_output"]),
    (
        "model.layers.*.input_layernorm",
        "replicated_with_grad_allreduce",
        ["input_layernorm and 2 like it", "all channels"],
    ),
    ("model.norm", "replicated_with_grad_allreduce", ["model.norm", "all channels"]),
]


@pytest.mark.parametrize(("pattern", "style", "words"), REFUSED)
def test_a_plan_that_contradicts_the_model_is_refused(pattern: str, style: str, words: list[str]) -> None:
    (problem,) = refusals(model("llama"), more={pattern: style}, size=2)
    assert all(word in problem for word in words), problem


def test_a_pattern_of_nothing_is_refused() -> None:
    (problem,) = refusals(model("llama"), more={"model.layers.*.mlp.uo_proj": "colwise"}, size=2)
    assert "model.layers.*.mlp.uo_proj" in problem


def test_a_layer_of_another_kind_is_refused_with_what_to_do() -> None:
    class LoraLinear(nn.Module):
        pass

    hf = model("llama")
    hf.model.layers[1].mlp.up_proj = LoraLinear()  # type: ignore[attr-defined]
    (problem,) = refusals(hf, more={}, size=2)
    assert all(word in problem for word in ("model.layers.1.mlp.up_proj", "LoraLinear", "merge"))


def test_a_layer_of_no_table_is_refused_until_the_user_names_it() -> None:
    hf = model("llama")
    for layer in hf.model.layers:  # type: ignore[attr-defined]
        layer.mlp.side_proj = nn.Linear(4, 4, device="meta")
    (problem,) = refusals(hf, more={}, size=2)
    assert all(word in problem for word in ("model.layers.0.mlp.side_proj and 2 like it", "tensor.plan", "colwise"))
    more = {"model.layers.*.mlp.side_proj": "colwise"}
    assert not list(refusals(hf, more=more, size=2))
    (problem,) = refusals(hf, more=more, size=8)
    assert "4 channels" in problem
    assert "tp_size=8" in problem
    assert parts(hf, more=more)["model.layers.2.mlp.side_proj"] is Part.column


def test_key_heads_on_several_ranks_are_whole_on_each() -> None:
    """Three ranks with the one key head of 8 channels."""
    more = {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 24}
    hf = build_on_meta(family_config("llama", **more), dtype=torch.float32, attn_implementation="eager")
    assert list(refusals(hf, more={}, size=3)) == []
