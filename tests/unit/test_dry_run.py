"""What a dry run counts on the stages that training would build is what the plan computes, to the element, byte and operation."""

import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from transformers import LlamaConfig

from fourfold.config import to_train_config
from fourfold.context.select import BY_BYTES
from fourfold.dryrun.places import crosses_servers, wrong_places
from fourfold.dryrun.show import DryRun, show_dry_run
from fourfold.dryrun.world import differing_groups, fake_world
from fourfold.layout import Layout
from fourfold.legality import check
from fourfold.planner.fit import bytes_of, planned, rank_bytes, work_of
from fourfold.planner.known import config_to_plan, known_shape
from fourfold.planner.parameters import parameter_count
from fourfold.planner.traffic import sent_in_pass, sent_in_update
from fourfold.schema import ActivationConfig, Checkpointing, ModelConfig, Precision, TrainConfig
from tests.golden.composing import TIERS, composed

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "intermediate_size": 48,
    "vocab_size": 98,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
LLAMA_3 = Layout(tp_size=8, cp_size=16, pp_size=16, dp_shard_size=8)
OVERRIDES = ("task=llama3_405b", "tier=llama3_405b_128k", "seq_len=131072", "global_batch_size=128")


def differences(dry: DryRun, ranks: list[int]) -> list[Any]:
    """(rank, what, counted, planned)"""
    config, layout, model = dry.config, dry.layout, dry.model_config
    found: list[Any] = []
    for built in map(dry.build, ranks):
        place = layout.coordinate(built.rank)
        more = {"layout": layout, "model_config": model}
        work = work_of(config, cp_rank=place["cp"], **more)
        plan = planned(config, pp_rank=place["pp"], tp_rank=place["tp"], work=work, **more)
        sent = [sent_in_pass(config, stage, cp_rank=place["cp"], **more) for stage in plan.stages]
        pairs = {
            "stages": (built.stages, plan.stages),
            "elements": ([sorted(group) for group in built.groups], [sorted(group) for group in plan.groups]),
            "held": ([one.held for one in built.traced], [one.held for one in plan.passes]),
            "head": ([one.head for one in built.traced], [one.head for one in plan.passes]),
            "flops": ([one.flops for one in built.traced], [one.flops for one in plan.passes]),
            "tensor": ([_real(one.sent.tensor) for one in built.traced], [_real(one.tensor) for one in sent]),
            "context": ([_real(one.sent.context) for one in built.traced], [_real(one.context) for one in sent]),
            "memory": (dry.memory(built), bytes_of(plan, config, pp_rank=place["pp"], work=work, **more)),
            "sent": (dry.sent(built), sent_in_update(sent, plan.groups, config, pp_rank=place["pp"], **more)),
        }
        found += [(built.rank, name, *pair) for name, pair in pairs.items() if pair[0] != pair[1]]
    return found


def _real(sent: dict[str, int]) -> dict[str, int]:
    return {purpose: count for purpose, count in sent.items() if count}


@pytest.mark.parametrize("tier", [tier for tier in TIERS if tier != "none"])
def test_plan_and_dry_run_of_every_recipe(tier: str) -> None:
    """Shrunken to two ranks an axis; two data ranks where their number is open."""
    config = to_train_config(
        composed("task=quickstart", f"tier={tier}", "cluster=cpu", "precision=bf16", "seq_len=32"), needs_data=False
    )
    open_axis = -1 in (config.dp_shard_size, config.dp_replicate_size)
    gpus = (2 if open_axis else 1) * config.tp_size * config.cp_size * config.pp_size
    layout = check(config, world_size=gpus * max(1, config.dp_shard_size), environment={})
    dry = DryRun(config, layout=layout, model_config=LlamaConfig(**SIZES))
    assert differences(dry, dry.kinds()) == []
    assert dry.parameters_of_model() == parameter_count(dry.model_config)


@dataclass(frozen=True)
class Case:
    layout: Layout
    settings: dict[str, Any]
    model: dict[str, Any]
    ranks: list[int] | None = None  # None: those that stand for all


CASES = {
    "one process in fp32": Case(Layout(), {"precision": Precision.fp32}, {}),
    "an odd vocabulary": Case(Layout(tp_size=4, pp_size=2), {}, {"vocab_size": 97}),
    "copies of key heads": Case(Layout(tp_size=4), {}, {"num_key_value_heads": 2, "attention_bias": True}),
    "one key head over three ranks": Case(
        Layout(tp_size=3), {}, {"num_attention_heads": 6, "num_key_value_heads": 1, "hidden_size": 48}
    ),
    "tied": Case(Layout(dp_shard_size=2), {"precision": Precision.fp32}, {"tie_word_embeddings": True}),
    "tied on two stages": Case(Layout(pp_size=2), {}, {"tie_word_embeddings": True}),
    "tied in a V": Case(Layout(pp_size=2, tp_size=2), {"pipeline.schedule": "zbv"}, {"tie_word_embeddings": True}),
    "whole tokens": Case(Layout(tp_size=2), {"tensor.sequence_parallel": False}, {"mlp_bias": True}),
    "regather": Case(Layout(tp_size=2), {"tensor.regather": True, "activation.checkpointing": Checkpointing.full}, {}),
    "padded rows": Case(Layout(cp_size=2, tp_size=2), {"seq_len": 29}, {}, [0, 3]),
    "every second": Case(Layout(), {"activation.checkpointing": Checkpointing.every_n, "activation.every_n": 3}, {}),
}


def config_of(layout: Layout, settings: dict[str, Any]) -> TrainConfig:
    config = TrainConfig(name="dry", max_steps=1, seq_len=32, global_batch_size=8, micro_batch_size=2)
    config.zero.stage = 1
    for axis in ("tp", "cp", "pp", "dp_shard", "dp_replicate"):
        setattr(config, f"{axis}_size", layout.size(axis))
    for key, value in settings.items():
        *path, name = key.split(".")
        target = config
        for part in path:
            target = getattr(target, part)
        setattr(target, name, value)
    return config


@pytest.mark.parametrize("name", CASES)
def test_plan_and_dry_run_of_what_recipes_have_not(name: str) -> None:
    case = CASES[name]
    model = LlamaConfig(**{**SIZES, "num_hidden_layers": 4, **case.model})
    dry = DryRun(config_of(case.layout, case.settings), layout=case.layout, model_config=model)
    assert differences(dry, case.ranks or dry.kinds()) == []
    if case.ranks is None:
        assert dry.parameters_of_model() == parameter_count(model)
        assert dry.parameters([dry.build(rank) for rank in dry.kinds()]) == parameter_count(model)
        assert dry.parameters_of_model() == parameter_count(model)


@pytest.mark.parametrize("mode", [Checkpointing.none, pytest.param(Checkpointing.selective, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", BY_BYTES, ids=lambda kind: kind.name)
def test_plan_and_dry_run_of_every_strategy(kind: Any, mode: Checkpointing) -> None:
    layout = Layout(cp_size=4)
    settings = {"attention._target_": f"{kind.__module__}.{kind.__name__}", "activation.checkpointing": mode}
    model = LlamaConfig(**{**SIZES, "num_hidden_layers": 2, "num_key_value_heads": 2})
    dry = DryRun(config_of(layout, settings), layout=layout, model_config=model)
    assert differences(dry, [0, 2]) == []


def test_llama_3_405b_on_16384_gpus() -> None:
    """All stages at their real size: the ranks hold the model's parameters, and what is planned."""
    config = to_train_config(composed(*OVERRIDES), needs_data=False)
    model, source = config_to_plan(config.model)
    assert "the shape of Llama 3.1 405B" in source
    dry = DryRun(config, layout=LLAMA_3, model_config=model)
    kinds = dry.kinds()
    assert kinds == [LLAMA_3.rank({"pp": rank}) for rank in range(16)]
    assert dry.parameters([dry.build(rank) for rank in kinds]) == 405_853_388_800
    assert differences(dry, [kinds[0], kinds[-1]]) == []


def test_every_rank_of_16384_has_its_place() -> None:
    assert wrong_places(LLAMA_3) == []
    assert not crosses_servers(LLAMA_3, gpus_per_node=8)
    assert crosses_servers(LLAMA_3, gpus_per_node=4)
    assert crosses_servers(Layout(tp_size=6, dp_shard_size=4), gpus_per_node=8)


def test_wrong_places_are_told() -> None:
    class Mirrored(Layout):
        def coordinate(self, rank: int) -> dict[str, int]:
            return super().coordinate(self.world_size - 1 - rank)

    wrong = wrong_places(Mirrored(tp_size=2, pp_size=2))
    assert "a rank's coordinate is another rank's" in wrong


def test_the_fullest_rank_is_found_among_the_cp_ranks() -> None:
    """Of zigzag's queries some meet the keys, in the order of the ranks, in more stretches than others."""
    layout, model = Layout(cp_size=4), LlamaConfig(**SIZES)
    kind = "fourfold.context.allgather.AllGather"
    config = config_of(layout, {"attention._target_": kind, "activation.checkpointing": Checkpointing.selective})
    dry = DryRun(config, layout=layout, model_config=model)
    found = [dry.memory(dry.build(rank)).total for rank in range(4)]
    assert found[0] < max(found) == rank_bytes(config, layout=layout, model_config=model).total
    assert dry.kinds() == [found.index(max(found))]


def test_live_groups_are_those_of_the_layout() -> None:
    layout = Layout(tp_size=2, cp_size=3, pp_size=2, dp_shard_size=2, dp_replicate_size=2)
    for rank in (0, 17, 47):
        with fake_world(layout, rank=rank) as mesh:
            assert mesh.rank == rank
            assert differing_groups(mesh) == []
    assert not dist.is_initialized()


def test_report(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = LlamaConfig(**SIZES)
    model.save_pretrained(tmp_path)
    layout = Layout(tp_size=2, pp_size=2)
    config = config_of(layout, {"model.path": str(tmp_path), "data.path": "none"})
    memory, least = (
        rank_bytes(replace(config, activation=ActivationConfig(mode)), layout=layout, model_config=model)
        for mode in (Checkpointing.none, Checkpointing.full)
    )
    show_dry_run(config, gpus=None, rank=None, gpu_gb=1.001 * least.total / 0.9e9)
    shown = " ".join(capsys.readouterr().out.split())
    assert f"parameters of all tp x pp ranks: {parameter_count(model):,}, those of the model" in shown
    assert "pp 1 tp 0" in shown
    assert f"are {memory.largest}; the nearest that fits: " in shown
    assert memory.largest == "activations"
    show_dry_run(config, gpus=None, rank=3, gpu_gb=80)
    assert "tp 1, cp 0, pp 1" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(ValueError, match="--rank 4: this layout has ranks 0 to 3"):
        show_dry_run(config, gpus=None, rank=4, gpu_gb=80)


def test_known_shapes() -> None:
    assert known_shape("meta-llama/Llama-3.1-405B") == "Llama 3.1 405B"
    assert known_shape("HuggingFaceTB/SmolLM2-135M-Instruct") == "SmolLM2 135M"
    assert known_shape("somebody/Llama-3.1-405") is None
    with pytest.raises(ValueError, match="no folder"):
        config_to_plan(ModelConfig(path="./nowhere/at all"))


def test_formulas_import_no_torch() -> None:
    modules = ("zero.cost", "pipeline.cost", "planner.held", "planner.passes", "planner.traffic", "planner.nearest")
    modules += ("legality", "context.select", "planner.show")
    code = f"import sys, {', '.join(f'fourfold.{one}' for one in modules)}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
