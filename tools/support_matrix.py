"""Print README's support matrix, or with --write put it there: which features a run may combine, proven by which tests.

Made of the rules (fourfold.legality) and of the runs that tests/parity/test_matrix.py proves.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tests.matrix import FEATURES, GROUPS, excluded, proven, refusals, triples  # noqa: E402

BEGIN, END = "<!-- support matrix: python tools/support_matrix.py --write -->", "<!-- end of the support matrix -->"
SHORT = {
    "tp whole": "tp, whole tokens",
    "hsdp": "hsdp (any stage)",
    "packed": "packed rows",
    "tied": "tied embeddings",
    "offload": "offload to CPU",
    "full": "checkpointing full",
    "every_n": "checkpointing every_n",
    "selective": "checkpointing selective",
}


def table() -> str:
    """Markdown, a footnote for each rule that refuses."""
    notes: dict[str, str] = {}
    numbers = range(1, len(FEATURES) + 1)
    lines = [f"| | {' | '.join(map(str, numbers))} |", "|---" * (len(FEATURES) + 1) + "|"]
    for row, one in enumerate(FEATURES):
        cells = [_cell(one, other, notes) for other in FEATURES[: row + 1]]
        cells += [""] * (len(FEATURES) - len(cells))
        lines.append(f"| {row + 1} {SHORT.get(one, one)} | {' | '.join(cells)} |")
    told = [f"{letter}. {sentence}" for sentence, letter in notes.items()]
    more = f"Three at a time: {len(list(triples()))} more runs on four and eight ranks, by `pytest -m slow`."
    return "\n".join([*lines, "", *(f"* {line}" for line in told), "", more])


def _cell(one: str, other: str, notes: dict[str, str]) -> str:
    if one == other or excluded(one, other):
        return "·"
    against = refusals(frozenset({one, other}))
    if against:
        sentences = [_alike(sentence, one, other) for sentence in against]
        return " ".join(notes.setdefault(sentence, _letter(len(notes))) for sentence in sentences)
    return "✓" if proven(one, other) else "?"


def _alike(sentence: str, *features: str) -> str:
    """The same for all schedules that split the backward pass, and all modes of checkpointing."""
    for name in features:
        if name in (*GROUPS["pipeline"], *GROUPS["checkpointing"]):
            sentence = sentence.replace(f"={name} ", "=* ")
    return sentence


def _letter(number: int) -> str:
    return "abcdefghijklmnopqrstuvwxyz"[number]


def written(text: str) -> str:
    """README with the matrix of today between its marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


if __name__ == "__main__":
    readme = ROOT / "README.md"
    if "--write" in sys.argv:
        readme.write_text(written(readme.read_text()))
    else:
        print(table())
