"""Sources that the `datasets` library reads: a save_to_disk folder, local csv/parquet/json files, or a hub id.

Local files are streamed: the packed rows are cached (prepared.py), so Arrow copies of the raw files in Hugging Face's
cache would only cost disk. A hub data set is downloaded there, as usual, unless data.streaming=true.
"""

import contextlib
import csv
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..schema import DataConfig, SourceKind

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

# `datasets` builder of a file by its suffix
BUILDERS = {".csv": "csv", ".tsv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet", ".arrow": "arrow"}


def open_dataset(data: DataConfig, *, path: str) -> "Dataset | IterableDataset":
    """One split of the data set at `path`. ValueError: not there (absolute path tried), or no such split or subset."""
    tried = Path(path).expanduser().absolute()
    if not tried.exists():
        return _hub(data, path=path, tried=tried)
    if is_saved(tried):
        return _saved(data, folder=tried)
    try:
        return _local(data, tried=tried)
    except (OSError, ValueError) as error:
        raise ValueError(f"data.path={tried} cannot be read with {_choice(data)}: {error}") from error


def read_table(file: Path, *, data: DataConfig) -> Iterator[Any]:
    """Rows of one file of kind parquet or csv. ValueError: it is none, or broken further on."""
    kind = SourceKind(data.kind)
    try:
        yield from _csv_rows(file) if kind is SourceKind.csv else _parquet_rows(file)
    except Exception as error:  # of pyarrow, csv or datasets, by the kind of damage
        raise ValueError(f"{file} cannot be read as {kind.value}: {str(error).strip()}") from error


def _csv_rows(file: Path) -> Iterator[dict[str, str]]:
    """Texts as they stand in the file. Not by pandas: where a row has a cell too many it drops one without a word."""
    csv.field_size_limit(sys.maxsize)  # a document is a cell
    with file.open(newline="", encoding="utf-8-sig") as lines:
        reader = csv.reader(lines, delimiter="\t" if file.suffix == ".tsv" else ",", strict=True)
        header = next(reader, [])
        for cells in reader:
            if cells and len(cells) != len(header):
                raise ValueError(
                    f"line {reader.line_num} has {len(cells)} cells and the header {len(header)}: a cell with a separator, a "
                    "quote or a line break in it has to stand in quotes"
                )
            if cells:
                yield dict(zip(header, cells, strict=True))


def _parquet_rows(file: Path) -> Iterator[Any]:
    import pyarrow.parquet
    from datasets import IterableDataset  # not load_dataset, which asks the hub for each file

    if pyarrow.parquet.read_metadata(file).num_rows:
        yield from IterableDataset.from_parquet(str(file))


def local_files(path: str) -> list[Path] | None:
    """Every file of a local source, sorted; None for a hub id."""
    tried = Path(path).expanduser().absolute()
    if not tried.exists():
        return None
    return sorted(file for file in tried.rglob("*") if file.is_file()) if tried.is_dir() else [tried]


def hub_fingerprint(data: DataConfig, *, path: str) -> str:
    """Changes with the content of a hub data set; downloads it unless it is a stream. ValueError as `open_dataset`."""
    found = open_dataset(data, path=path)
    if not data.streaming:
        return str(found._fingerprint)
    from datasets import load_dataset_builder

    return str(load_dataset_builder(path, name=data.subset).hash)


@contextlib.contextmanager
def quiet(*, show_progress: bool) -> Iterator[None]:
    """Inside, `datasets` draws progress bars only if asked to; its own setting is put back afterwards."""
    import datasets

    disabled = datasets.are_progress_bars_disabled()
    if not show_progress:
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        if not disabled:
            datasets.enable_progress_bars()


def is_saved(folder: Path) -> bool:
    """Whether Dataset.save_to_disk or DatasetDict.save_to_disk wrote this folder."""
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


def _choice(data: DataConfig) -> str:
    return f"data.subset={data.subset} data.split={data.split}"


def _saved(data: DataConfig, *, folder: Path) -> "Dataset | IterableDataset":
    from datasets import DatasetDict, load_from_disk

    found = load_from_disk(folder)
    if isinstance(found, DatasetDict):
        if data.split not in found:
            raise ValueError(f"data.split={data.split} is not in {folder}; use one of {', '.join(map(str, found))}")
        found = found[data.split]
    return found.to_iterable_dataset() if data.streaming else found


def _local(data: DataConfig, *, tried: Path) -> "IterableDataset":
    from datasets import load_dataset

    if tried.is_dir():
        kinds = {BUILDERS[file.suffix] for file in local_files(str(tried)) or [] if file.suffix in BUILDERS}
        options = _csv_options(data, suffix=".csv") if kinds == {"csv"} else {}
        return load_dataset(str(tried), name=data.subset, split=data.split, streaming=True, **options)
    builder = BUILDERS.get(tried.suffix)
    if builder is None:
        raise ValueError(f"a file of kind=datasets ends in one of {', '.join(BUILDERS)}")
    options = _csv_options(data, suffix=tried.suffix) if builder == "csv" else {}
    return load_dataset(builder, data_files={data.split: str(tried)}, split=data.split, streaming=True, **options)


def _csv_options(data: DataConfig, *, suffix: str) -> dict[str, Any]:
    """Texts as they stand in the file: else "" and "NA" would be null, and "007" a number."""
    texts = (data.text_column, data.prompt_column, data.completion_column)
    options: dict[str, Any] = {"converters": dict.fromkeys(texts, str), "keep_default_na": False}
    return options | ({"sep": "\t"} if suffix == ".tsv" else {})


def _hub(data: DataConfig, *, path: str, tried: Path) -> "Dataset | IterableDataset":
    from datasets import load_dataset

    looks_local = path.startswith(("/", ".", "~")) or path.count("/") > 1 or tried.suffix in BUILDERS
    if looks_local:
        raise ValueError(f"data path {path!r} does not exist (tried {tried}): set data.path or data.eval_path")
    try:
        return load_dataset(path, name=data.subset, split=data.split, streaming=data.streaming)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"data path {path!r} is neither local (tried {tried}) nor a readable hub data set "
            f"with {_choice(data)}: {error}"
        ) from error
