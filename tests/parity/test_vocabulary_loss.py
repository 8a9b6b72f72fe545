"""The vocabulary-parallel loss against cross-entropy of all logits in float64: loss and gradients to 1e-12."""

import dataclasses
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.model.build import LossHead
from fourfold.model.cross_entropy import IGNORED, linear_cross_entropy
from tests.parity.vocabulary_loss_ranks import TOKENS, Case, Largest, objective, parts, sliced, textbook
from tests.pool import RankPool

HOLES = (0, 5, 6, 7, 8, 9, 20)  # of chunks of 5 tokens, the second and the last (one token) have no label at all
CHUNKS = (1, 5, TOKENS + 7)
CASES = [
    Case(vocabulary, chunk, softcap=softcap, ignored=ignored)
    for vocabulary, chunk, softcap, ignored in itertools.product((24, 37, 9), CHUNKS, (None, 3.0), ((), HOLES))
]


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def check(case: Case, found: list[tuple[Tensor, Tensor, Tensor, dict[str, int]]], *, within: float) -> None:
    loss, d_hidden, d_weight = textbook(case)
    world = len(found)
    for rank, (got, _, part, _) in enumerate(found):
        first, count, _ = case.held(rank=rank, world=world)
        assert torch.equal(got, found[0][0]), "ranks disagree"
        assert abs(float(got) - float(loss)) < within * float(loss), (case, rank)
        assert not part[count:].any(), "padding has a gradient"
        difference = (part[:count] - d_weight[first : first + count]).abs()
        assert float(difference.amax() if count else 0.0) < within * float(d_weight.abs().max()), (case, rank)
    assert relative(torch.stack([one[1] for one in found]).sum(0), d_hidden) < within, case


@pytest.mark.parametrize("world", [2, 3, 4])
def test_exact(ranks: RankPool, world: int) -> None:
    """Nine rows on four ranks leave none to the last, 37 are not divisible by any."""
    for case, found in zip(CASES, zip(*ranks.run(world, parts, cases=CASES), strict=True), strict=True):
        check(case, list(found), within=1e-12)


def test_one_rank_is_exact() -> None:
    for case in CASES:
        check(case, [(*sliced(case, rank=0, world=1), {})], within=1e-12)


def test_three_numbers_a_token(ranks: RankPool) -> None:
    whole = [Case(37, chunk, dtype=torch.float32, ignored=(5, 6)) for chunk in (4, 5, 100)]
    holes = Case(37, 5, dtype=torch.float32, ignored=HOLES)
    for found in ranks.run(2, parts, cases=[*whole, holes]):
        *sent, without = [one[3] for one in found]
        assert sent == [{"loss": 12 * TOKENS}] * 3
        assert without == {"loss": 12 * (TOKENS - 6)}, "a chunk without labels is exchanged"


@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_has_the_size_of_all_logits(softcap: float | None, dtype: torch.dtype) -> None:
    case = Case(500, 16, softcap=softcap, tokens=256, hidden=24, dtype=dtype)
    hidden, weight, labels = (one.requires_grad_(one.is_floating_point()) for one in case.tensors())
    with Largest() as largest:
        objective(call(case, hidden, weight, labels)).backward()
    assert largest.elements == max(16 * 500, 256 * 24, 500 * 24)


@pytest.mark.parametrize("world", [1, 2])
def test_bf16_is_no_worse_than_torch(ranks: RankPool, world: int) -> None:
    """Also 64 chunks of ours against one of theirs, which adds up chunks of a weight's gradient in bf16."""
    case = Case(50, 8, tokens=512, hidden=64, dtype=torch.bfloat16)
    loss, d_hidden, d_weight = textbook(case)
    hidden, weight, labels = case.tensors()
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=512, chunking_method=None)
    theirs = F.linear_cross_entropy(hidden, weight, labels, reduction="sum", options=options).float()
    objective(theirs).backward()
    assert hidden.grad is not None and weight.grad is not None  # noqa: PT018
    found = [one[0] for one in ranks.run(world, parts, cases=[case])]
    assert abs(float(found[0][0] - loss)) <= 1.5 * abs(float(theirs.detach() - loss))
    ours = torch.stack([one[1].double() for one in found]).sum(0), torch.cat([one[2] for one in found])
    for got, other, want in zip(ours, (hidden.grad, weight.grad), (d_hidden, d_weight), strict=True):
        assert relative(got, want) <= 1.5 * relative(other, want)


def call(case: Case, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return linear_cross_entropy(
        hidden,
        weight,
        labels,
        group=None,
        first=0,
        count=len(weight),
        softcap=case.softcap,
        chunk_size=case.chunk_size,
    )


def test_a_soft_capped_head_holds_no_logits_either() -> None:
    case = Case(500, 16, softcap=30.0, tokens=256, hidden=24, dtype=torch.float32)
    hidden, weight, labels = case.tensors()
    linear = nn.Linear(24, 500, bias=False)
    linear.weight = nn.Parameter(weight)
    head = LossHead(linear, softcap=30.0, chunk_size=16)
    with Largest() as largest:
        loss = head(hidden.requires_grad_().view(2, 128, 24), labels.view(2, 128))
        objective(loss).backward()
    assert largest.elements == 500 * 24
    want = textbook(case)
    assert linear.weight.grad is not None and hidden.grad is not None  # noqa: PT018
    for got, exact in zip((loss.detach(), hidden.grad, linear.weight.grad), want, strict=True):
        assert relative(got, exact) < 1e-5


def test_without_gradients_only_the_loss_is_made() -> None:
    case = Case(500, 16, softcap=30.0, tokens=64, hidden=128)
    hidden, weight, labels = case.tensors()
    with torch.no_grad(), Largest() as largest:
        loss = call(case, hidden.requires_grad_(), weight.requires_grad_(), labels)
    assert torch.equal(loss, sliced(case, rank=0, world=1)[0])
    assert not loss.requires_grad
    assert largest.elements == 500 * 128, "the weight itself, seen transposed"
    assert "exp_" in largest.names
    assert not largest.names & {"zeros_like", "scatter_add_", "addcmul", "addmm_"}


def test_a_frozen_weight_has_no_gradient() -> None:
    case = Case(37, 5)
    hidden, weight, labels = case.tensors()
    objective(call(case, hidden.requires_grad_(), weight, labels)).backward()
    assert hidden.grad is not None
    assert relative(hidden.grad, textbook(case)[1]) < 1e-12
    assert weight.grad is None


def test_a_label_outside_of_the_vocabulary_does_not_pass_for_a_good_one() -> None:
    hidden, weight, labels = Case(37, 5).tensors()
    labels[3] = 37
    assert call(Case(37, 5), hidden, weight, labels).isinf()


@pytest.mark.parametrize("ignored", [(), tuple(range(TOKENS))])
def test_nothing_to_learn(ignored: tuple[int, ...]) -> None:
    case = dataclasses.replace(Case(37, 5), ignored=ignored, tokens=len(ignored))
    hidden, weight, labels = case.tensors()
    assert set(labels.tolist()) <= {IGNORED}
    loss = call(case, hidden.requires_grad_(), weight.requires_grad_(), labels)
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert weight.grad is not None
    assert not weight.grad.any()


def test_a_second_backward_pass_is_refused() -> None:
    hidden, weight, labels = Case(37, 5).tensors()
    loss = call(Case(37, 5), hidden.requires_grad_(), weight.requires_grad_(), labels)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second backward pass"):
        loss.backward()
