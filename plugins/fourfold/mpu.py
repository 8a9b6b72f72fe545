"""The face of a mesh that DeepSpeed and Megatron-style callers expect, under the names of Megatron-LM's parallel_state."""

import torch.distributed as dist

from fourfold.mesh import Mesh


class Mpu:
    """Megatron's model-parallel-unit interface over a Mesh. Ranks are those of the group unless a name says global or src.

    "data parallel" means the group over which ZeRO partitions and averages: dp_shard x cp, or with
    with_context_parallel=False dp_shard alone. There is no method with `sequence` in its name, on purpose: DeepSpeed 0.19
    doubles gradients or reduces over too few ranks if it finds one.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._shards = {True: mesh.shard_group, False: mesh.axis_groups["dp_shard"]}
        self._model = mesh.model_group
        self._tensor = mesh.axis_groups["tp"]
        self._pipeline = mesh.axis_groups["pp"]
        self._context = mesh.axis_groups["cp"]

    def get_data_parallel_group(self, with_context_parallel: bool = True) -> dist.ProcessGroup:
        return self._shards[with_context_parallel]

    def get_data_parallel_world_size(self, with_context_parallel: bool = True) -> int:
        return dist.get_world_size(self._shards[with_context_parallel])

    def get_data_parallel_rank(self, with_context_parallel: bool = True) -> int:
        return dist.get_rank(self._shards[with_context_parallel])

    def get_data_parallel_group_ranks(self) -> list[int]:
        return dist.get_process_group_ranks(self._shards[True])

    def get_data_parallel_src_rank(self, with_context_parallel: bool = True) -> int:
        return dist.get_process_group_ranks(self._shards[with_context_parallel])[0]

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self._model

    def get_model_parallel_world_size(self) -> int:
        return dist.get_world_size(self._model)

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank(self._model)

    def get_model_parallel_src_rank(self) -> int:
        return dist.get_process_group_ranks(self._model)[0]

    def get_tensor_model_parallel_group(self) -> dist.ProcessGroup:
        return self._tensor

    def get_tensor_model_parallel_world_size(self) -> int:
        return dist.get_world_size(self._tensor)

    def get_tensor_model_parallel_rank(self) -> int:
        return dist.get_rank(self._tensor)

    def get_tensor_model_parallel_src_rank(self) -> int:
        return dist.get_process_group_ranks(self._tensor)[0]

    def get_context_parallel_group(self) -> dist.ProcessGroup:
        return self._context

    def get_context_parallel_world_size(self) -> int:
        return dist.get_world_size(self._context)

    def get_context_parallel_rank(self) -> int:
        return dist.get_rank(self._context)

    def get_context_parallel_global_ranks(self) -> list[int]:
        return dist.get_process_group_ranks(self._context)

    def get_pipeline_model_parallel_group(self) -> dist.ProcessGroup:
        return self._pipeline

    def get_pipeline_model_parallel_world_size(self) -> int:
        return dist.get_world_size(self._pipeline)

    def get_pipeline_model_parallel_rank(self) -> int:
        return dist.get_rank(self._pipeline)

    def get_pipeline_model_parallel_first_rank(self) -> int:
        return dist.get_process_group_ranks(self._pipeline)[0]

    def get_pipeline_model_parallel_last_rank(self) -> int:
        return dist.get_process_group_ranks(self._pipeline)[-1]

    def get_pipeline_model_parallel_next_rank(self) -> int:
        return self._pipeline_neighbour(1)

    def get_pipeline_model_parallel_prev_rank(self) -> int:
        return self._pipeline_neighbour(-1)

    def _pipeline_neighbour(self, step: int) -> int:
        """Global; the last and the first are neighbours."""
        ranks = dist.get_process_group_ranks(self._pipeline)
        return ranks[(dist.get_rank(self._pipeline) + step) % len(ranks)]
