"""torch's FlashAttention on a GPU gives what plain products give: every kind of rectangle, grouped queries, gradients."""

import pytest
import torch

from fourfold.context.kernels.cuda import CudaKernel
from fourfold.context.kernels.kernel import Spec
from fourfold.context.kernels.plain import PlainKernel
from fourfold.context.rectangles import Rectangle

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

RECTANGLES = [
    Rectangle(0, 96, 0, 96, "causal", 0),
    Rectangle(0, 96, 0, 160, "full", 200),
    Rectangle(0, 96, 0, 128, "band", 32),  # ends with the diagonal
    Rectangle(0, 64, 0, 128, "band", 100),  # lies before it
]
SPEC = Spec(0.125, window=120)


@pytest.mark.parametrize("one", RECTANGLES, ids=lambda one: f"{one.kind}-{one.offset}")
def test_cuda_kernel_equals_plain_products(one: Rectangle) -> None:
    torch.manual_seed(0)
    q, grad = (torch.randn(2, 8, one.q1, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(2, 2, one.k1, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    wide = [tensor.double() for tensor in (q, k, v, grad)]
    out, lse = CudaKernel().forward(q, k, v, one, SPEC)
    want, want_lse = PlainKernel().forward(*wide[:3], one, SPEC)
    torch.testing.assert_close(out.double(), want, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-2, atol=1e-2)
    found = CudaKernel().backward(grad, q, k, v, out, lse, one, SPEC)
    exact = PlainKernel().backward(wide[3], *wide[:3], want, want_lse, one, SPEC)
    for got, truth in zip(found, exact, strict=True):
        assert float((got.double() - truth).norm() / truth.norm()) < 2e-2
