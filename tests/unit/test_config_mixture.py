"""A mixture is told on the command line or in a task's file."""

from pathlib import Path

import pytest
from hydra.errors import HydraException

from fourfold.legality import check_data
from fourfold.schema import MixtureSource, SourceKind
from tests.compose import composed

SOURCES = "data.sources=[{path: a.jsonl, weight: 2}, {path: b.parquet, kind: parquet, weight: 1, text_column: body}]"
EXPECTED = [
    MixtureSource("a.jsonl", weight=2.0),
    MixtureSource("b.parquet", kind=SourceKind.parquet, text_column="body", weight=1.0),
]


@pytest.mark.parametrize("group", ["none", "jsonl", "text"])
def test_on_the_command_line(group: str) -> None:
    """No data.path beside it, although the file of the group asks for one."""
    config, plain = composed("task=quickstart", f"data={group}", SOURCES)
    assert config.data.sources == EXPECTED
    assert config.data.path is plain["data"]["path"] is None
    assert plain["data"]["sources"][1]["kind"] == "parquet"
    check_data(config)


def test_beside_a_path_it_is_refused() -> None:
    config, _ = composed("task=quickstart", "data.eval_documents=0", SOURCES)
    with pytest.raises(ValueError, match=r"data\.path=stdlib and data\.sources \(2\) exclude each other"):
        check_data(config)
    check_data(composed("task=quickstart", "data.eval_documents=0", "data.path=null", SOURCES)[0])


@pytest.fixture
def mine(tmp_path: Path) -> str:
    (tmp_path / "task").mkdir()
    (tmp_path / "task" / "mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /model: tiny\nname: mine\nmax_steps: 1\n"
        "data:\n  kind: jsonl\n  sources:\n"
        "    - {path: a.jsonl, weight: 2}\n    - {path: b.parquet, kind: parquet, weight: 1, text_column: body}\n"
    )
    return f"hydra.searchpath=[{tmp_path}]"


def test_in_a_task(mine: str) -> None:
    config, _ = composed(mine, "task=mine")
    assert config.data.sources == EXPECTED
    assert config.data.kind is SourceKind.jsonl
    check_data(config)


def test_debug_replaces_it(mine: str) -> None:
    config, _ = composed(mine, "task=mine", "debug=cpu")
    assert (config.data.sources, config.data.path) == (None, "stdlib")


def test_an_unknown_key_is_named() -> None:
    with pytest.raises(HydraException) as caught:
        composed("task=quickstart", "data.sources=[{path: a, wieght: 1}]")
    assert "Key 'wieght' not in 'MixtureSource'" in str(caught.value.__cause__)


def test_a_source_without_path_is_named() -> None:
    with pytest.raises(ValueError, match=r"data\.sources\[1\]\.path has no value yet"):
        composed("task=quickstart", "data=none", "data.sources=[{path: a}, {weight: 1}]")


@pytest.mark.parametrize(("key", "value"), [("packing", "best"), ("long_documents", "cut"), ("kind", "xml")])
def test_an_unknown_choice_is_refused(key: str, value: str) -> None:
    with pytest.raises(HydraException):
        composed("task=quickstart", f"data.{key}={value}")
