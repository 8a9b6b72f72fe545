import pytest

from tests.pool import RankPool


@pytest.fixture(scope="session")
def ranks() -> RankPool:
    return RankPool()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update", action="store_true", help="rewrite golden files and tables to what is found")
