"""What the user got wrong is one paragraph, once, before training, within seconds."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from tests.e2e.launching import ACCELERATE, ROOT, run, warm

TINY = ["task=quickstart", "debug=cpu", "output_dir=out", "overwrite=false"]


@pytest.fixture
def model(cache: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model."""
    from fourfold.model.tiny import create_tiny_llama

    create_tiny_llama(cache / "tiny-llama")
    shutil.copytree(cache / "tiny-llama", tmp_path / "model")
    return tmp_path / "model"


def refused(*words: str, folder: Path, cache: Path, **environment: str) -> str:
    result = warm(*TINY, f"cache_dir={cache}", *words, folder=folder, **environment)
    assert result.code == 2, result.err
    assert result.seconds < 60
    assert not (folder / "out" / "metrics.jsonl").exists()
    return result.paragraph


# ------------------------------------------------------------------------------------------ two real ranks


def test_two_ranks_that_do_not_fit_the_layout(tmp_path: Path) -> None:
    result = warm(*TINY, "dp_shard_size=3", "precision=fp16", folder=tmp_path, world=2)
    for part in ("dp_shard_size=3 makes 3 processes, but 2 were started", "dp_shard_size=2", "precision=fp16"):
        assert part in result.paragraph
    assert result.seconds < 60
    assert {path.name for path in tmp_path.iterdir()} == {".out", ".err"}


def test_an_accelerate_file_with_deepspeed_settings_of_its_own(tmp_path: Path) -> None:
    """G01, G02."""
    settings = yaml.safe_load((ROOT / "tools" / "launch" / "cpu.yaml").read_text())
    (tmp_path / "ds.json").write_text(json.dumps({"train_batch_size": 16, "zero_optimization": {"stage": 0}}))
    settings |= {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "ds.json"}}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(settings))
    command = [*ACCELERATE[:-1], "mine.yaml", "-m", "fourfold", *TINY]
    result = run(command, folder=tmp_path)
    for part in ("DeepSpeed settings of its own", "zero.stage=2", "two sources", "tools/launch/"):
        assert part in result.paragraph
    assert not (tmp_path / "out").exists()


# ----------------------------------------------------------------------------------------- one warm process


def test_no_such_model(tmp_path: Path, cache: Path) -> None:
    message = refused("model=hf", "model.path=models/none", folder=tmp_path, cache=cache)
    assert f"model.path=models/none: there is no folder {tmp_path / 'models' / 'none'}" in message
    again = refused("model=hf", "model.path=models/none", folder=tmp_path, cache=cache)
    assert again == message, "what a failed start left is not another run"


def test_a_folder_that_is_no_model(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "model").mkdir()
    message = refused("model=hf", "model.path=model", folder=tmp_path, cache=cache)
    assert f"{tmp_path / 'model'} has no config.json" in message


def test_truncated_weights(model: Path, tmp_path: Path, cache: Path) -> None:
    path = model / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1000])
    message = refused("model=hf", "model.path=model", folder=tmp_path, cache=cache)
    assert f"{path} has {len(whole) - 1000} bytes where its header says {len(whole)}: it is truncated" in message


def test_tokenizer_of_another_model(model: Path, tmp_path: Path, cache: Path) -> None:
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append(
        {"id": 10**6, "content": "<far>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True}
    )  # fmt: skip
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    message = refused("model=hf", "model.path=model", folder=tmp_path, cache=cache)
    assert "token" in message
    assert "vocab" in message


@pytest.mark.parametrize(
    ("text", "part"),
    [("", "no document"), ('{"messages": [{"role": "user", "content": "hi"}]}\n', "target"), ('{"text": 3}\n', "text")],
    ids=["empty", "no target", "no text"],
)
def test_data_without_anything_to_learn(tmp_path: Path, cache: Path, text: str, part: str) -> None:
    (tmp_path / "docs.jsonl").write_text(text)
    words = ("data=jsonl", "data.path=docs.jsonl", "data.eval_documents=0")
    assert part in refused(*words, folder=tmp_path, cache=cache)


def test_no_such_data(tmp_path: Path, cache: Path) -> None:
    message = refused("data=jsonl", "data.path=docs/none.jsonl", folder=tmp_path, cache=cache)
    assert str(tmp_path / "docs" / "none.jsonl") in message


def test_no_such_checkpoint(tmp_path: Path, cache: Path) -> None:
    message = refused("resume=checkpoints/none", folder=tmp_path, cache=cache)
    assert str(tmp_path / "checkpoints" / "none") in message


def test_an_output_folder_with_another_run(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "out" / "checkpoints").mkdir(parents=True)
    (tmp_path / "out" / "run.json").write_text("{}")
    message = refused(folder=tmp_path, cache=cache)
    assert f"output_dir={tmp_path / 'out'} holds another run" in message
    assert "resume=auto" in message


def test_an_output_folder_that_cannot_be_written(tmp_path: Path, cache: Path) -> None:
    message = refused("output_dir=/proc/out", folder=tmp_path, cache=cache)
    assert "output_dir=/proc/out cannot be written" in message


def test_multirun_under_several_ranks(tmp_path: Path) -> None:
    for rank in ("0", "1"):  # each the first of its server, so that none waits for the other
        environment = {"RANK": rank, "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
        words = (*TINY, "optim.learning_rate=1e-5,2e-5", "hydra.sweep.dir=sweep")
        result = warm("--multirun", *words, folder=tmp_path, **environment)
        assert result.code == 2
        assert "--multirun would run every job in one process group" in result.paragraph
        assert "for x in ...; do accelerate launch ... -m fourfold" in result.paragraph
        assert not (tmp_path / "out").exists()


def test_settings_that_do_not_exist(tmp_path: Path, cache: Path) -> None:
    assert "Unknown keys: zero.stag" in refused("+zero.stag=2", folder=tmp_path, cache=cache)
    result = warm("task=quickstart", "tier=zero33", folder=tmp_path)
    assert result.code != 0
    assert "Available options in 'tier'" in result.err
    assert "Traceback" not in result.err


def test_a_group_that_is_set_to_nothing(tmp_path: Path) -> None:
    result = warm("task=quickstart", "tier=null", folder=tmp_path)
    assert result.code == 2
    assert "tier=null: tier is a group, of which one is chosen by name: use one of " in result.paragraph
    assert "Traceback" not in result.err


def test_nothing_said_at_all(tmp_path: Path) -> None:
    result = warm(folder=tmp_path)
    assert result.code == 2
    assert "A task sets it (task=quickstart)" in result.paragraph
