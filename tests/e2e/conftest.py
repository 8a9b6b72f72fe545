from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.launching import SERVER


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """cache_dir of all runs here: the tiny model and the tokenised data are made once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session", autouse=True)
def _no_server_stays() -> Iterator[None]:
    yield
    SERVER.close()
