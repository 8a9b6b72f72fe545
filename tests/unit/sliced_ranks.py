"""Ranks of a tensor-parallel run without a process group or layers: engines whose parameters hold slices of known tensors,
partitioned as ZeRO does, for tests of what is written and read of them."""

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fourfold.checkpoint.pieces import Pieces
from fourfold.checkpoint.save import Progress, Saver
from fourfold.layout import Layout
from fourfold.slices import Slice
from fourfold.zero.engine import ZeroEngine

KINDS = ("master", "exp_avg", "exp_avg_sq")
SHAPES = {
    "embed": [5, 6],  # vocabulary-parallel: over 4 ranks 2, 2, 1 and none of its rows
    "qkv": [16, 5],  # fused: rows of queries, keys and values
    "heads": [6, 5],  # 2 heads: over 4 ranks copies of each on two
    "down": [7, 8],  # row-parallel: columns
    "odd": [7, 12],  # columns of two fused halves
    "bias": [16],  # as qkv
    "norm": [7],
    "conv": [3, 2, 2],
    "scale": [],
}


def tensors(kind: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(KINDS.index(kind))
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def even(first: int, last: int, *, rank: int, size: int) -> tuple[int, int]:
    share = (last - first) // size
    return first + rank * share, first + (rank + 1) * share


def part_of(name: str, *, rank: int, size: int) -> Slice:
    """What `rank` of `size` holds."""
    whole = Slice.whole(torch.Size(SHAPES[name]))
    rows, columns, padding = whole.rows, whole.columns, 0
    if size == 1:
        return whole
    if name == "embed":
        share = -(-5 // size)
        first, last = min(rank * share, 5), min((rank + 1) * share, 5)
        rows, padding = ((first, last),), share - (last - first)
    elif name in ("qkv", "bias"):
        rows = tuple(even(*block, rank=rank, size=size) for block in ((0, 8), (8, 12), (12, 16)))
    elif name == "heads":
        rows = (even(0, 6, rank=rank * min(size, 2) // size, size=min(size, 2)),)
    elif name == "down":
        columns = (even(0, 8, rank=rank, size=size),)
    elif name == "odd" and size <= 2:  # over 4 whole
        columns = tuple(even(*block, rank=rank, size=size) for block in ((0, 4), (4, 12)))
    return Slice(whole.shape, rows, columns, padding)


def is_stored(name: str, *, rank: int, size: int) -> bool:
    holders = [
        other for other in range(size) if part_of(name, rank=other, size=size) == part_of(name, rank=rank, size=size)
    ]
    return holders[0] == rank


class SlicedEngine(ZeroEngine):
    """The real fragments and shapes of parameters as rank `rank` of `layout` has them; two flat buffers."""

    def __init__(self, layout: Layout, rank: int, *, dtype: torch.dtype = torch.float32) -> None:
        at = layout.coordinate(rank)
        self._shares, self._share = layout.partition_size, at["dp_shard"] * layout.cp_size + at["cp"]
        self._parts = {name: part_of(name, rank=at["tp"], size=layout.tp_size) for name in SHAPES}
        self.module = nn.ParameterDict(
            {n: nn.Parameter(torch.empty(p.local_shape(), dtype=dtype)) for n, p in self._parts.items()}
        )
        for name, parameter in self.module.items():
            parameter.tensor_slice = self._parts[name]
            parameter.tensor_model_parallel = is_stored(name, rank=at["tp"], size=layout.tp_size)
        self._names = {id(parameter): name for name, parameter in self.module.items()}
        self._groups = [[name for name in SHAPES if (len(SHAPES[name]) == 2) == matrix] for matrix in (True, False)]
        for group in range(2):
            self._partition(group)
        flat = [nn.Parameter(torch.zeros_like(buffer)) for buffer in self.wanted("master")]
        self._deepspeed = SimpleNamespace(
            module=self.module, optimizer=SimpleNamespace(single_partition_of_fp32_groups=flat)
        )
        self.optimizer: Any = SimpleNamespace(state={})

    def _partition(self, group: int) -> None:
        """Of all parameters of a group in a row, as stages 1 and 2 do: borders fall anywhere."""
        sizes = [self.module[name].numel() for name in self._groups[group]]
        share = -(-sum(sizes) // self._shares)
        first, begin = self._share * share, 0
        for name, size in zip(self._groups[group], sizes, strict=True):
            low, high = max(begin, first), min(begin + size, first + share)
            self.module[name]._hp_mapping = (
                None
                if low >= high
                else SimpleNamespace(
                    param_group_index=group,
                    hp_fragment_address=SimpleNamespace(start=low - first),
                    lp_fragment_address=SimpleNamespace(start=low - begin, numel=high - low),
                )
            )
            begin += size

    def wanted(self, kind: str) -> list[Tensor]:
        """What the flat buffers must hold."""
        whole, buffers = tensors(kind), []
        for names in self._groups:
            flat = torch.cat([self._parts[name].cut(whole[name]).reshape(-1) for name in names])
            share = -(-len(flat) // self._shares)
            buffers.append(
                torch.cat([flat, flat.new_zeros(share * self._shares - len(flat))]).split(share)[self._share]
            )
        return buffers

    def fill(self) -> None:
        for group, master in enumerate(self.masters()):
            master.data.copy_(self.wanted("master")[group])
            state = {kind: self.wanted(kind)[group].clone() for kind in KINDS[1:]}
            self.optimizer.state[master] = {"step": torch.tensor(4.0), **state}

    def held(self, kind: str) -> list[Tensor]:
        masters = self.masters()
        return [m.detach() if kind == "master" else self.optimizer.state[m][kind] for m in masters]

    def publish(self) -> None:
        pass


class Notices:
    """A board of threads of one process."""

    def __init__(self) -> None:
        self._posted: dict[str, str] = {}
        self._changed = threading.Condition()

    def post(self, key: str, value: Any) -> None:
        with self._changed:
            self._posted[key] = json.dumps(value)
            self._changed.notify_all()

    def read(self, key: str, *, of: int) -> Any:
        with self._changed:
            assert self._changed.wait_for(lambda: key in self._posted, timeout=20), (key, of)
            return json.loads(self._posted[key])


def save(folder: Path, layout: Layout, *, dtype: torch.dtype = torch.float32) -> Path:
    """The checkpoint that all ranks of `layout` write together."""
    board, said = Notices(), list[str]()
    savers = [
        _saver(folder, layout, rank, dtype=dtype, board=board, say=said.append) for rank in range(layout.world_size)
    ]
    for saver in savers:
        saver.save(Progress(step=4, rows=12))
    for saver in savers:
        saver.settle()
    assert all("written in" in line for line in said), said
    return folder / "step-00000004"


def _saver(folder: Path, layout: Layout, rank: int, *, dtype: torch.dtype, board: Any, say: Any) -> Saver:
    engine = SlicedEngine(layout, rank, dtype=dtype)
    engine.fill()
    mesh: Any = SimpleNamespace(rank=rank, layout=layout, is_main=rank == 0)
    options: dict[str, Any] = {"keep_last": None, "keep_every": None, "in_background": True}
    return Saver(folder, engine=engine, mesh=mesh, board=board, about={"run": {}}, config={}, say=say, **options)


class Reads:
    """Sizes of all reads from files."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        read = Pieces._read_piece

        def counted(pieces: Pieces, target: Tensor, *arguments: Any, **options: Any) -> None:
            self.sizes.append(len(target))
            read(pieces, target, *arguments, **options)

        monkeypatch.setattr(Pieces, "_read_piece", counted)
