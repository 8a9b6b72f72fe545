"""What is refused of the data's settings before anything is read; all of it at once."""

from dataclasses import replace
from typing import Any

import pytest

from fourfold.legality import check_data
from fourfold.schema import DataConfig, MixtureSource, TrainConfig


def refused(*, sources: list[MixtureSource] | None = None, **settings: Any) -> str:
    data = replace(DataConfig(path=None if sources else "d", sources=sources), **settings)
    with pytest.raises(ValueError, match="data") as caught:
        check_data(TrainConfig(name="x", data=data))
    return str(caught.value)


def test_plain_data_and_mixtures_pass() -> None:
    check_data(TrainConfig(name="x", data=DataConfig(path="d", eval_documents=3)))
    weighted = [MixtureSource("a", weight=2.0), MixtureSource("b", weight=0.5)]
    for sources in (weighted, [MixtureSource("a", epochs=0.5), MixtureSource("b")]):
        check_data(TrainConfig(name="x", data=DataConfig(path=None, sources=sources, eval_path="e")))


@pytest.mark.parametrize(("name", "value"), [("max_documents", 0), ("num_proc", 0), ("eval_documents", -1)])
def test_impossible_counts(name: str, value: int) -> None:
    assert f"data.{name}={value}: use {value + 1} or more" in refused(**{name: value})


def test_two_sources_of_evaluation_data() -> None:
    assert "data.eval_path=e and data.eval_documents=2" in refused(eval_path="e", eval_documents=2)


def test_where_the_data_lie_is_said_once() -> None:
    assert "Neither data.path nor data.sources" in refused(path=None)
    assert "set data.path=null" in refused(sources=[MixtureSource("a")], path="d")
    assert "a mixture of nothing" in refused(sources=[], path=None)


@pytest.mark.parametrize(
    ("sources", "settings", "says"),
    [
        ([MixtureSource("a", weight=1.0), MixtureSource("b")], {}, "1 of 2 data.sources have a weight"),
        ([MixtureSource("a", weight=1.0, epochs=2.0)], {}, "weights and epochs"),
        ([MixtureSource("a", weight=0.0)], {}, "data.sources[0].weight=0.0: use more than 0"),
        ([MixtureSource("a", epochs=float("inf"))], {}, "data.sources[0].epochs=inf: use more than 0"),
        ([MixtureSource("a"), MixtureSource("b", max_documents=0)], {}, "data.sources[1].max_documents=0: use 1"),
        ([MixtureSource("a", epochs=2.0)], {"streaming": True}, "a stream has no known length; use weights"),
        ([MixtureSource("a")], {"eval_documents": 3}, "data.eval_documents=3 would be held out of which of the 1"),
    ],
)
def test_impossible_mixtures(sources: list[MixtureSource], settings: dict[str, Any], says: str) -> None:
    assert says in refused(sources=sources, **settings)


def test_all_is_told_at_once() -> None:
    message = refused(sources=[MixtureSource("a", weight=-1.0), MixtureSource("b")], num_proc=0, eval_documents=1)
    for part in ("num_proc=0", "weight=-1.0", "1 of 2 data.sources", "eval_documents=1"):
        assert part in message
