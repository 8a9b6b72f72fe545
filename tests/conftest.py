from collections.abc import Iterator

import pytest
import torch

from tests.pool import RankPool


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update", action="store_true", help="rewrite golden files and tables to what is found")


@pytest.fixture(scope="session")
def ranks() -> RankPool:
    return RankPool()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Several threads fight over such small products: up to ten times slower on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
