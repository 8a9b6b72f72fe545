"""The tiny Llama that quickstart and tests make: complete, the same bytes each time, loaded without a warning."""

import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fourfold.data.tokens import encode
from fourfold.data.vocabulary import check_vocabulary
from fourfold.model.tiny import VOCAB_SIZE, create_tiny_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return create_tiny_llama(tmp_path_factory.mktemp("tiny") / "model")


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_loads_as_any_hugging_face_folder(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert not caplog.records
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.dtype == torch.float32
    assert 1.5e6 < sum(weight.numel() for weight in model.parameters()) < 3e6
    assert model.lm_head.weight is model.get_input_embeddings().weight
    out = model(input_ids=torch.tensor([[1, 5, 9]]), labels=torch.tensor([[1, 5, 9]]))
    assert 6 < out.loss.item() < 9.5  # near log(2048): nothing is learnt yet


def test_tokenizer_round_trip_and_vocabulary(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    check_vocabulary(tokenizer, VOCAB_SIZE, model_path="tiny")
    assert len(tokenizer) == VOCAB_SIZE
    text = "def f(x):\n\treturn 'é😀' + x  # 12345\n"
    ids, is_target = encode({"text": text}, tokenizer=tokenizer)
    assert (ids[0], ids[-1]) == (tokenizer.bos_token_id, tokenizer.eos_token_id)
    assert tokenizer.decode(ids[1:-1]) == text
    assert all(is_target)
    assert len(tokenizer("    return self.parse_args(args)\n")["input_ids"]) < 15  # it has learnt from sources


def test_chat_template_marks_the_answers(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [
        {"role": "system", "content": "be short"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "yes sir"},
    ]
    ids, is_target = encode({"messages": messages}, tokenizer=tokenizer)
    wanted = [number for number, target in zip(ids, is_target, strict=True) if target]
    assert tokenizer.decode(wanted) == "yes sir</s>"
    prompt = tokenizer.apply_chat_template(messages[:2], add_generation_prompt=True)["input_ids"]
    assert ids[: len(prompt)] == prompt
    assert not any(is_target[: len(prompt)])


def test_same_bytes_each_time_and_others_by_seed(folder: Path, tmp_path: Path) -> None:
    state = torch.get_rng_state()
    again = create_tiny_llama(tmp_path / "again")
    assert torch.equal(torch.get_rng_state(), state)
    assert contents(again) == contents(folder)
    other = contents(create_tiny_llama(tmp_path / "other", seed=1))
    assert [name for name, content in contents(folder).items() if other[name] != content] == ["model.safetensors"]


def test_files_can_be_read_by_whom_the_umask_lets(folder: Path) -> None:
    assert {oct(file.stat().st_mode & 0o777) for file in folder.iterdir()} == {oct(0o666 & ~_umask())}


def _umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask


def test_complete_folder_is_left_alone(folder: Path) -> None:
    before = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    assert create_tiny_llama(folder) == folder
    assert {file.name: file.stat().st_mtime_ns for file in folder.iterdir()} == before


def test_other_content_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    with pytest.raises(ValueError, match=r"mine exists but is no complete tiny Llama"):
        create_tiny_llama(tmp_path / "mine")
    assert contents(tmp_path / "mine") == {"notes.txt": b"keep"}
    (tmp_path / "empty").mkdir()
    assert "config.json" in contents(create_tiny_llama(tmp_path / "empty"))


def test_nothing_is_left_of_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fourfold.model.tiny.CORPUS", ("no_such_source.py",))
    with pytest.raises(FileNotFoundError):
        create_tiny_llama(tmp_path / "model")
    assert [file.name for file in tmp_path.iterdir()] == ["model.lock"]
