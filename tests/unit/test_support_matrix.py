"""README's support matrix is what the rules and the tests give."""

from pathlib import Path

from tests.matrix import FEATURES, pairs, refusals, runs, triples
from tools.support_matrix import table, written

README = Path(__file__).parents[2] / "README.md"


def test_the_readme_has_the_matrix_of_today() -> None:
    text = README.read_text()
    assert text == written(text), "python tools/support_matrix.py --write"
    assert text.count("support matrix") >= 2


def test_every_cell_says_something() -> None:
    """A mark, a footnote that is there, or that the two exclude each other; no open question."""
    lines = table().splitlines()
    rows = [line.split("|")[2:-1] for line in lines if line.startswith("| ") and line[2].isdigit()]
    notes = {line[2] for line in lines if line.startswith("* ")}
    assert len(rows) == len(FEATURES)
    for number, row in enumerate(rows):
        for cell in row[: number + 1]:
            assert cell.strip() in ("✓", "·") or set(cell.split()) <= notes, (number, cell)
    refused = [pair for pair in pairs() if refusals(frozenset(pair))]
    assert 20 < len(refused) < 50
    assert len(runs()) > 100 > len(refused)
    assert len(list(triples())) >= 100
