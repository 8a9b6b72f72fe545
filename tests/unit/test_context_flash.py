"""The kernel of the flash-attn package calls it as its versions want to be called, which doubles of them show without a
GPU (tests/gpu has the package itself): every kind of rectangle, soft-caps, gradients; versions it does not know."""

import sys
from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from fourfold.context import select
from fourfold.context.kernels.cuda import CudaKernel
from fourfold.context.kernels.flash import FlashKernel, installed
from fourfold.context.kernels.kernel import Spec
from fourfold.context.kernels.plain import PlainKernel
from fourfold.context.rectangles import Rectangle, rectangles
from tests.unit.flash_doubles import flash_attn_2, flash_attn_3, old_flash_attn_2
from tests.unit.test_context_select import config, model

RECTANGLES = [
    Rectangle(0, 24, 0, 24, "causal", 0),
    Rectangle(0, 24, 0, 40, "full", 50),
    Rectangle(0, 40, 0, 24, "full", 50),
    Rectangle(0, 24, 0, 32, "band", 8),  # ends with the diagonal
    Rectangle(0, 16, 0, 32, "band", 25),  # lies before it
    Rectangle(0, 24, 0, 20, "band", 20),  # more queries than keys
]
VERSIONS = {"2": (8, flash_attn_2), "3": (9, flash_attn_3)}


@pytest.fixture
def put(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """The given modules are all of flash-attn that can be imported."""

    def put(*modules: ModuleType) -> None:
        for name in ("flash_attn", "flash_attn.flash_attn_interface", "flash_attn_interface"):
            monkeypatch.setitem(sys.modules, name, None)
        for module in modules:
            monkeypatch.setitem(sys.modules, module.__name__, module)
            if "." in module.__name__:
                monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))

    return put


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("version", VERSIONS)
def test_gives_what_plain_products_give(put: Callable[..., None], version: str, softcap: float | None) -> None:
    capability, make = VERSIONS[version]
    put(make())
    kernel = installed(capability)
    assert kernel is not None
    assert version in kernel.name
    spec = Spec(0.3, window=36, softcap=softcap)
    for one in [*RECTANGLES, *rectangles([(60, 100)], [(30, 60)], documents=[(0, 100)], window=36)]:
        q0, q1, k0, k1 = one[:4]
        generator = torch.Generator().manual_seed(1)
        q, grad, out = (torch.randn(2, 4, q1 - q0, 8, generator=generator) for _ in range(3))
        k, v = (torch.randn(2, 2, k1 - k0, 8, generator=generator) for _ in range(2))
        for got, want in zip(
            kernel.forward(q, k, v, one, spec), PlainKernel().forward(q, k, v, one, spec), strict=True
        ):
            torch.testing.assert_close(got, want, msg=str(one))
        lse = PlainKernel().forward(q, k, v, one, spec)[1] + 0.5  # final: other keys count too
        found = kernel.backward(grad, q, k, v, out, lse, one, spec)
        for got, want in zip(found, PlainKernel().backward(grad, q, k, v, out, lse, one, spec), strict=True):
            torch.testing.assert_close(got, want, msg=str(one), rtol=1e-4, atol=1e-5)


def test_a_gpu_gets_the_version_for_it(put: Callable[..., None]) -> None:
    put(flash_attn_2(), flash_attn_3())
    names = [kernel.name if (kernel := installed(capability)) else None for capability in (7, 8, 9, 10)]
    assert [name and name[len("FlashAttention-")] for name in names] == [None, "2", "3", "2"]


def test_unknown_versions_are_passed_over(put: Callable[..., None]) -> None:
    put()
    assert installed(9) is None
    put(old_flash_attn_2(), ModuleType("flash_attn_interface"))
    assert installed(9) is None


def test_which_runs_on_cuda_get_it(put: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    half, single = config("precision=bf16"), config("precision=fp32")

    def kernel(run: object, **more: object) -> type:
        wanted = model(8, 2, **more)
        return type(select.choose_kernel(run, model_config=wanted, device=torch.device("cuda")))  # type: ignore[arg-type]

    put()
    assert kernel(half) is CudaKernel
    assert kernel(half, attn_logit_softcapping=50.0) is PlainKernel
    put(flash_attn_2())
    assert kernel(half) is kernel(half, attn_logit_softcapping=50.0) is FlashKernel
    assert kernel(half, head_dim=36) is kernel(half, head_dim=512) is kernel(single) is PlainKernel
