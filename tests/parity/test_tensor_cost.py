"""Bytes sent and elements kept by a cut Llama equal the formulas exactly."""

from pathlib import Path
from typing import Any

import pytest

from fourfold.planner.memory import Cut, activation_elements
from fourfold.schema import ActivationConfig, Checkpointing, TensorConfig
from fourfold.tensor.cost import Shape, sent_bytes
from tests.families import family_config, save_family
from tests.parity.context_model_ranks import packed
from tests.parity.tensor_cost_ranks import Way, alone, costs
from tests.pool import RankPool

ROWS, LENGTH, VOCABULARY = 2, 12, 97
PARTS, PLAIN, REGATHER = TensorConfig(), TensorConfig(sequence_parallel=False), TensorConfig(regather=True)
FULL, SELECTIVE = ActivationConfig(Checkpointing.full), ActivationConfig(Checkpointing.selective)
WAYS = {
    "parts": Way(PARTS),
    "parts, no overlap": Way(PARTS, overlap=False),
    "regather": Way(REGATHER),
    "regather, no overlap": Way(REGATHER, overlap=False),
    "whole tokens": Way(PLAIN),
    "whole tokens, no overlap": Way(PLAIN, overlap=False),
    "full": Way(PARTS, activation=FULL),
    "full, whole tokens": Way(PLAIN, activation=FULL),
    "full, regather, no overlap": Way(REGATHER, overlap=False, activation=FULL),
    "every second": Way(PARTS, activation=ActivationConfig(Checkpointing.every_n, 2)),
    "selective, regather, no overlap": Way(REGATHER, overlap=False, activation=SELECTIVE),
}
MANY, FEW = 4, 2  # layers; of the difference, all that lies outside of them drops out
GLOO = 32  # elements of the loss's last messages that its thread may not have let go of yet
C10D = {"all_gather": "_allgather_base_", "reduce_scatter": "_reduce_scatter_base_", "all_reduce": "allreduce_"}


def config(layers: int) -> Any:
    return family_config("llama", num_hidden_layers=layers, vocab_size=VOCABULARY)


def kept(way: Way, *, size: int, layers: int) -> int:
    return activation_elements(
        config(layers),
        batch=ROWS,
        seq_len=LENGTH,
        checkpointing=way.activation.checkpointing,
        every_n=way.activation.every_n,
        attention="fourfold",
        cut=Cut(size, sequence_parallel=way.tensor.sequence_parallel, regather=way.tensor.regather),
    ).kept


def shape(way: Way, *, size: int) -> Shape:
    tensor = way.tensor
    return Shape(
        rows=ROWS,
        length=LENGTH,
        hidden=config(1).hidden_size,
        itemsize=4,
        tp_size=size,
        sequence_parallel=tensor.sequence_parallel,
        regather=tensor.regather,
    )


@pytest.mark.parametrize("size", [2, 4])
def test_bytes_and_elements_equal_the_formulas(ranks: RankPool, size: int) -> None:
    """Two key heads: on four ranks they are held twice. Packed rows of which no two are alike."""
    batch = {name: values[:, :LENGTH] for name, values in packed(0, rows=ROWS).items()}
    changes = {"vocab_size": VOCABULARY}
    for found in ranks.run(size, costs, layers=[MANY, FEW], changes=changes, ways=list(WAYS.values()), batch=batch):
        for (name, way), (many, few) in zip(WAYS.items(), found, strict=True):
            stretches = {"none": 0, "every_n": MANY // 2}.get(way.activation.checkpointing, MANY)
            formula = sent_bytes(shape(way, size=size), layers=MANY, losses=ROWS * LENGTH, stretches=stretches)
            assert {key: count for key, count in many.sent.items() if not key.endswith("calls")} == formula, name
            by_kind = {op: sum(n for key, n in formula.items() if key.endswith(kind)) for kind, op in C10D.items()}
            assert many.seen == {op: count for op, count in by_kind.items() if count}, name
            assert many.losses == formula["loss"], name
            assert all(VOCABULARY not in sizes and -(-VOCABULARY // size) not in sizes for sizes in many.shapes), name
            plan = kept(way, size=size, layers=MANY) - kept(way, size=size, layers=FEW)
            assert many.saved - few.saved == plan, name
            assert (many.alive - few.alive) / 4 == pytest.approx(plan, abs=GLOO), name


def test_bytes_of_a_layer() -> None:
    """8 (t-1)/t B S H elements with and without sequence parallelism, 2 (t-1)/t more to gather again."""
    one = Way(PARTS), Way(PLAIN), Way(REGATHER)
    sent = [sent_bytes(shape(way, size=4), layers=1, losses=0) for way in one]
    elements = [sum(count for key, count in each.items() if key.startswith("block")) / 4 for each in sent]
    whole = ROWS * LENGTH * config(1).hidden_size
    assert elements == [8 * 3 / 4 * whole, 8 * 3 / 4 * whole, 10 * 3 / 4 * whole]
    assert not sent_bytes(shape(one[0], size=1), layers=1, losses=10)


def test_one_rank_costs_nothing(ranks: RankPool, tmp_path: Path) -> None:
    """tp_size=1: no module and no slice of tensor parallelism, and not one operation more. The one mark says who counts a
    parameter in the gradient norm, in every layout."""
    folder = save_family("llama_tied", tmp_path)
    (found,) = ranks.run(1, alone, folder=folder, batch=packed(0, rows=ROWS))
    assert not [name for name in found["modules"] if name.startswith("fourfold.tensor")]
    assert found["marks"] == ["tensor_model_parallel"]
    assert found["ours"] == found["plain"]
