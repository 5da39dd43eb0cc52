"""The head in chunks against a plain log-softmax: values and gradients, kept and recomputed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from razona.models import head as head_module
from razona.models.head import CHUNK, Head

HIDDEN, VOCAB = 12, 37
TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}


def plain(head: Head, hidden: Tensor, target: Tensor, temperature: float) -> Tensor:
    logits = head.projection(hidden).float() * head.scale
    if head.softcap is not None:
        logits = torch.tanh(logits / head.softcap) * head.softcap
    return (logits / temperature).log_softmax(-1).gather(1, target[:, None])[:, 0]


def problem(rows: int, *, bias: bool, sharpness: float = 1.0) -> tuple[nn.Linear, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    projection = nn.Linear(HIDDEN, VOCAB, bias=bias)
    with torch.no_grad():
        for parameter in projection.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * sharpness)
    hidden = torch.randn(rows, HIDDEN, generator=generator, requires_grad=True)
    target = torch.randint(VOCAB, (rows,), generator=generator)
    incoming = torch.randn(rows, generator=generator)  # of either sign, as advantages are
    return projection, hidden, target, incoming


@pytest.fixture(params=["kept", "recomputed"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "recomputed":
        monkeypatch.setattr(head_module, "KEPT_BYTES", 0)
    return request.param  # type: ignore[no-any-return]


@pytest.mark.parametrize("rows", [1, 2, 7, 257])
@pytest.mark.parametrize(
    ("softcap", "scale", "temperature", "bias"),
    [(None, 1.0, 1.0, False), (None, 1.0, 0.7, True), (3.0, 1.0, 1.0, False), (5.0, 0.25, 1.3, True)],
)
def test_against_a_plain_log_softmax(
    path: str, rows: int, softcap: float | None, scale: float, temperature: float, bias: bool
) -> None:
    projection, hidden, target, incoming = problem(rows, bias=bias)
    head = Head(projection, softcap=softcap, scale=scale)
    found = head.logprobs(hidden, target, temperature=temperature)
    expected = plain(head, hidden, target, temperature)
    assert found.dtype == torch.float32 and found.shape == (rows,)
    torch.testing.assert_close(found, expected, **TOLERANCE)
    leaves = [hidden, *projection.parameters()]
    slopes = torch.autograd.grad((found * incoming).sum(), leaves)
    for slope, wanted in zip(slopes, torch.autograd.grad((expected * incoming).sum(), leaves), strict=True):
        assert wanted.abs().max() > 0.01
        torch.testing.assert_close(slope, wanted, atol=1e-5 * wanted.abs().max().item(), rtol=1e-5)


def test_both_paths_give_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    projection, hidden, target, incoming = problem(CHUNK + 3, bias=True)
    leaves = [hidden, *projection.parameters()]
    slopes = []
    for kept in (2**20, 0):
        monkeypatch.setattr(head_module, "KEPT_BYTES", kept)
        found = Head(projection).logprobs(hidden, target, temperature=0.7)
        slopes.append(torch.autograd.grad((found * incoming).sum(), leaves))
    for left, right in zip(*slopes, strict=True):
        torch.testing.assert_close(left, right, atol=1e-5 * right.abs().max().item(), rtol=1e-5)


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the limit the backward pass needs no second product; beyond, it makes one."""
    projection, hidden, target, _ = problem(5, bias=False)
    products: list[int] = []
    project = Head.project

    def counted(self: Head, rows: Tensor) -> Tensor:
        products.append(len(rows))
        return project(self, rows)

    monkeypatch.setattr(Head, "project", counted)
    for limit, again in ((5 * VOCAB * 4, []), (5 * VOCAB * 4 - 1, [5])):
        monkeypatch.setattr(head_module, "KEPT_BYTES", limit)
        loss = Head(projection).logprobs(hidden, target, temperature=1.0).sum()
        products.clear()
        loss.backward()
        assert products == again


def test_a_second_backward_pass_gives_the_same(path: str) -> None:
    projection, hidden, target, incoming = problem(7, bias=True)
    leaves = [hidden, *projection.parameters()]
    loss = (Head(projection).logprobs(hidden, target, temperature=0.7) * incoming).sum()
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    for left, right in zip(first, torch.autograd.grad(loss, leaves), strict=True):
        torch.testing.assert_close(left, right, **TOLERANCE)


def test_only_the_gradients_that_are_wanted(path: str) -> None:
    projection, hidden, target, incoming = problem(7, bias=True)
    projection.requires_grad_(False)
    (slope,) = torch.autograd.grad(
        (Head(projection).logprobs(hidden, target, temperature=1.0) * incoming).sum(), hidden
    )
    (wanted,) = torch.autograd.grad((plain(Head(projection), hidden, target, 1.0) * incoming).sum(), hidden)
    torch.testing.assert_close(slope, wanted, **TOLERANCE)
    projection.weight.requires_grad_(True)
    leaf = projection.weight
    fixed = hidden.detach()
    (slope,) = torch.autograd.grad(
        (Head(projection).logprobs(fixed, target, temperature=1.0) * incoming).sum(), leaf
    )
    (wanted,) = torch.autograd.grad((plain(Head(projection), fixed, target, 1.0) * incoming).sum(), leaf)
    torch.testing.assert_close(slope, wanted, **TOLERANCE)


def test_no_row_at_all(path: str) -> None:
    projection, hidden, target, _ = problem(3, bias=True)
    found = Head(projection).logprobs(hidden[:0], target[:0], temperature=1.0)
    assert found.shape == (0,)
    found.sum().backward()
    assert projection.weight.grad is not None and not projection.weight.grad.any()


@pytest.mark.parametrize("rows", [1, 9, 257])
def test_bf16_stays_near_fp32(path: str, rows: int) -> None:
    projection, hidden, target, incoming = problem(rows, bias=False)
    projection.bfloat16()
    hidden = hidden.detach().bfloat16().requires_grad_()
    found = Head(projection).logprobs(hidden, target, temperature=0.7)
    leaves = (hidden, projection.weight)
    slopes = torch.autograd.grad((found * incoming).sum(), leaves)
    exact = nn.Linear(HIDDEN, VOCAB, bias=False)
    exact.weight.data.copy_(projection.weight)
    wide = hidden.detach().float().requires_grad_()
    expected = plain(Head(exact), wide, target, 0.7)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, atol=0.1, rtol=0.01)
    for slope, wanted in zip(
        slopes, torch.autograd.grad((expected * incoming).sum(), (wide, exact.weight)), strict=True
    ):
        assert slope.dtype == torch.bfloat16
        error = (slope.float() - wanted).norm() / wanted.norm()
        assert error < 0.02


@pytest.mark.parametrize("margin", [3.0, 6.0, 9.0, 12.0])
def test_a_near_certain_token_keeps_the_digits_of_its_gradient(path: str, margin: float) -> None:
    """At p = 1 - 1e-5 the gradient is 1e-5, not the 0 or 0.004 that 1 - p rounded in bf16 would give."""
    projection = nn.Linear(2, 3, bias=False).bfloat16()
    projection.weight.data = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]], dtype=torch.bfloat16)
    hidden = torch.tensor([[margin, 0.0]] * 3, dtype=torch.bfloat16, requires_grad=True)
    found = Head(projection).logprobs(hidden, torch.zeros(3, dtype=torch.long), temperature=1.0)
    (slope,) = torch.autograd.grad(found.sum(), hidden)
    wide = torch.tensor([margin, 0.0, 0.0], dtype=torch.float64)
    missing = (2 * torch.exp(-wide[0]) / (1 + 2 * torch.exp(-wide[0]))).item()  # 1 - p, exactly
    assert slope[:, 0].tolist() == pytest.approx([missing] * 3, rel=0.01)
    assert slope[:, 1].tolist() == pytest.approx([-missing] * 3, rel=0.01)


def test_logits_for_sampling() -> None:
    projection, hidden, _, _ = problem(4, bias=True)
    head = Head(projection, softcap=2.0, scale=0.5)
    expected = torch.tanh(projection(hidden) * 0.5 / 2.0) * 2.0
    torch.testing.assert_close(head.logits(hidden), expected, **TOLERANCE)
    torch.testing.assert_close(head.logits(hidden[:1]), expected[:1], **TOLERANCE)


@pytest.mark.parametrize("rows", [1, 7, 257])
@pytest.mark.parametrize(("softcap", "temperature"), [(None, 1.0), (3.0, 0.7)])
def test_what_is_noted_beside_the_log_probs(
    path: str, rows: int, softcap: float | None, temperature: float
) -> None:
    """Whether the target is the most probable token, and the entropy; with a logit of -inf too."""
    projection, hidden, target, incoming = problem(rows, bias=True, sharpness=0.5)
    head = Head(projection, softcap=softcap)
    logits = head.finish(projection(hidden), temperature=temperature).detach()
    target[::2] = logits.argmax(-1)[::2]
    notes = torch.full((2, rows), torch.nan)
    found = head.logprobs(hidden, target, temperature=temperature, token_stats=notes)
    expected = torch.distributions.Categorical(logits=logits).entropy()
    assert torch.equal(notes[0] == 1, logits.argmax(-1) == target)
    torch.testing.assert_close(notes[1], expected, **TOLERANCE)
    without = head.logprobs(hidden, target, temperature=temperature)
    assert torch.equal(found, without)
    slopes = [torch.autograd.grad((lp * incoming).sum(), hidden)[0] for lp in (found, without)]
    assert torch.equal(*slopes)
    if softcap is None:
        with torch.no_grad():
            projection.bias[3] = -torch.inf
        head.logprobs(hidden, torch.zeros_like(target), temperature=temperature, token_stats=notes)
        assert notes[1].isfinite().all()
