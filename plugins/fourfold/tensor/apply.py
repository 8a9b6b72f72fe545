"""Cut a Hugging Face causal LM on the meta device over the tp ranks, in place; names of parameters stay as they are."""

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

from fourfold.mesh import neighbours
from fourfold.tensor.cuts import Cut, Heads, even, side_by_side
from fourfold.tensor.group import TensorGroup
from fourfold.tensor.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, sliced_vocabulary
from fourfold.tensor.plan import Part, parts
from fourfold.tensor.regions import Block


def apply(
    model: Any,
    *,
    tensor: TensorGroup,
    plan: Mapping[str, str],
    overlap: bool,
    regather: bool,
) -> None:
    """Collective over the ranks. Afterwards the model's layers take hidden[B, S/t, D] with sequence parallelism; input ids, position ids and rotary
    embeddings stay whole on each rank, and so must the attention function's idea of the sequence: it gets
    q[B, H/t, S, D] of all tokens. Raises ValueError for a layer that cannot be cut.
    """
    heads = Heads.of(model.config, size=tensor.size)
    copies_group = neighbours(tensor.group, size=heads.copies) if heads.copies > 1 else None
    blocks: dict[str, Block] = {}
    found = parts(model, more=plan)
    for name, part in found.items():
        path, _, leaf = name.rpartition(".")
        parent, layer = model.get_submodule(path), model.get_submodule(name)
        if part is Part.column:
            if path not in blocks:
                blocks[path] = Block(tensor, overlap=overlap, regather=regather)
            copies = heads.copies if leaf in ("k_proj", "v_proj") else 1
            cut = _rows(leaf, layer, heads)
            new: nn.Module = ColumnParallelLinear.from_linear(layer, cut, block=blocks[path], copies=copies)
            if copies > 1:
                _sum_over(new, copies_group)
        elif part is Part.row:
            cut = heads.queries() if leaf == "o_proj" else even(layer.in_features, size=tensor.size)
            new = RowParallelLinear.from_linear(layer, cut, tensor=tensor)
        elif part is Part.embedding:
            new = VocabParallelEmbedding.from_embedding(layer, tensor=tensor)
        elif part is Part.head:
            layer.weight, new = sliced_vocabulary(layer.weight, tensor=tensor), layer
        else:
            _sum_over(layer, tensor.group)
            continue
        setattr(parent, leaf, new)
    if model.config.tie_word_embeddings and {Part.embedding, Part.head} <= set(found.values()):
        model.get_output_embeddings().weight = model.get_input_embeddings().weight
    for path, block in blocks.items():
        model.get_submodule(path).register_forward_pre_hook(_entering(block), with_kwargs=True)
        _tell_heads(model.get_submodule(path), heads)
    if tensor.sequence_parallel:
        _sum_what_sees_a_part_of_the_sequence(model, tensor)
    _mark_copies(model, counts=tensor.rank == 0)


def _rows(leaf: str, layer: Any, heads: Heads) -> Cut:
    """Of the output channels of a column-parallel layer."""
    queries, keys = heads.queries(), heads.keys()
    if leaf == "q_proj":
        return queries
    if leaf in ("k_proj", "v_proj"):
        return keys
    if leaf == "qkv_proj":
        height = heads.kv_heads * heads.head_dim
        return side_by_side((queries, heads.heads * heads.head_dim), (keys, height), (keys, height))
    if leaf == "gate_up_proj":
        half = layer.out_features // 2
        return side_by_side((even(half, size=heads.size), half), (even(half, size=heads.size), half))
    return even(layer.out_features, size=heads.size)


def _entering(block: Block) -> Any:
    """Before a block, because attention shapes its heads after the block's own input."""

    def hook(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        if arguments:
            return (block.enter(arguments[0]), *arguments[1:]), keywords
        return arguments, {**keywords, "hidden_states": block.enter(keywords["hidden_states"])}

    return hook


def _tell_heads(block: Any, heads: Heads) -> None:
    """To attention modules that count heads instead of looking at what they are given."""
    if not hasattr(block, "num_key_value_groups"):
        return
    block.num_key_value_groups = heads.local // heads.local_kv
    if hasattr(block, "num_key_value_heads"):  # Phi-3 cuts its packed projection by numbers of the config
        block.num_key_value_heads = heads.local_kv
        block.config = _with_heads(block.config, heads)


def _with_heads(config: Any, heads: Heads) -> Any:
    class LocalHeads:
        """The model's config, but for the number of heads; what is set on the model later is seen here too."""

        num_attention_heads, num_key_value_heads = heads.local, heads.local_kv

        def __getattr__(self, name: str) -> Any:
            return getattr(config, name)

    return LocalHeads()


def _sum_over(module: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Each rank of `group` holds a copy of the module's parameters and sees a part of what they act on."""
    assert group is not None
    for parameter in module.parameters(recurse=False):
        parameter.summed_over = group  # type: ignore[attr-defined]


def _sum_what_sees_a_part_of_the_sequence(model: Any, tensor: TensorGroup) -> None:
    """Norms, and the biases that are added after a block."""
    for parameter in model.parameters():
        if not hasattr(parameter, "tensor_slice") and not hasattr(parameter, "summed_over"):
            parameter.summed_over = tensor.group


def _mark_copies(model: Any, *, counts: bool) -> None:
    for parameter in model.parameters():
        if not hasattr(parameter, "tensor_slice"):
            parameter.tensor_model_parallel = counts
