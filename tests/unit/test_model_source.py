"""Which model folders are taken, which are refused and how, and what a stretched context does to the config."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from fourfold.model.build import build_on_meta
from fourfold.model.load import check
from fourfold.model.source import (
    attention_implementation,
    config_changes,
    read_config,
    read_tokenizer,
    resolve_folder,
)
from fourfold.model.weights import Weights, read_header
from fourfold.schema import ModelConfig, RopeScalingConfig
from tests.families import FAMILIES, save_family


def model(folder: Path, **more: Any) -> ModelConfig:
    return ModelConfig(path=str(folder), **more)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return save_family("llama", tmp_path / "llama")


def edit(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


@pytest.mark.parametrize("name", list(FAMILIES))
def test_supported_families_are_taken(tmp_path: Path, name: str) -> None:
    import torch

    folder = save_family(name, tmp_path)
    config = read_config(folder, model=model(folder))
    attention = attention_implementation(config, model=model(folder))
    assert attention == ("eager" if name == "gemma2" else "sdpa")
    check(build_on_meta(config, dtype=torch.float32, attn_implementation=attention), Weights(folder))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "mixtral", "num_local_experts": 8}, "mixture of experts (num_local_experts=8)"),
        ({"model_type": "qwen3_moe", "num_experts": 128}, "mixture of experts (num_experts=128)"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "encoder-decoder"),
        ({"model_type": "bert"}, "model_type bert"),
        ({"model_type": "gemma3"}, "its text part alone has model_type gemma3_text"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised (gptq)"),
    ],
)
def test_other_kinds_are_refused_by_name(llama: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=r"upported|quantised") as error:
        read_config(edit(llama, **changes), model=model(llama))
    assert says in str(error.value)


def test_missing_folder_names_the_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="there is no folder") as error:
        resolve_folder(ModelConfig(path="nowhere/at/all"))
    assert str(tmp_path / "nowhere/at/all") in str(error.value)


def test_folder_without_config_weights_or_tokenizer(tmp_path: Path, llama: Path) -> None:
    with pytest.raises(ValueError, match=r"has no config\.json"):
        read_config(tmp_path, model=model(tmp_path))
    with pytest.raises(ValueError, match="has no tokenizer"):
        read_tokenizer(llama)
    (llama / "model.safetensors").unlink()
    (llama / "pytorch_model.bin").touch()
    with pytest.raises(ValueError, match=r"has no safetensors files.*convert it once"):
        Weights(llama)


@pytest.mark.parametrize("cut", [3, 40, 2000])
def test_truncated_weights_are_found_by_their_header(llama: Path, cut: int) -> None:
    path = llama / "model.safetensors"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:cut] if cut < 2000 else path.read_bytes()[:-cut])
    says = "is not a safetensors file" if cut < 2000 else f"has {size - cut} bytes where its header says {size}"
    with pytest.raises(ValueError, match=says):
        Weights(llama)


def test_index_that_lists_a_missing_file(llama: Path) -> None:
    weight_map = {"model.norm.weight": "model-00002-of-00002.safetensors"}
    (llama / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match=r"lists model-00002-of-00002\.safetensors, which is not there"):
        Weights(llama)


def test_weights_of_another_model(llama: Path) -> None:
    import torch

    for changes, says in (
        ({"num_hidden_layers": 4}, r"lacks 9 of the \d+ tensors"),
        ({"num_hidden_layers": 2}, "has 9 tensors that a llama does not"),
        ({"intermediate_size": 40}, r"mlp.gate_proj.weight has shape \[48, 32\], config.json calls for \[40, 32\]"),
    ):
        before = (llama / "config.json").read_text()
        config = read_config(edit(llama, **changes), model=model(llama))
        with pytest.raises(ValueError, match=says):
            check(build_on_meta(config, dtype=torch.float32, attn_implementation="sdpa"), Weights(llama))
        (llama / "config.json").write_text(before)


def test_any_slice_of_a_tensor_is_read(llama: Path) -> None:
    weights = Weights(llama)
    name = "model.layers.0.mlp.gate_proj.weight"
    whole = weights.read(name)
    assert whole.numel() == weights.shape(name).numel()
    for start, count in ((0, 1), (5, 100), (31, 2), (1535, 1), (7, 0), (0, 1536)):
        assert weights.read(name, start=start, count=count).equal(whole[start : start + count])


def test_header_is_checked_against_the_size_of_the_file(tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(12))
    with pytest.raises(ValueError, match="damaged"):
        read_header(path)


def test_rope_scaling_is_applied_and_remembered_for_the_export(llama: Path) -> None:
    wanted = model(llama, rope_scaling=RopeScalingConfig(rope_type="yarn", factor=4.0), max_position_embeddings=256)
    config = read_config(llama, model=wanted)
    assert config.max_position_embeddings == 256
    assert config.rope_parameters == {
        "rope_theta": 10000.0,
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    assert config_changes(config, model=wanted) == {
        "max_position_embeddings": 256,
        "rope_parameters": config.rope_parameters,
    }
    assert config_changes(config, model=model(llama)) == {}


def test_only_full_attention_is_stretched_where_layers_differ(tmp_path: Path) -> None:
    folder = save_family("gemma3_text", tmp_path)
    config = read_config(folder, model=model(folder, rope_scaling=RopeScalingConfig(rope_type="linear", factor=8.0)))
    assert config.rope_parameters["full_attention"]["factor"] == 8.0
    assert config.rope_parameters["sliding_attention"]["rope_type"] == "default"


def test_rope_scaling_that_does_not_fit_is_refused(llama: Path) -> None:
    with pytest.raises(ValueError, match="does not fit llama"):
        read_config(llama, model=model(llama, rope_scaling=RopeScalingConfig(rope_type="llama3", factor=8.0)))
    with pytest.raises(ValueError, match="says no rope_type"):
        read_config(llama, model=model(llama, rope_scaling=RopeScalingConfig(factor=8.0)))


def test_soft_cap_and_sdpa_exclude_each_other(tmp_path: Path) -> None:
    folder = save_family("gemma2", tmp_path)
    wanted = model(folder, attn_implementation="sdpa")
    with pytest.raises(ValueError, match=r"caps attention logits at 50\.0: use eager"):
        attention_implementation(read_config(folder, model=wanted), model=wanted)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[]", "is no JSON object, but a list"),
        ('{"model_type": "llama", "hidden_size": 32, "num_attention_heads": 6}', "not a multiple of the number of att"),
    ],
)
def test_a_config_that_makes_no_sense(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=says):
        read_config(tmp_path, model=ModelConfig(path=str(tmp_path)))
