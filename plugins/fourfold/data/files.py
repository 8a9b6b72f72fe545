"""The files of a local source, in one order on every machine."""

import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..schema import DataConfig, SourceKind

STDLIB = "stdlib"
# Folders below the standard library that are not its sources, or that some distributions leave out.
NOT_STDLIB = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
SUFFIXES = {
    SourceKind.jsonl: (".jsonl",),
    SourceKind.parquet: (".parquet",),
    SourceKind.csv: (".csv", ".tsv"),
}


def source_files(data: DataConfig, *, path: str) -> list[Path]:
    """Every file of a source of kind text, jsonl, parquet or csv. ValueError: nothing is there."""
    kind = SourceKind(data.kind)
    if kind is SourceKind.text:
        return text_files(path, pattern=data.pattern)
    return files_below(path, suffixes=SUFFIXES[kind])


def kind_of(path: str) -> SourceKind | None:
    """The kind of a file that is a table by its name."""
    suffix = Path(path).suffix
    return next((kind for kind, suffixes in SUFFIXES.items() if suffix in suffixes), None)


def local_path(path: str) -> Path:
    """An absolute path, from the working directory; ValueError with the path tried when nothing is there."""
    tried = Path(path).expanduser().absolute()
    if not tried.exists():
        raise ValueError(f"data path {path!r} does not exist (tried {tried}): set data.path or data.eval_path")
    return tried


def files_below(path: str, *, suffixes: tuple[str, ...]) -> list[Path]:
    """The file itself, or every file below a folder that ends so, sorted by path. ValueError: there is none."""
    root = local_path(path)
    if root.is_file():
        return [root]
    found = [file for file in root.rglob("*") if file.suffix in suffixes and file.is_file()]
    if not found:
        raise ValueError(f"no document in {root}: no file there ends in {' or '.join(suffixes)}; set data.path")
    return sorted(found, key=lambda file: file.relative_to(root).parts)


def text_files(path: str, *, pattern: str) -> list[Path]:
    """Files of a kind=text source, sorted by their path below the root; hidden files and folders are left out."""
    if path == STDLIB:
        root, hidden = Path(sysconfig.get_path("stdlib")), NOT_STDLIB
    else:
        root, hidden = local_path(path), frozenset[str]()
    if root.is_file():
        if table := kind_of(path):
            raise ValueError(
                f"{root} is a table, and data.kind=text would take it for one document: use data={table.value}"
            )
        return [root]
    below = sorted({file.relative_to(root) for file in _matching(root, pattern, hidden=hidden)}, key=_parts)
    below = [name for name in below if not any(_left_out(part, hidden) for part in name.parts)]
    if path == STDLIB:
        below = [name for name in below if name.suffix == ".py"]
    found = [root / name for name in below if (root / name).is_file()]
    if not found:
        raise ValueError(f"no file of {root} matches data.pattern={pattern}")
    return found


def _parts(path: Path) -> tuple[str, ...]:
    return path.parts


def _left_out(name: str, hidden: Iterable[str]) -> bool:
    return name.startswith(".") or name in hidden


def _matching(root: Path, pattern: str, *, hidden: Iterable[str]) -> Iterator[Path]:
    """`root.glob(pattern)`, without descending into folders at the top that are left out anyway (site-packages, .git)."""
    if not pattern.startswith("**/"):
        yield from root.glob(pattern)
        return
    yield from root.glob(pattern.removeprefix("**/"))
    for top in root.iterdir():
        if top.is_dir() and not top.is_symlink() and not _left_out(top.name, hidden):
            yield from top.glob(pattern)
