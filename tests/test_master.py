"""Backward passes of ours: what goes straight into an fp32 sum, and that none writes to what it was given."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from razona.batch import Span
from razona.models import head as heads
from razona.models.cpu.llama import _Embedding
from razona.models.cpu.rms_norm import _RMSNorm
from razona.models.flat import AttentionOptions, FlatLayout, _TreeAttention
from razona.models.head import Head
from razona.models.master import follow, gradient_sum, unfollow


def bf16_linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(8, 11, bias=False).bfloat16()


def head_backward(linear: nn.Linear) -> Tensor:
    """Gradient of the hidden states; that of the weight goes where it belongs."""
    torch.manual_seed(1)
    hidden = torch.randn(6, 8).bfloat16().requires_grad_()
    logprobs = Head(linear).logprobs(hidden, torch.tensor([0, 10, 3, 4, 9, 4]), temperature=1.0)
    (logprobs * torch.linspace(-1, 2, 6)).sum().backward()
    assert hidden.grad is not None
    return hidden.grad


@pytest.mark.parametrize("kept_bytes", [0, 2**20])
def test_the_heads_gradient_in_its_sum(monkeypatch: pytest.MonkeyPatch, kept_bytes: int) -> None:
    monkeypatch.setattr(heads, "KEPT_BYTES", kept_bytes)
    monkeypatch.setattr(heads, "VOCABULARY_STEP", 4)  # does not divide the vocabulary
    plain, followed = bf16_linear(), bf16_linear()
    master = nn.Parameter(followed.weight.detach().float())
    follow(followed.weight, master)
    expected = head_backward(plain)
    assert torch.equal(head_backward(followed), expected)
    assert plain.weight.grad is not None and followed.weight.grad is None and master.grad is not None
    assert master.grad.any(1).all() and torch.equal(master.grad, plain.weight.grad.float())
    head_backward(followed)
    assert torch.equal(master.grad, 2 * plain.weight.grad.float())


def test_a_parameter_without_master_is_autograds_matter() -> None:
    linear = bf16_linear()
    assert gradient_sum(linear.weight) is None
    master = nn.Parameter(linear.weight.detach().float())
    handle = follow(linear.weight, master)
    assert gradient_sum(linear.weight) is master.grad
    unfollow(linear.weight, handle)
    assert gradient_sum(linear.weight) is None
    head_backward(linear)
    assert linear.weight.grad is not None and not master.grad.any()  # type: ignore[union-attr]


@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize("has_master", [False, True])
def test_the_embeddings_gradient(padding: int | None, has_master: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Embedding(7, 4, padding_idx=padding)
    ours = nn.Embedding(7, 4, padding_idx=padding)
    ours.load_state_dict(plain.state_dict())
    if has_master:
        master = nn.Parameter(ours.weight.detach().clone())
        follow(ours.weight, master)
    tokens, grad = torch.tensor([1, 3, 1, 6]), torch.randn(4, 4)
    plain(tokens).backward(grad)
    out = _Embedding.apply(ours.weight, tokens, ours)
    assert torch.equal(out, plain(tokens))
    out.backward(grad)
    found = master.grad if has_master else ours.weight.grad
    assert has_master == (ours.weight.grad is None)
    torch.testing.assert_close(found, plain.weight.grad)


def norm_case() -> tuple[list[Tensor], Callable[..., Tensor]]:
    return [torch.randn(5, 8), torch.randn(8)], lambda x, w: _RMSNorm.apply(x, w, 1e-6)


def attention_case() -> tuple[list[Tensor], Callable[..., Tensor]]:
    row: Any = SimpleNamespace(spans=[Span(0, 3, (4, 2), 0)])
    layout = FlatLayout(row, exact=False)
    options = AttentionOptions(None, None, None)
    inputs = [torch.randn(9, 4, 8), torch.randn(9, 2, 8), torch.randn(9, 2, 8)]
    return inputs, lambda q, k, v: _TreeAttention.apply(q, k, v, layout, options)


def head_case() -> tuple[list[Tensor], Callable[..., Tensor]]:
    def logprobs(hidden: Tensor, weight: Tensor) -> Tensor:
        linear: Any = nn.Linear(8, 11, bias=False)
        linear.weight = nn.Parameter(weight.detach())
        call = Head(linear), 0.5, None, None
        return heads._Logprobs.apply(hidden, weight, None, torch.tensor([0, 10, 3]), *call)  # type: ignore[no-any-return, no-untyped-call]

    return [torch.randn(3, 8), torch.randn(11, 8)], logprobs


@pytest.mark.parametrize("case", [norm_case, attention_case, head_case])
def test_a_backward_pass_leaves_what_it_was_given(case: Callable[[], Any]) -> None:
    """In fp32, where a cast makes no copy."""
    torch.manual_seed(0)
    inputs, function = case()
    given = [x.requires_grad_() for x in inputs]
    before = [x.detach().clone() for x in inputs]
    out = function(*given)
    grad = torch.randn(out.shape)
    copy = grad.clone()
    torch.autograd.grad(out, given, grad)
    assert torch.equal(grad, copy)
    assert all(torch.equal(x.detach(), y) for x, y in zip(given, before, strict=True))
