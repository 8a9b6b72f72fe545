"""Fill a model on the meta device from safetensors: the rows and columns that each parameter says it holds of its tensor,
all of them or under ZeRO-3 only this rank's share of each.

No rank reads or holds a full copy under ZeRO-3, and nothing is sent: memory is the rank's own shard plus one tensor.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fourfold.model.weights import Weights
from fourfold.slices import carry_marks, slice_of

COMPARED = 2**22  # elements at a time
MakeParameter = Callable[[torch.Size, torch.dtype], nn.Parameter]


def load(model: Any, weights: Weights, *, device: torch.device, make_partitioned: MakeParameter | None = None) -> None:
    """Replace every meta parameter of the Hugging Face `model` by one filled from `weights`, then tie tied ones.

    `make_partitioned` makes a ZeRO-3 parameter; without it parameters are plain. The model may lack parts of what
    `check` saw; a tied parameter without the other is filled by itself.
    """
    here = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    tied = {alias: name for alias, name in tied_parameters(model).items() if {alias, name} <= here}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if name in tied:
            continue
        module_name, _, attribute = name.rpartition(".")
        filled = _filled(
            getattr(parameter, "stored_as", name), parameter, weights, device=device, make_partitioned=make_partitioned
        )
        filled.requires_grad_(parameter.requires_grad)
        setattr(model.get_submodule(module_name), attribute, filled)
    tie(model, tied)
    model.to(device=device)  # buffers


def tie(model: Any, tied: Mapping[str, str]) -> None:
    """{alias: name} of parameters that the model has: they become one. On meta they are none, accelerate parts them."""
    for alias, name in tied.items():
        setattr(model.get_submodule(alias.rpartition(".")[0]), alias.rpartition(".")[2], model.get_parameter(name))


def check(model: Any, weights: Weights) -> dict[str, str]:
    """Compare names and shapes; returns {alias: name} of tied parameters, which are stored once.

    Raises ValueError naming the first differing tensors.
    """
    tied, expected = tied_parameters(model), stored_shapes(model)
    missing = sorted(set(expected) - weights.names())
    if missing:
        raise ValueError(
            f"{weights.folder.absolute()} lacks {len(missing)} of the {len(expected)} tensors that its config.json "
            f"calls for, {missing[0]} first. Is it the checkpoint of another model?"
        )
    surplus = sorted(name for name in weights.names() - set(expected) - set(tied) if "rotary_emb" not in name)
    if surplus:
        raise ValueError(
            f"{weights.folder.absolute()} has {len(surplus)} tensors that a {model.config.model_type} does not, "
            f"{surplus[0]} first: they would be lost in the export."
        )
    for name, shape in expected.items():
        if weights.shape(name) != shape:
            raise ValueError(
                f"{weights.folder.absolute()}: {name} has shape {list(weights.shape(name))}, config.json calls for "
                f"{list(shape)}."
            )
    return tied


def refuse_contradicting_ties(model: Any, weights: Weights) -> None:
    """ValueError when config.json ties two parameters of which the files hold different values: one would be lost."""
    for alias, name in tied_parameters(model).items():
        if alias in weights.names() and not _same(weights, alias, name):
            raise ValueError(
                f"{weights.folder.absolute()}: config.json ties {alias} to {name} (tie_word_embeddings=true), but the "
                f"files hold two different tensors. Set tie_word_embeddings to false in config.json if they were trained "
                f"apart, or take {alias} out of the files."
            )


def _same(weights: Weights, one: str, other: str) -> bool:
    """Bit by bit, a part at a time."""
    count = weights.shape(one).numel()
    return weights.shape(one) == weights.shape(other) and all(
        torch.equal(weights.read(one, start=start, count=size), weights.read(other, start=start, count=size))
        for start in range(0, count, COMPARED)
        for size in [min(COMPARED, count - start)]
    )


def stored_shapes(model: Any) -> dict[str, torch.Size]:
    """Global shape of every parameter by name, also of those that tensor parallelism cut; one name for tied ones."""
    tied = tied_parameters(model)
    return {name: slice_of(p).shape for name, p in model.named_parameters(remove_duplicate=False) if name not in tied}


def tied_parameters(model: Any) -> dict[str, str]:
    """{alias: name} of the parameters that transformers ties in this model."""
    return dict(model.all_tied_weights_keys) if model.config.tie_word_embeddings else {}


def _filled(
    name: str, parameter: Tensor, weights: Weights, *, device: torch.device, make_partitioned: MakeParameter | None
) -> nn.Parameter:
    """With the marks of the `parameter` whose place it takes."""
    part = slice_of(parameter)
    assert part.local_shape() == parameter.shape, (name, part, parameter.shape)
    if make_partitioned is None:
        value = weights.read_part(name, part, 0, parameter.numel()).to(device=device, dtype=parameter.dtype)
        filled = nn.Parameter(value.view(parameter.shape))
    else:
        filled = make_partitioned(parameter.shape, parameter.dtype)
        local: Tensor = filled.ds_tensor  # type: ignore[attr-defined]
        group_rank = torch.distributed.get_rank(filled.ds_process_group)  # type: ignore[attr-defined]
        start = group_rank * local.numel()
        count = max(0, min(local.numel(), parameter.numel() - start))
        local.zero_()  # the last rank's padding
        if count:
            local[:count].copy_(weights.read_part(name, part, start, count))
    carry_marks(parameter, filled)
    return filled
