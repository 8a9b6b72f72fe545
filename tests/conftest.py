import pytest

from tests.pool import RankPool


@pytest.fixture(scope="session")
def ranks() -> RankPool:
    return RankPool()
