"""Peak rates of accelerators, from hardware.csv beside this file (each row with its source). Imports no torch.

A peak is the vendor's dense figure, without sparsity. Names are matched whole, never in part: a PCIe, NVL or
power-capped card, or a MIG slice, shares the beginning of its name with a faster one. What the table does not name
(CPUs too) has no peak; callers then print FLOP/s and no percentage.
"""

import csv
from dataclasses import dataclass
from importlib.resources import files

from fourfold.schema import Precision


@dataclass(frozen=True)
class Accelerator:
    """One row; rates in FLOP/s, None where the row has no figure with a source."""

    device: str
    torch_names: tuple[str, ...]  # what torch.cuda.get_device_name() says
    bf16_flops: float | None  # dense
    fp32_flops: float | None  # dense, no TF32: torch's default for float32 products
    hbm_gb: float  # as the vendor prints it: GB of 1e9, GiB for Trainium
    source: str


def accelerators() -> list[Accelerator]:
    """All rows of the table, in order."""
    with files("fourfold.planner").joinpath("hardware.csv").open(encoding="utf-8") as handle:
        return [_accelerator(row) for row in csv.DictReader(handle)]


def find(device_name: str) -> Accelerator | None:
    """The row of this device by the table's own name or by torch's; case and spaces at the ends do not matter."""
    wanted = device_name.strip().casefold()
    for row in accelerators():
        if wanted in (name.casefold() for name in (row.device, *row.torch_names)):
            return row
    return None


def peak_flops(device_name: str, precision: str) -> float | None:
    """FLOP/s of one device for dense products in `precision` (bf16, fp16 or fp32); None where the table has no entry."""
    row = find(device_name)
    if row is None:
        return None
    return row.fp32_flops if Precision(precision) == Precision.fp32 else row.bf16_flops


def _accelerator(row: dict[str, str]) -> Accelerator:
    return Accelerator(
        device=row["device"],
        torch_names=tuple(name for name in row["torch_names"].split("|") if name),
        bf16_flops=_tera(row["bf16_dense_tflops"]),
        fp32_flops=_tera(row["fp32_tflops"]),
        hbm_gb=float(row["hbm_gb"]),
        source=row["source"],
    )


def _tera(figure: str) -> float | None:
    return float(figure) * 1e12 if figure else None
