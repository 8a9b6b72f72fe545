"""FlashAttention on a GPU, torch's own and the flash-attn package's, gives what plain products give: every kind of
rectangle, grouped queries, soft-caps where it has them, gradients."""

import pytest
import torch

from fourfold.context.kernels.cuda import CudaKernel
from fourfold.context.kernels.flash import installed
from fourfold.context.kernels.kernel import Kernel, Spec
from fourfold.context.kernels.plain import PlainKernel
from fourfold.context.rectangles import Rectangle

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

RECTANGLES = [
    Rectangle(0, 96, 0, 96, "causal", 0),
    Rectangle(0, 96, 0, 160, "full", 200),
    Rectangle(0, 96, 0, 128, "band", 32),  # ends with the diagonal
    Rectangle(0, 64, 0, 128, "band", 100),  # lies before it
    Rectangle(0, 128, 0, 90, "band", 80),  # more queries than keys
]


@pytest.mark.parametrize("one", RECTANGLES, ids=lambda one: f"{one.kind}-{one.offset}")
def test_torch_equals_plain_products(one: Rectangle) -> None:
    check(CudaKernel(), one, Spec(0.125, window=120))


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("one", RECTANGLES, ids=lambda one: f"{one.kind}-{one.offset}")
def test_flash_attn_equals_plain_products(one: Rectangle, softcap: float | None) -> None:
    kernel = installed(torch.cuda.get_device_capability()[0])
    if kernel is None:
        pytest.skip("needs flash-attn")
    check(kernel, one, Spec(0.125, window=120, softcap=softcap))


def check(kernel: Kernel, one: Rectangle, spec: Spec) -> None:
    torch.manual_seed(0)
    q, grad = (torch.randn(2, 8, one.q1, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(2, 2, one.k1, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    wide = [tensor.double() for tensor in (q, k, v, grad)]
    out, lse = kernel.forward(q, k, v, one, spec)
    want, want_lse = PlainKernel().forward(*wide[:3], one, spec)
    torch.testing.assert_close(out.double(), want, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-2, atol=1e-2)
    found = kernel.backward(grad, q, k, v, out, lse, one, spec)
    exact = PlainKernel().backward(wide[3], *wide[:3], want, want_lse, one, spec)
    for got, truth in zip(found, exact, strict=True):
        assert float((got.double() - truth).norm() / truth.norm()) < 2e-2
