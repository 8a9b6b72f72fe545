"""The product's ranks (fourfold/verify/pool.py), from a server that has what tests need."""

from fourfold.verify import pool


class RankPool(pool.RankPool):
    def __init__(self) -> None:
        super().__init__(preload="tests.pool_preload", patience=600.0)
