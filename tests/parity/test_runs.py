"""Whole runs: learning rates, resuming on other ranks, empty updates, losses that are not finite, stopping, saving."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from fourfold.checkpoint.files import digest_of
from fourfold.checkpoint.pieces import Pieces
from fourfold.errors import INTERRUPTED_EXIT
from tests.parity.run_ranks import (
    metrics,
    refused_run,
    run_from_now,
    run_on_own_data,
    run_stopped_by_signal,
    run_with_nan,
    whole_run,
)
from tests.pool import RankPool

QUICK = ["task=quickstart", "debug=cpu", "optim.learning_rate=1e-3"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"cache_dir={tmp_path_factory.mktemp('cache')}"


@pytest.mark.parametrize("world", [1, 2, 4])
def test_m04_linear_decay_is_the_same_on_any_number_of_ranks(
    ranks: RankPool, cache: str, tmp_path: Path, world: int
) -> None:
    """accelerate#2926: one scheduler step an update, not one a process."""
    overrides = [
        *QUICK,
        cache,
        f"output_dir={tmp_path}",
        "optim.lr_scheduler_type=linear",
        "max_steps=8",
        "seq_len=16",
        "global_batch_size=8",
        "export=false",
    ]
    ranks.run(world, whole_run, overrides=overrides)
    rates = list(metrics(tmp_path, "train/learning_rate").values())
    assert rates == pytest.approx([1e-3 * (8 - step) / 8 for step in range(1, 9)])


CURVE = [*QUICK, "seq_len=16", "max_steps=12", "optim.warmup_steps=4", "save_every=6", "keep_last=null"]
MOVES = [
    pytest.param(1, "tier=zero2", 4, "tier=zero3", marks=pytest.mark.slow),
    (4, "tier=hsdp", 2, "tier=zero2"),
]


def tier(world: int, name: str) -> list[str]:
    return [name, "cluster.gpus_per_node=2"] if name == "tier=hsdp" and world == 4 else [name]


@pytest.mark.parametrize(("world", "before", "new_world", "after"), MOVES)
def test_k10_resume_goes_on_with_rate_and_loss_on_any_layout(
    ranks: RankPool, cache: str, tmp_path: Path, world: int, before: str, new_world: int, after: str
) -> None:
    """transformers#27710: warm-up 4, cosine over 12, resumed at 6 on other ranks and another stage."""
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    ranks.run(world, whole_run, overrides=[*CURVE, cache, f"output_dir={whole}", *tier(world, before)])
    checkpoint = whole / "checkpoints" / "step-00000006"
    ranks.run(
        new_world,
        whole_run,
        overrides=[*CURVE, cache, f"output_dir={resumed}", f"resume={checkpoint}", *tier(new_world, after)],
    )
    for key in ("train/learning_rate", "train/tokens"):
        late = {step: value for step, value in metrics(whole, key).items() if step > 6}
        assert metrics(resumed, key) == late, key
    for key in ("train/loss", "train/grad_norm"):
        late = {step: value for step, value in metrics(whole, key).items() if step > 6}
        assert metrics(resumed, key) == pytest.approx(late, rel=2e-5), key


def test_resume_refuses_a_finished_run_and_another_model(ranks: RankPool, cache: str, tmp_path: Path) -> None:
    overrides = [*QUICK, cache, f"output_dir={tmp_path}", "seq_len=16"]
    ranks.run(1, whole_run, overrides=overrides)
    (message,) = ranks.run(1, refused_run, overrides=[*overrides, "resume=auto"])
    assert "is at update 3" in message
    assert "ends at 3" in message
    assert "max_steps" in message
    path = next((tmp_path / "checkpoints").iterdir()) / "pieces.json"
    table = json.loads(path.read_text())
    table["model.norm.weight"]["shape"] = [7]
    path.write_text(json.dumps(table))
    index = json.loads((path.parent / "checkpoint.json").read_text())
    index["files"]["pieces.json"] = asdict(digest_of(path))
    (path.parent / "checkpoint.json").write_text(json.dumps(index))
    (message,) = ranks.run(1, refused_run, overrides=[*overrides, "resume=auto", "max_steps=5"])
    assert "model.norm.weight has shape [7], this model's [192]" in message


@pytest.fixture(scope="module")
def three_updates(ranks: RankPool, cache: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Output folder of a run with checkpoints at updates 1, 2 and 3."""
    output = tmp_path_factory.mktemp("three")
    more = ["seq_len=16", "save_every=1", "keep_last=null", "export=false"]
    ranks.run(1, whole_run, overrides=[*QUICK, cache, f"output_dir={output}", *more])
    return output


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("global_batch_size=8", "global_batch_size=8 (there 4)"),
        ("optim=sgd", "optim.name=sgd (there adamw)"),
        ("data.max_documents=20", "data.max_documents=20 (there 24)"),
    ],
)
def test_resume_refuses_what_would_move_data_or_rate(
    ranks: RankPool, cache: str, tmp_path: Path, three_updates: Path, override: str, says: str
) -> None:
    more = ["seq_len=16", f"output_dir={tmp_path}", f"resume={three_updates}", "max_steps=5", override]
    (message,) = ranks.run(1, refused_run, overrides=[*QUICK, cache, *more])
    assert says in message
    assert not (tmp_path / "run.json").exists()


def test_resume_from_the_middle_of_a_run_needs_its_own_folder(
    ranks: RankPool, cache: str, tmp_path: Path, three_updates: Path
) -> None:
    """Else rotation would drop the new checkpoints, and resume=auto go on with the abandoned ones."""
    middle = three_updates / "checkpoints" / "step-00000001"
    more = ["seq_len=16", f"resume={middle}", "max_steps=5", "export=false", "keep_last=1"]
    (message,) = ranks.run(1, refused_run, overrides=[*QUICK, cache, f"output_dir={three_updates}", *more])
    assert "holds later checkpoints (step-00000003)" in message
    ranks.run(1, whole_run, overrides=[*QUICK, cache, f"output_dir={tmp_path}", *more])
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000005"]
    assert len(list((three_updates / "checkpoints").iterdir())) == 3


@pytest.mark.parametrize("content", ["{}", "{", '{"format": 7, "progress": {}, "files": [], "shapes": {}, "run": {}}'])
def test_a_damaged_index_is_told_in_a_sentence(ranks: RankPool, cache: str, tmp_path: Path, content: str) -> None:
    bad = tmp_path / "step-00000001"
    bad.mkdir()
    (bad / "checkpoint.json").write_text(content)
    (message,) = ranks.run(1, refused_run, overrides=[*QUICK, cache, f"output_dir={tmp_path / 'x'}", f"resume={bad}"])
    assert "damaged" in message or "has format 7" in message


def test_d02_an_update_without_any_target_changes_nothing(ranks: RankPool, cache: str, tmp_path: Path) -> None:
    """A prompt that fills whole rows: the update is skipped and counted, weights and moments stay bit-equal."""
    chats = tmp_path / "chats.jsonl"
    chat = [{"role": "user", "content": "word " * 200}, {"role": "assistant", "content": "short answer"}]
    chats.write_text("".join(json.dumps({"messages": chat}) + "\n" for _ in range(2)))
    out = tmp_path / "run"
    overrides = [
        *QUICK,
        cache,
        f"output_dir={out}",
        "data=jsonl",
        f"data.path={chats}",
        "data.eval_documents=0",
        "seq_len=32",
        "global_batch_size=2",
        "max_steps=6",
        "save_every=1",
        "keep_last=null",
    ]
    ranks.run(2, whole_run, overrides=overrides)
    targets = metrics(out, "train/targets")
    empty = [step for step, count in targets.items() if count == 0 and step > 1]
    full = [step for step, count in targets.items() if count > 0 and step > 1]
    assert empty
    assert full
    for step in range(2, 7):
        old, new = (Pieces(out / "checkpoints" / f"step-{at:08d}") for at in (step - 1, step))
        same = all(
            torch.equal(old.read(name, kind=kind), new.read(name, kind=kind))
            for name in old.shapes()
            for kind in old.kinds()
        )
        assert same == (step in empty), step
    last = Pieces(out / "checkpoints" / "step-00000006").index["progress"]
    assert last["skipped"] == len([count for count in targets.values() if count == 0])


def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_place(
    ranks: RankPool, cache: str, tmp_path: Path
) -> None:
    overrides = [*QUICK, cache, f"output_dir={tmp_path}", "seq_len=16", "save_every=1", "tier=zero3"]
    messages = ranks.run(  # 2 micro-batches a rank and update
        2, run_with_nan, overrides=overrides, what="loss", bad_rank=1, bad_call=4
    )
    for message in messages:
        assert "update 2 is nan on rank 1, micro-batch 1 (1 of 4" in message
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000001"]


@pytest.mark.parametrize(("precision", "stage"), [("fp32", "zero2"), ("bf16", "zero3")])
def test_a_gradient_that_is_not_finite_updates_nothing(
    ranks: RankPool, cache: str, tmp_path: Path, precision: str, stage: str
) -> None:
    """The other stages and precisions: test_deepspeed_canary."""
    overrides = [*QUICK, cache, f"output_dir={tmp_path}", "seq_len=16", "save_every=1", f"tier={stage}"]
    messages = ranks.run(
        2,
        run_with_nan,
        overrides=[*overrides, f"precision={precision}"],
        what="gradient",
        bad_rank=1,
        bad_call=4,
    )
    assert all("gradient norm of update 2 is nan" in message for message in messages)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]


def test_a_run_goes_on_bit_by_bit_from_any_update(ranks: RankPool, cache: str, tmp_path: Path) -> None:
    """In the middle of the first epoch and in the second, asked to stop amid the micro-batches of an update."""
    whole, texts = tmp_path / "whole", tmp_path / "texts.jsonl"
    texts.write_text(
        "".join(json.dumps({"text": f"{word} " * 14}) + "\n" for word in ["import", "return", "class"] * 7)
    )
    overrides = [*QUICK, cache, "tier=zero3", "seq_len=16", "export=false", "max_steps=null", "num_epochs=2"]
    overrides += ["data=jsonl", f"data.path={texts}", "data.eval_documents=0"]
    ranks.run(2, whole_run, overrides=[*overrides, f"output_dir={whole}"])
    epochs = metrics(whole, "train/epoch")
    second = min(step for step, epoch in epochs.items() if epoch == 1) + 1
    assert 4 < second < len(epochs) < 20
    for last in (2, second):
        cut = tmp_path / f"cut-{last}"
        codes = ranks.run(
            2,
            run_stopped_by_signal,
            overrides=[*overrides, f"output_dir={cut}", "save_async=true"],
            signal_rank=1,
            micro_batch=2 * last,  # the second of two in this update
        )
        assert codes == [INTERRUPTED_EXIT] * 2
        assert [path.name for path in (cut / "checkpoints").iterdir()] == [f"step-{last:08d}"]
        assert not (cut / "export").exists()
        ranks.run(2, whole_run, overrides=[*overrides, f"output_dir={cut}", "resume=auto"])
        for key in ("train/loss", "train/grad_norm", "train/learning_rate", "train/targets"):
            assert metrics(cut, key) == metrics(whole, key), key


def test_ranks_with_other_data_are_refused(ranks: RankPool, cache: str, tmp_path: Path) -> None:
    """As servers whose disks differ; else they would train on a mixture, or wait for each other for ever."""
    for number in range(2):
        (tmp_path / f"{number}.jsonl").write_text(json.dumps({"text": f"{number} " * 60}) + "\n")
    overrides = [*QUICK, cache, "seq_len=16", "data=jsonl", "data.eval_documents=0", f"output_dir={tmp_path / 'run'}"]
    paths = [str(tmp_path / f"{number}.jsonl") for number in range(2)]
    messages = ranks.run(2, run_on_own_data, overrides=overrides, paths=paths)
    assert all(message.startswith("Rank 1 has other data than rank 0") for message in messages)


def test_data_that_cannot_be_read_lose_no_update(ranks: RankPool, cache: str, tmp_path: Path) -> None:
    """A stream with a bad line after what was trained on: the run ends with a checkpoint and the reason."""
    lines = [json.dumps({"text": "word " * 8})] * 70
    (tmp_path / "stream.jsonl").write_text("\n".join([*lines, "{bad", *lines]))
    more = ["data=jsonl", f"data.path={tmp_path / 'stream.jsonl'}", "data.eval_documents=0", "data.streaming=true"]
    more += [
        "data.max_documents=null",
        "data.packing=concat",
        "seq_len=16",
        "max_steps=500",
        f"output_dir={tmp_path / 'run'}",
    ]
    messages = ranks.run(2, refused_run, overrides=[*QUICK, cache, *more])
    assert all("stream.jsonl:71: not one JSON value a line" in message for message in messages)
    done = max(metrics(tmp_path / "run", "train/loss"))
    assert done > 3
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == [f"step-{done:08d}"]


def test_the_run_ends_with_a_checkpoint_before_max_time(ranks: RankPool, cache: str, tmp_path: Path) -> None:
    more = [f"output_dir={tmp_path}", "seq_len=16", "max_steps=100000", "max_time=3", "save_every=7"]
    assert ranks.run(2, run_from_now, overrides=[*QUICK, cache, *more]) == [0, 0], "as planned"
    done = max(metrics(tmp_path, "train/loss"))
    assert done >= 1
    assert (tmp_path / "checkpoints" / f"step-{done:08d}" / "checkpoint.json").is_file()


@pytest.mark.parametrize("name", ["dp", "zero2", "zero3", "hsdp"])  # zero1 saves what zero2 does
def test_k14_saving_is_collective_and_the_newest_are_kept(
    ranks: RankPool, cache: str, tmp_path: Path, name: str
) -> None:
    """starVLA#460: at intervals and at the end, no rank waits for one that does not come."""
    overrides = [*QUICK, cache, f"output_dir={tmp_path}", "seq_len=16", "max_steps=4", "save_every=1"]
    ranks.run(2, whole_run, overrides=[*overrides, f"tier={name}"])
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000003", "step-00000004"]
