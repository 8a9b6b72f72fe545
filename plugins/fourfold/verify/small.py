"""What every pass is given: the small model and the rows in a folder of their own, and what is told of them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fourfold import legality
from fourfold.context import select
from fourfold.context.attention import IMPLEMENTATION
from fourfold.layout import Layout
from fourfold.log import short
from fourfold.model.source import read_config, read_tokenizer, resolve_folder
from fourfold.planner.parameters import parameter_count
from fourfold.schema import TrainConfig
from fourfold.verify import recipe
from fourfold.verify.reference import grows
from fourfold.verify.rows import KnownRows, real_rows
from fourfold.verify.shrink import Target, shrunken, write_model


@dataclass(frozen=True)
class Small:
    folder: Path  # of the model
    rows: Path
    recipes: list[TrainConfig]  # of each layout
    about: list[tuple[str, str]]
    notes: list[str]


def make_small(config: TrainConfig, *, layouts: list[Layout], sizes: dict[str, int], scratch: Path) -> Small:
    """ValueError for what a run would refuse, at this size."""
    source = resolve_folder(config.model, weights=False)
    model_config = read_config(source, model=config.model)
    notes = list(_refused_as_it_is(config, model_config))
    config = recipe.named_attention(config, model_config=model_config)
    small_config = shrunken(model_config, _target(config, sizes))
    batch = recipe.batch_of(config, sizes=sizes, row_by_row=grows(small_config))
    folder, rows = scratch / "model", scratch / "rows.npz"
    layers = small_config.num_hidden_layers
    recipes = [recipe.recipe(config, layout=one, folder=str(folder), batch=batch, layers=layers) for one in layouts]
    for layout, made in zip(layouts, recipes, strict=True):
        attention = _attention(made, small_config)
        legality.check(made, world_size=layout.world_size, model_config=small_config, attn_implementation=attention)
    known = real_rows(
        config,
        tokenizer=read_tokenizer(source),
        vocabularies=(model_config.vocab_size, small_config.vocab_size),
        count=batch[1],
        cache=scratch / "cache",
    )
    known.save(rows)
    write_model(folder, small_config, seed=config.seed)
    about = [
        ("model", _model(model_config, small_config)),
        ("rows", _rows(known, config)),
        ("passes", _passes(layouts)),
    ]
    return Small(folder, rows, recipes, about, [*notes, *_gaps(known)])


def _target(config: TrainConfig, sizes: dict[str, int]) -> Target:
    return Target(
        seq_len=recipe.row_length(config),
        of_seq_len=config.seq_len,
        stages=recipe.stages(config, sizes=sizes),
        tp_size=sizes.get("tp", 1),
        of_tp_size=config.tp_size,
        cp_size=sizes.get("cp", 1) if config.attention.name in ("ulysses", "hybrid") else 1,
    )


def _attention(config: TrainConfig, model_config: Any) -> str:
    from torch import device

    ours = select.is_ours(config, model_config=model_config, device=device("cpu"))
    return IMPLEMENTATION if ours else config.model.attn_implementation


def _refused_as_it_is(config: TrainConfig, model_config: Any) -> list[str]:
    """Whether a run of this recipe would not start: `verify` is of what it computes."""
    try:
        legality.check(
            config,
            world_size=legality.least_world(config),
            model_config=model_config,
            attn_implementation=IMPLEMENTATION,
        )
    except ValueError as error:
        return [f"at its full size a run is refused: {' '.join(str(error).split())}"]
    return []


def _model(config: Any, small: Any) -> str:
    sizes = [
        f"{name} {getattr(config, key)} -> {getattr(small, key)}"
        for name, key in (
            ("layers", "num_hidden_layers"),
            ("hidden", "hidden_size"),
            ("query heads", "num_attention_heads"),
            ("key heads", "num_key_value_heads"),
            ("MLP", "intermediate_size"),
            ("vocabulary", "vocab_size"),
        )
    ]
    return (
        f"{config.model_type}, {short(parameter_count(config))} -> {short(parameter_count(small))} random parameters, fp32: "
        f"{', '.join(sizes)}"
    )


def _rows(rows: KnownRows, config: TrainConfig) -> str:
    where = config.data.path if config.data.sources is None else f"{len(config.data.sources)} sources"
    targets = int((rows.columns["labels"] >= 0).sum())
    return (
        f"{len(rows)} of {rows.seq_len} tokens (run: {config.seq_len}) from {where}: {sum(rows.documents)} documents, "
        f"{sum(count > 1 for count in rows.documents)} rows with several, {targets} targets; an update takes them all"
    )


def _passes(layouts: list[Layout]) -> str:
    return "; ".join(layout.describe() for layout in layouts)


def _gaps(rows: KnownRows) -> list[str]:
    if max(rows.documents) > 1:
        return []
    return ["no row has two documents: that they do not see each other is not verified"]
