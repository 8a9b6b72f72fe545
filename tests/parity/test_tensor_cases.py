"""Public bug reports about tensor parallelism, as tests."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fourfold.data.loader import Loader
from fourfold.errors import INTERRUPTED_EXIT
from fourfold.layout import Layout
from fourfold.schema import OptimConfig, TensorConfig
from tests.families import family_model, save_family
from tests.parity.context_model_ranks import packed
from tests.parity.run_ranks import metrics, refused_run, run_and_listen, run_stopped_by_signal
from tests.parity.strategies import settings
from tests.parity.tensor_ranks import dropped, tied_through_a_run
from tests.parity.zero_ranks import ListedRows, train
from tests.pool import RankPool
from tests.reference import Reference, batches, worst

QUICK = ["task=quickstart", "debug=cpu", "export=false", "data.eval_documents=0"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"cache_dir={tmp_path_factory.mktemp('cache')}"


@pytest.mark.parametrize("layout", [Layout(tp_size=2), Layout(tp_size=2, dp_shard_size=2)], ids=["tp", "tp, dp"])
def test_t01_one_norm_of_whole_and_cut_parameters(ranks: RankPool, tmp_path: Path, layout: Layout) -> None:
    """torchtune#2420: norms that count a slice only, or a copy twice. Clipped to half of the norm, one SGD step."""
    truth = Reference(family_model("llama")).step(packed(0, rows=8))[1]
    optim = OptimConfig(name="sgd", learning_rate=1.0, weight_decay=0.0, max_grad_norm=truth / 2)
    model = family_model("llama")
    reference = Reference(model, torch.optim.SGD(model.parameters(), lr=1.0), truth / 2)
    reference.step(packed(0, rows=8))
    results = ranks.run(
        layout.world_size,
        train,
        folder=save_family("llama", tmp_path),
        config=settings(stage=2, optim=optim),
        layout=layout,
        steps=[packed(0, rows=8)],
        accumulation=2,
    )
    for result in results:
        assert result["norm"] == [pytest.approx(truth, rel=1e-6)]
        assert worst(result["weights"], reference.weights())[0] < 1e-6


REPLICAS = [
    Layout(tp_size=2),
    Layout(tp_size=2, dp_shard_size=2),
    Layout(cp_size=2, dp_replicate_size=2),
    Layout(tp_size=2, cp_size=2, dp_shard_size=2, dp_replicate_size=2),
]


@pytest.mark.parametrize("layout", REPLICAS, ids=Layout.describe)
def test_t04_ranks_of_one_replica_read_the_same_rows(layout: Layout) -> None:
    """accelerate#3092: rows dealt by rank instead of by data coordinate."""
    rows = batches(0, rows=16)
    seen = {rank: list(_rows_of(layout, rank, rows)) for rank in range(layout.world_size)}
    by_share: dict[int, list[int]] = {}
    for rank, read in seen.items():
        assert by_share.setdefault(layout.data_rank(rank), read) == read
    assert len(by_share) == layout.data_size
    assert sorted(row for read in by_share.values() for row in read) == list(range(16))


def _rows_of(layout: Layout, rank: int, rows: dict[str, torch.Tensor]) -> Iterator[int]:
    """Numbers of the rows that a rank reads in one epoch of a shuffled data set."""
    loader = Loader(
        ListedRows(rows),
        seed=3,
        global_batch_size=8,
        micro_batch_size=2,
        data_rank=layout.data_rank(rank),
        data_size=layout.data_size,
        pad_id=0,
    )
    for update in loader.updates(0, num_epochs=1, max_steps=None):
        for micro in update.micro_batches:
            for row in micro["input_ids"]:
                yield int((rows["input_ids"] == row).all(dim=1).nonzero())


def test_t06_the_curve_is_the_same_for_any_number_of_ranks(ranks: RankPool, tmp_path: Path) -> None:
    """torchtitan#1750: ten SGD steps with 1, 2 and 4 ranks. That copies of norms stay equal bit by bit on the ranks for 20
    is in `train`, which compares all copies."""
    folder = save_family("llama", tmp_path, num_key_value_heads=4)
    optim = OptimConfig(name="sgd", learning_rate=0.5, weight_decay=0.0, max_grad_norm=1.0)
    model = family_model("llama", num_key_value_heads=4)
    reference = Reference(model, torch.optim.SGD(model.parameters(), lr=0.5), 1.0)
    steps = [packed(step, rows=2) for step in range(20)]
    curve = [reference.step(step)[0] for step in steps[:10]]
    for size in (2, 4):
        for result in ranks.run(
            size,
            train,
            folder=folder,
            config=settings(stage=1, optim=optim),
            layout=Layout(tp_size=size),
            steps=steps,
            accumulation=1,
        ):
            assert result["loss"][0] == pytest.approx(curve[0], rel=1e-6)
            assert result["loss"][:10] == pytest.approx(curve, rel=1e-4)


def test_t08_batches_and_lengths_count_data_ranks_alone(ranks: RankPool, cache: str, tmp_path: Path) -> None:
    """DeepSpeed#7298: dp 2 x tp 2, micro-batches of 1, accumulation 4, 64 samples: a global batch of 8, 8 updates."""
    samples = tmp_path / "samples.jsonl"
    samples.write_text("".join(json.dumps({"input_ids": [number + 10, 7, 8, 9]}) + "\n" for number in range(64)))
    more = ["tp_size=2", "global_batch_size=8", "max_steps=null", "num_epochs=1", "seq_len=8", "data=jsonl"]
    more += [f"data.path={samples}", "data.packing=none", "data.max_documents=null", "model=tiny"]
    said, *_ = ranks.run(4, run_and_listen, overrides=[*QUICK, cache, *more, f"output_dir={tmp_path / 'run'}"])
    assert "8 rows x 8 tokens = 2 data ranks x 1 rows x 4 micro-batches" in " ".join(said.split())
    assert list(metrics(tmp_path / "run", "train/loss")) == list(range(1, 9))
    assert set(metrics(tmp_path / "run", "train/tokens").values()) == {32 * step for step in range(1, 9)}
    progress = json.loads((tmp_path / "run/checkpoints/step-00000008/checkpoint.json").read_text())["progress"]
    assert (progress["rows"], progress["tokens"]) == (64, 256)


def test_k01_p03_tied_embeddings_stay_one_tensor(ranks: RankPool, cache: str, tmp_path: Path) -> None:
    """Automodel#2571, piper#13: the config says tied and the tensors are, at the start and after updates, at stages 1 and 3."""
    folder = save_family("llama_tied", tmp_path)
    for stage in (1, 3):
        config = settings(stage=stage, optim=OptimConfig(learning_rate=1e-2))
        for always in ranks.run(2, tied_through_a_run, folder=folder, config=config, steps=[packed(0, rows=2)] * 2):
            assert always


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_dropout_is_equal_on_copies_and_independent_on_parts(ranks: RankPool, sequence_parallel: bool) -> None:
    tensor = TensorConfig(sequence_parallel=sequence_parallel)
    for masks in ranks.run(2, dropped, layout=Layout(tp_size=2), tensor=tensor, batch=packed(0, rows=2)):
        first, second = masks
        assert 0.2 < first.double().mean() < 0.8
        assert torch.equal(first, second) != sequence_parallel
        if sequence_parallel:
            assert 0.3 < (first == second).double().mean() < 0.7, (
                "masks of two parts have nothing to do with each other"
            )


@pytest.mark.parametrize("axis", ["tp", "pp"])
@pytest.mark.parametrize("signal_rank", [0, 1])
def test_one_rank_asked_to_stop_stops_all(
    ranks: RankPool, cache: str, tmp_path: Path, axis: str, signal_rank: int
) -> None:
    """Whichever rank of a replica sees the signal first."""
    words = [*QUICK, cache, f"output_dir={tmp_path}", f"{axis}_size=2", "max_steps=8"]
    codes = ranks.run(2, run_stopped_by_signal, overrides=words, signal_rank=signal_rank, micro_batch=6)
    assert codes == [INTERRUPTED_EXIT] * 2
    assert list(metrics(tmp_path, "train/loss")) == [1, 2]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]


REFUSED = [
    (["tp_size=4"], 4, ["tp_size=4", "6 query heads", "use tp_size=1, 2."]),
    (["tp_size=2", "zero=stage3", "zero.offload.optimizer=cpu"], 2, ["zero.offload", "tp_size=2"]),
    (["tp_size=2", "model.attn_implementation=eager"], 2, ["attn_implementation=eager", "tp_size=2"]),
    (["tp_size=2", "+tensor.plan={model.layers.*.mlp.uo_proj: colwise}"], 2, ["model.layers.*.mlp.uo_proj"]),
]


@pytest.mark.parametrize(("words", "world", "parts"), REFUSED, ids=["heads", "offload", "attention", "plan"])
def test_what_cannot_be_cut_is_refused_before_it_starts(
    ranks: RankPool, cache: str, tmp_path: Path, words: list[str], world: int, parts: list[str]
) -> None:
    (message, *_) = ranks.run(world, refused_run, overrides=[*QUICK, cache, f"output_dir={tmp_path}", *words])
    assert all(part in message for part in parts), message
