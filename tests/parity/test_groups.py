"""Groups of a run: cluster.timeout holds in each, and the mpu names them as Megatron does."""

from fourfold.layout import Layout
from tests.parity.group_ranks import megatron_view, timeouts, waited
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


def test_the_mpu_names_the_groups_of_the_layout(ranks: RankPool) -> None:
    layout = Layout(tp_size=2, cp_size=2, pp_size=2)
    axes = {"tensor_model": ["tp"], "context": ["cp"], "pipeline_model": ["pp"], "model": ["tp", "pp"]}
    for rank, found in enumerate(ranks.run(8, megatron_view, layout=layout)):
        for name, members in [*axes.items(), ("data", ["dp_shard", "cp"])]:
            group = layout.group(members, rank=rank)
            assert tuple(found[f"get_{name}_parallel_group"]) == group
            assert found[f"get_{name}_parallel_world_size"] == len(group)
            assert found[f"get_{name}_parallel_rank"] == group.index(rank)
        assert tuple(found["get_data_parallel_group alone"]) == (rank,)
        assert found["get_pipeline_model_parallel_next_rank"] == found["get_pipeline_model_parallel_prev_rank"]
        assert found["get_pipeline_model_parallel_next_rank"] == (rank + 4) % 8
        assert found["get_pipeline_model_parallel_first_rank"] == rank % 4
        assert found["get_pipeline_model_parallel_last_rank"] == rank % 4 + 4
        assert found["get_tensor_model_parallel_src_rank"] == rank - rank % 2
        assert tuple(found["get_context_parallel_global_ranks"]) == layout.group(["cp"], rank=rank)
        assert not [name for name in found if "sequence" in name]
