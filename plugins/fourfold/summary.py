"""The tables before the first update and after the last."""

from pathlib import Path
from typing import TYPE_CHECKING

from fourfold.data.stats import described
from fourfold.log import print_table, short
from fourfold.loop import Outcome
from fourfold.planner.flops import parameter_count
from fourfold.planner.passes import micro_batches
from fourfold.schema import Checkpointing, Offload, Precision

if TYPE_CHECKING:
    from fourfold.train import Plan


def print_start(plan: "Plan", *, device_name: str, step: int, resumed: str) -> None:
    """`step` is the update that the run goes on from, `resumed` what there is to say of its checkpoint."""
    config, layout, model = plan.config, plan.layout, plan.model.config
    accumulation = micro_batches(config, layout=layout)
    rows = [
        ("model", f"{config.model.path} ({model.model_type}, {short(parameter_count(model))} parameters)"),
        ("layout", f"{_processes(layout.world_size)} on {device_name}: {layout.describe()}"),
        *([("pipeline", _pipeline(plan))] if layout.pp_size > 1 else []),
        *([("tensor", _tensor(plan))] if layout.tp_size > 1 else []),
        ("ZeRO", _zero(plan)),
        (
            "batch",
            f"{config.global_batch_size} rows x {config.seq_len} tokens = {layout.data_size} data ranks x "
            f"{config.micro_batch_size} rows x {accumulation} micro-batches",
        ),
        ("precision", _precision(plan)),
        ("attention", f"{_attention(plan)}; documents isolated"),
        ("checkpointing", _checkpointing(plan)),
        ("data", _data(plan)),
        ("length", f"{plan.total_steps} updates" + (f", from update {step} on" if step else "")),
        ("output", str(plan.output_dir)),
    ]
    if resumed:
        rows.insert(-1, ("resumed", resumed))
    print_table(f"fourfold: {config.name}", rows)


def print_end(outcome: Outcome, *, newest: Path, exported: Path | None, go_on: str) -> None:
    rows = [("updates", f"{outcome.progress.step}, {short(outcome.progress.tokens)} tokens")]
    if outcome.seconds_to_first_step:
        rows += [
            ("loss", f"{outcome.first_loss:.4f} first, {outcome.last_loss:.4f} last"),
            (
                "speed",
                f"{short(outcome.tokens_per_second)} tokens/s, {outcome.data_wait:.1%} of the time waiting for data",
            ),
            ("start", f"{outcome.seconds_to_first_step:.1f} s from launch to the end of the first update"),
        ]
    rows.append(("checkpoint", str(newest)))
    if outcome.progress.skipped:
        rows.insert(1, ("skipped", f"{outcome.progress.skipped} updates without any target"))
    if exported:
        rows.append(("Hugging Face", str(exported)))
    print_table(f"stopped {outcome.stopped}" if outcome.stopped else "done", rows)
    print(f"\ngo on with     {go_on}", flush=True)  # one line whatever its length, to be copied


def _processes(count: int) -> str:
    return f"{count} process{'es' if count > 1 else ''}"


def _zero(plan: "Plan") -> str:
    zero, layout = plan.config.zero, plan.layout
    what = {0: "nothing is sharded", 1: "optimizer state", 2: "optimizer state and gradients", 3: "everything"}
    if layout.partition_size == 1:
        sharded = "nothing to shard over"
    else:
        sharded = f"{what[zero.stage]} sharded over {layout.partition_size}"
    offload = {zero.offload.optimizer, zero.offload.parameters} - {Offload.none}
    where = f", offloaded to {' and '.join(sorted(place.value for place in offload))}" if offload else ""
    return f"stage {zero.stage}, {sharded}{where}"


def _pipeline(plan: "Plan") -> str:
    from fourfold.pipeline.schedules import stages_per_rank
    from fourfold.pipeline.split import layers_of_stages

    settings = plan.config.pipeline
    stages = plan.layout.pp_size * stages_per_rank(settings)
    layers = layers_of_stages(settings, model_config=plan.model.config, stages=stages)
    counts = ", ".join(str(last - first) for first, last in layers)
    return f"{settings.schedule}, {stages} stages of {counts} layers on {plan.layout.pp_size} ranks"


def _tensor(plan: "Plan") -> str:
    from fourfold.tensor.cuts import Heads

    model, tp_size, settings = plan.model.config, plan.layout.tp_size, plan.config.tensor
    heads = Heads.of(model, size=tp_size)
    copies = f" ({heads.copies} ranks hold each)" if heads.copies > 1 else ""
    between = "hidden states cut by tokens between the blocks" if settings.sequence_parallel else "hidden states whole"
    text = (
        f"a rank has {heads.local} of {heads.heads} heads, {heads.local_kv} of {heads.kv_heads} key heads{copies}, "
        f"{-(-model.vocab_size // tp_size)} of {model.vocab_size} words; {between}"
    )
    servers = plan.config.cluster.gpus_per_node
    if plan.device.type != "cpu" and tp_size > servers:
        text += f". {across_servers(tp_size, gpus_per_node=servers)}"
    return text


def across_servers(tp_size: int, *, gpus_per_node: int) -> str:
    """The scaling guide's figures (The Ultra-Scale Playbook's measurements of H100 servers)."""
    return (
        f"tp_size={tp_size} crosses servers of {gpus_per_node} GPUs (cluster.gpus_per_node): expect to lose 40 to 65 % of the "
        f"throughput, where 8 GPUs of one server cost 10 to 12 %"
    )


def _attention(plan: "Plan") -> str:
    from fourfold.context.attention import IMPLEMENTATION
    from fourfold.context.select import choose_kernel, described

    model = plan.model.config
    if model._attn_implementation != IMPLEMENTATION:
        return str(model._attn_implementation)
    return f"{described(plan.config, model_config=model)}; {choose_kernel(plan.config, model_config=model, device=plan.device).name}"


def _precision(plan: "Plan") -> str:
    if plan.config.precision is Precision.fp32:
        return "fp32 weights, gradients and optimizer state"
    zero = plan.config.zero
    sums = f"gradients summed in {'fp32' if zero.fp32_accumulation else 'bf16'}"
    return (
        f"bf16 weights, fp32 master weights and moments, {sums}, reduced in {'fp32' if zero.fp32_reduction else 'bf16'}"
    )


def _checkpointing(plan: "Plan") -> str:
    from fourfold.activation.stretches import stretch_sizes

    settings = plan.config.activation
    if settings.checkpointing is Checkpointing.none:
        return "none"
    sizes = stretch_sizes(
        plan.model.config.num_hidden_layers, checkpointing=settings.checkpointing, every_n=settings.every_n
    )
    return f"{settings.checkpointing.value}, {len(sizes)} stretches of up to {max(sizes)} layers"


def _data(plan: "Plan") -> str:
    data, stats = plan.config.data, plan.data.stats
    where = data.path if data.sources is None else f"{len(data.sources)} sources"
    if data.streaming:
        return f"{where}, streamed, {data.packing.value}"
    held_out = f", {plan.data.eval_stats.rows} rows held out" if plan.data.eval_stats else ""
    return (
        f"{where}: {described(stats)}; {sum(one.rows_per_epoch for one in plan.data.sources)} rows an epoch ({data.packing.value}), "
        f"{short(stats.targets)} targets, {stats.efficiency:.1%} filled{held_out}"
    )
