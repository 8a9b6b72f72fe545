"""Peaks by the names that torch reports; a name that only looks alike has none."""

import subprocess
import sys

import pytest

from fourfold.planner.hardware import accelerators, find, peak_flops


@pytest.mark.parametrize(
    ("name", "row", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", "H100-SXM-80GB", 989.4),
        ("NVIDIA A100-SXM4-80GB", "A100-SXM-80GB", 312),
        ("NVIDIA A100-SXM4-40GB", "A100-SXM-40GB", 312),
        ("NVIDIA H200", "H200-SXM", 989),
        ("NVIDIA B200", "B200-SXM", 2250),
        ("NVIDIA GB200", "GB200-NVL72 (per GPU)", 2450),
        ("AMD Instinct MI300X", "MI300X", 1307.4),
        ("AMD Instinct MI250X", "MI250X (one die)", 191.5),
        ("MI250X", "MI250X", 383),
        ("h100-sxm-80gb", "H100-SXM-80GB", 989.4),
    ],
)
def test_known_names(name: str, row: str, tera: float) -> None:
    found = find(name)
    assert found is not None
    assert found.device == row
    assert peak_flops(name, "bf16") == tera * 1e12


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA H100 PCIe",
        "NVIDIA H100 NVL",
        "NVIDIA H200 NVL",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA A100 80GB PCIe",
        "NVIDIA A100-PCIE-40GB",
        "NVIDIA GeForce RTX 4090",
        "cpu",
        "",
    ],
)
def test_lookalikes_and_cpus_have_no_peak(name: str) -> None:
    assert peak_flops(name, "bf16") is None


def test_float32() -> None:
    assert peak_flops("NVIDIA A100-SXM4-80GB", "fp32") == 19.5e12
    assert peak_flops("NVIDIA B200", "fp32") is None  # no figure with a source


def test_table_is_sound() -> None:
    rows = accelerators()
    names = [name.casefold() for row in rows for name in (row.device, *row.torch_names)]
    assert len(names) == len(set(names))
    assert all(row.source and row.hbm_gb > 0 for row in rows)
    assert len(rows) == 26


def test_planner_starts_without_torch() -> None:
    code = (
        "import sys; from fourfold.planner import flops, hardware, memory, parameters; "
        "hardware.accelerators(); print(sorted({'torch', 'transformers', 'deepspeed'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
