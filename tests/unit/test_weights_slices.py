"""Weights read by the rows and columns that a rank holds, and a model filled with them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from fourfold.model.build import build_on_meta
from fourfold.model.load import check, load, stored_shapes
from fourfold.model.weights import Weights
from fourfold.slices import Slice, is_counted, slice_of
from tests.reference import tiny_model
from tests.unit.sliced_ranks import SHAPES, part_of, tensors


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    folder = tmp_path_factory.mktemp("weights")
    save_file({name: whole.bfloat16() for name, whole in tensors("master").items()}, folder / "model.safetensors")
    return Weights(folder)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", SHAPES)
def test_any_elements_of_a_part_are_read(weights: Weights, name: str, size: int) -> None:
    whole = tensors("master")[name].bfloat16()
    for rank in range(size):
        part = part_of(name, rank=rank, size=size)
        wanted = part.cut(whole).reshape(-1)
        for start in range(len(wanted)):
            for count in {1, 2, 7, 13, len(wanted) - start}:
                read = weights.read_part(name, part, start, min(count, len(wanted) - start))
                assert read.dtype is torch.bfloat16
                assert torch.equal(read, wanted[start : start + count]), (part, start, count)


class Counted:
    """A slice of safetensors' own, and the number of elements of all that is read of it."""

    def __init__(self, opened: Any, sizes: list[int]) -> None:
        self._opened, self._sizes = opened, sizes

    def __getitem__(self, index: Any) -> Any:
        found = self._opened[index]
        self._sizes.append(found.numel())
        return found


@pytest.mark.parametrize(("name", "blocks"), [("qkv", 3), ("bias", 3), ("heads", 1), ("down", 1), ("odd", 2)])
def test_only_what_is_held_is_read(weights: Weights, monkeypatch: pytest.MonkeyPatch, name: str, blocks: int) -> None:
    sizes: list[int] = []

    @contextmanager
    def counting(*arguments: Any, **options: Any) -> Iterator[Any]:
        with safe_open(*arguments, **options) as file:
            yield SimpleNamespace(get_slice=lambda name: Counted(file.get_slice(name), sizes))

    monkeypatch.setattr("safetensors.safe_open", counting)
    part = part_of(name, rank=1, size=2)
    weights.read_part(name, part, 0, part.numel())
    row_for_the_dtype = [torch.Size(SHAPES[name][1:]).numel()] if blocks > 1 else []
    assert len(sizes) == blocks + len(row_for_the_dtype)
    assert sum(sizes) == part.numel() + sum(row_for_the_dtype)


CUT = {
    "model.layers.0.self_attn.q_proj.weight": 0,
    "model.layers.0.self_attn.o_proj.weight": 1,
    "model.embed_tokens.weight": 0,
}


def cut_model(folder: Path, *, rank: int) -> Any:
    """On meta, with half of some matrices, as layers leave them."""
    from transformers import AutoConfig

    model = build_on_meta(AutoConfig.from_pretrained(folder), dtype=torch.float32, attn_implementation="sdpa")
    for name, dimension in CUT.items():
        module, _, attribute = name.rpartition(".")
        old = model.get_parameter(name)
        part = half(old.shape, dimension, rank=rank)
        new: Any = nn.Parameter(torch.empty(part.local_shape(), device="meta"))
        new.tensor_slice, new.tensor_model_parallel, new.partition_dim = part, rank == 0, dimension
        setattr(model.get_submodule(module), attribute, new)
    return model


def half(shape: torch.Size, dimension: int, *, rank: int) -> Slice:
    whole, size = Slice.whole(shape), shape[dimension] // 2
    mine = ((rank * size, rank * size + size),)
    return Slice(shape, mine, whole.columns, padding=3) if dimension == 0 else Slice(shape, whole.rows, mine)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model(tied=True).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("rank", [0, 1])
def test_a_cut_model_is_compared_whole_and_filled_by_parts(folder: Path, rank: int) -> None:
    whole = dict(tiny_model(tied=True).named_parameters())
    model = cut_model(folder, rank=rank)
    assert stored_shapes(model) == {name: parameter.shape for name, parameter in whole.items()}
    load(model, Weights(folder), device=torch.device("cpu"))
    assert stored_shapes(model) == {name: parameter.shape for name, parameter in whole.items()}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for name, parameter in model.named_parameters():
        wanted = half(whole[name].shape, CUT[name], rank=rank).cut(whole[name]) if name in CUT else whole[name]
        assert torch.equal(parameter, wanted), name
        assert is_counted(parameter) == (rank == 0 or name not in CUT)
        assert getattr(parameter, "partition_dim", None) == CUT.get(name)


def test_another_model_is_still_refused(folder: Path) -> None:
    model = cut_model(folder, rank=0)
    shape = torch.Size([70, 32])
    model.model.embed_tokens.weight.tensor_slice = Slice(shape, ((0, 35),), ((0, 32),))
    with pytest.raises(ValueError, match=r"embed_tokens.weight has shape .* calls for \[70, 32\]"):
        check(model, Weights(folder))


@pytest.mark.parametrize("share", range(3))
def test_partitioned_parameters_hold_a_share_of_the_part(
    folder: Path, monkeypatch: pytest.MonkeyPatch, share: int
) -> None:
    """As under ZeRO-3 over three ranks: a third of the flattened local part, with its padding."""
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: share)

    def make(shape: torch.Size, dtype: torch.dtype) -> nn.Parameter:
        made: Any = nn.Parameter(torch.empty(0, dtype=dtype))
        made.ds_shape, made.ds_process_group = shape, SimpleNamespace()
        made.ds_tensor = torch.full((-(-shape.numel() // 3),), float("nan"))
        return made

    whole = dict(tiny_model(tied=True).named_parameters())
    model: Any = cut_model(folder, rank=1)
    load(model, Weights(folder), device=torch.device("cpu"), make_partitioned=make)
    for name, parameter in model.named_parameters():
        flat = slice_of(parameter).cut(whole[name].detach()).reshape(-1)
        size = len(parameter.ds_tensor)
        wanted = torch.cat([flat, flat.new_zeros(3 * size - len(flat))]).split(size)[share]
        assert torch.equal(parameter.ds_tensor, wanted), name
        assert slice_of(parameter).shape == whole[name].shape
