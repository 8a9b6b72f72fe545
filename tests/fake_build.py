"""What a rank of a run would hold, built on the meta device with a process group that sends nothing."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from fourfold import legality
from fourfold.context import select
from fourfold.context.attention import IMPLEMENTATION, register
from fourfold.layout import Layout
from fourfold.mesh import build_mesh
from fourfold.model.build import build_on_meta
from fourfold.model.source import attention_implementation
from fourfold.parallelize import _pipeline, cut_model, stored_names, trained_module
from fourfold.schema import Precision, TrainConfig
from fourfold.tensor.plan import refusals as layer_refusals
from fourfold.zero.settings import deepspeed_json

CPU = torch.device("cpu")


@contextmanager
def fake_rank(rank: int, *, world_size: int) -> Iterator[None]:
    """The groups of torch's fake backend have no timeout."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        with (
            mock.patch("fourfold.mesh.timeout_of", return_value=None),
            mock.patch("fourfold.groups.timeout_of", return_value=None),
            mock.patch.object(dist, "set_timeout"),
        ):
            yield
    finally:
        dist.destroy_process_group()


def checked(config: TrainConfig, *, model_config: Any, world_size: int) -> tuple[list[str], str]:
    """All that a run refuses before it has a process group, and which attention it takes."""
    problems = legality.refusals(config, world_size=world_size, model_config=model_config)
    if problems:
        return problems, ""
    try:
        attention = attention_implementation(model_config, model=config.model)
    except ValueError as error:
        return [str(error)], ""
    if select.is_ours(config, model_config=model_config, device=CPU):
        attention = IMPLEMENTATION
    problems = legality.refusals(
        config, world_size=world_size, model_config=model_config, attn_implementation=attention
    )
    if not problems and config.tp_size > 1:
        model = _on_meta(model_config.to_json_string(use_diff=False), attention, config.precision)
        problems = list(layer_refusals(model, more=config.tensor.plan, size=config.tp_size))
    return problems, attention


def meta_model(model_config: Any, *, attention: str, precision: Precision) -> Any:
    """A copy of its own."""
    return copy.deepcopy(_on_meta(model_config.to_json_string(use_diff=False), attention, precision))


@lru_cache(maxsize=64)
def _on_meta(text: str, attention: str, precision: Precision) -> Any:
    import json

    from transformers import AutoConfig

    register()
    values = json.loads(text)
    dtype = torch.bfloat16 if precision is Precision.bf16 else torch.float32
    return build_on_meta(
        AutoConfig.for_model(values.pop("model_type"), **values), dtype=dtype, attn_implementation=attention
    )


def build(config: TrainConfig, *, model_config: Any, attention: str, layout: Layout, rank: int) -> nn.Module:
    """As parallelize does it, less the weights and DeepSpeed."""
    with fake_rank(rank, world_size=layout.world_size):
        mesh = build_mesh(layout, device_type="cpu")
        model = meta_model(model_config, attention=attention, precision=config.precision)
        cuts = cut_model(model, config=config, mesh=mesh)
        names = stored_names(model)
        module = trained_module(model, cuts, config=config, mesh=mesh)
        assert {id(parameter) for parameter in module.parameters()} == {id(parameter) for parameter in names.values()}
        assert all(parameter.is_meta for parameter in module.parameters())
        if cuts.stages:
            _pipeline(module, cuts.stages, model=model, config=config, mesh=mesh, device=CPU)
        select.splitter(config, model_config=model_config, group=mesh.axis_groups["cp"], device=CPU)
        deepspeed_json(config, layout=layout)
        return module
