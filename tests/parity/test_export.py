"""The Hugging Face folder that comes out: the user's own files, the right dtype, weights bit by bit."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fourfold.checkpoint.export import export, export_checkpoint
from fourfold.model.tiny import create_tiny_llama
from tests.families import save_family
from tests.parity.run_ranks import refused_run, whole_run
from tests.pool import RankPool
from tests.reference import tiny_model


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as a user has it: bf16, its own generation config, chat template and a file that we do not know."""
    folder = tmp_path_factory.mktemp("models") / "mine"
    create_tiny_llama(folder)
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(folder / "model.safetensors").items()}
    from safetensors.torch import save_file

    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16", "custom": "kept"}, indent=2))
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.3, "do_sample": True}))
    (folder / "extra.txt").write_text("the user's own")
    return folder


def run(ranks: RankPool, source: Path, output: Path, *more: str, world: int = 2) -> Path:
    overrides = [
        "task=quickstart",
        "debug=cpu",
        "model=hf",
        f"model.path={source}",
        f"cache_dir={source.parent / 'cache'}",
        f"output_dir={output}",
        "seq_len=16",
        "max_steps=1",
        *more,
    ]
    ranks.run(world, whole_run, overrides=overrides)
    return output / "export"


def same_files(source: Path, exported: Path, *, changed: set[str]) -> None:
    for path in source.iterdir():
        if path.suffix != ".safetensors" and path.is_file():
            same = path.read_bytes() == (exported / path.name).read_bytes()
            assert same == (path.name not in changed), path.name


@pytest.mark.parametrize(("tier", "precision"), [("zero2", "fp32"), ("zero3", "bf16")])
def test_k05_nothing_but_the_weights_changes(
    ranks: RankPool, source: Path, tmp_path: Path, tier: str, precision: str
) -> None:
    """Megatron-Bridge#5994: trained with rows of 16 and fp32, the bf16 model's own files come out as they were."""
    exported = run(ranks, source, tmp_path, f"tier={tier}", f"precision={precision}")
    same_files(source, exported, changed=set())
    weights, before = load_file(exported / "model.safetensors"), load_file(source / "model.safetensors")
    assert weights.keys() == before.keys()
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    parameters = sum(tensor.numel() for tensor in weights.values())
    assert 2 * parameters < (exported / "model.safetensors").stat().st_size < 2 * parameters + 10_000
    assert (exported / "model.safetensors").stat().st_mode & 0o777 == (exported / "config.json").stat().st_mode & 0o777
    assert "Fine-tuned from" in (exported / "README.md").read_text()


@pytest.mark.parametrize(("tier", "precision"), [("dp", "bf16"), ("zero3", "fp32")])
def test_an_untrained_model_comes_out_bit_by_bit(
    ranks: RankPool, source: Path, tmp_path: Path, tier: str, precision: str
) -> None:
    exported = run(ranks, source, tmp_path, f"tier={tier}", f"precision={precision}", "optim.learning_rate=0")
    before, after = load_file(source / "model.safetensors"), load_file(exported / "model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_fp32_weights_survive_a_bf16_run(ranks: RankPool, tmp_path: Path) -> None:
    """Master weights come from the file, not from the bf16 copy of it."""
    source = tmp_path / "model"
    create_tiny_llama(source)
    exported = run(ranks, source, tmp_path / "run", "tier=zero3", "precision=bf16", "optim.learning_rate=0")
    before, after = load_file(source / "model.safetensors"), load_file(exported / "model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.fixture(scope="module")
def trained(ranks: RankPool, source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """Weights after an update by one process."""
    output = tmp_path_factory.mktemp("trained")
    return load_file(run(ranks, source, output, *UPDATE, "tier=zero2", world=1) / "model.safetensors")


UPDATE = ["precision=fp32", "optim=sgd", "optim.learning_rate=0.1", "export_dtype=float32"]


@pytest.mark.parametrize("threshold", [0, 100_000])
def test_k01_k02_every_tensor_is_whole_and_tied_ones_stay_tied(
    ranks: RankPool, source: Path, tmp_path: Path, trained: dict[str, torch.Tensor], threshold: int
) -> None:
    """Yi#129, Automodel#2571: parameters partitioned or, below the threshold, whole; the head is the embedding."""
    from transformers import AutoModelForCausalLM

    more = ["tier=zero3", f"zero.stage3_param_persistence_threshold={threshold}"]
    exported = run(ranks, source, tmp_path, *UPDATE, *more)
    model = AutoModelForCausalLM.from_pretrained(exported)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    weights = load_file(exported / "model.safetensors")
    assert {name: tensor.shape for name, tensor in weights.items()} == {
        name: parameter.shape for name, parameter in model.named_parameters()
    }
    for name, want in trained.items():
        torch.testing.assert_close(weights[name], want, rtol=1e-5, atol=1e-6, msg=name)
    before = load_file(source / "model.safetensors")["model.embed_tokens.weight"].float()
    assert not torch.equal(weights["model.embed_tokens.weight"], before)


def test_k01_tied_by_the_config_but_not_in_the_files_is_refused(ranks: RankPool, source: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    shutil.copytree(source, tmp_path / "model")
    weights = load_file(source / "model.safetensors")
    head = weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    run(ranks, tmp_path / "model", tmp_path / "same", world=1)  # the same twice does no harm
    head[7, 3] += 1
    save_file(weights, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    overrides = ["task=quickstart", "debug=cpu", "model=hf", f"model.path={tmp_path / 'model'}"]
    (message,) = ranks.run(1, refused_run, overrides=[*overrides, f"output_dir={tmp_path / 'other'}"])
    assert "ties lm_head.weight to model.embed_tokens.weight (tie_word_embeddings=true)" in message


@pytest.fixture(scope="module")
def not_exported(ranks: RankPool, source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Output folder of a run of two ranks that made no export."""
    output = tmp_path_factory.mktemp("not-exported") / "run"
    assert not run(ranks, source, output, "export=false").exists()
    return output


def test_a_damaged_checkpoint_is_not_exported(not_exported: Path, tmp_path: Path) -> None:
    shutil.copytree(not_exported, tmp_path / "run")
    file = next((tmp_path / "run" / "checkpoints").iterdir()) / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"is damaged: rank-00000.safetensors is not what was written"):
        export_checkpoint(tmp_path / "run", target=tmp_path / "mine", dtype=None)
    assert not (tmp_path / "mine").exists()


def test_a_stretched_context_is_written_and_loads(ranks: RankPool, source: Path, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    exported = run(
        ranks,
        source,
        tmp_path,
        "model.rope_scaling={rope_type: yarn, factor: 4.0}",
        "model.max_position_embeddings=8192",
        world=1,
    )
    same_files(source, exported, changed={"config.json"})
    config = AutoConfig.from_pretrained(exported)
    assert config.max_position_embeddings == 8192
    assert config.rope_parameters["rope_type"] == "yarn"
    assert config.rope_parameters["factor"] == 4.0
    assert json.loads((exported / "config.json").read_text())["custom"] == "kept"
    AutoModelForCausalLM.from_pretrained(exported)


def test_export_in_another_dtype_and_offline_from_a_run(not_exported: Path, tmp_path: Path) -> None:
    target = export_checkpoint(not_exported, target=tmp_path / "mine", dtype="float32")
    assert {tensor.dtype for tensor in load_file(target / "model.safetensors").values()} == {torch.float32}
    assert json.loads((target / "config.json").read_text())["dtype"] == "float32"
    with pytest.raises(ValueError, match="exists already"):
        export_checkpoint(not_exported, target=target, dtype=None)
    with pytest.raises(ValueError, match="neither a complete checkpoint nor a run"):
        export_checkpoint(tmp_path, target=tmp_path / "other", dtype=None)


def test_large_models_are_split_over_files(
    source: Path, not_exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    checkpoint = next((not_exported / "checkpoints").iterdir())
    monkeypatch.setattr("fourfold.checkpoint.export.SHARD_BYTES", 600_000)
    target = export(checkpoint, source=source, target=tmp_path / "split")
    files = sorted(path.name for path in target.glob("*.safetensors"))
    assert len(files) > 3
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == files
    assert all((target / name).stat().st_size < 1_000_000 for name in files)
    AutoModelForCausalLM.from_pretrained(target)


def test_tied_weights_are_stored_once(tmp_path: Path) -> None:
    tiny_model(tied=True).save_pretrained(tmp_path / "tied")
    save_family("llama", tmp_path / "untied")
    assert "lm_head.weight" not in load_file(tmp_path / "tied" / "model.safetensors")
    assert "lm_head.weight" in load_file(tmp_path / "untied" / "model.safetensors")
