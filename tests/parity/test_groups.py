"""cluster.timeout holds in every group of a run, not in the default group alone."""

from fourfold.layout import Layout
from tests.parity.group_ranks import timeouts, waited
from tests.pool import RankPool


def test_all_groups_have_the_timeout_of_the_run(ranks: RankPool) -> None:
    layout = Layout(dp_shard_size=1, cp_size=4)
    for found in ranks.run(4, timeouts, seconds=77.0, layout=layout):
        assert len(found) > 5
        assert set(found) == {77.0}


def test_a_collective_of_a_subgroup_ends(ranks: RankPool) -> None:
    """In the default group's time, not after half an hour."""
    found = ranks.run(4, waited, seconds=2.0, layout=Layout(dp_shard_size=2, tp_size=2))
    assert [1.5 < found[rank] < 60.0 for rank in (0, 2)] == [True, True]
