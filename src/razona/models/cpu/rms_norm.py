"""RMS norms with the arithmetic of transformers' modules, bit for bit, and less around it.

Stock autograd keeps an fp32 copy of a norm's input and the normalised values beside it; this keeps the input.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def patch_rms_norms(model: nn.Module, undo: ExitStack) -> None:
    """Replaces the forward pass of every RMS norm whose result is this one's bit for bit, until ``undo``."""
    alike: dict[type, bool] = {}
    for module in model.modules():
        kind = type(module)
        if kind.__name__.endswith("RMSNorm") and isinstance(getattr(module, "variance_epsilon", None), float):
            if kind not in alike:
                alike[kind] = _is_plain(module)
            if alike[kind]:
                module.__dict__["forward"] = partial(_norm, module)  # before the class's own
                undo.callback(module.__dict__.pop, "forward", None)


def _norm(module: nn.Module, x: Tensor) -> Tensor:
    weight, eps = module.weight, module.variance_epsilon
    if torch.is_grad_enabled():
        return _RMSNorm.apply(x, weight, eps)  # type: ignore[no-any-return, no-untyped-call]
    return _forward(x, weight, eps)  # type: ignore[arg-type]


def _forward(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x.device.type != "cpu":
        return weight * F.rms_norm(x, x.shape[-1:], None, eps)
    full = x.float()  # what F.rms_norm does, in fewer steps
    squares = (full * full).sum(-1, keepdim=True)
    r = torch.rsqrt(torch.addcdiv(_scalar(eps), squares, _scalar(x.shape[-1])))
    return weight * (full * r).to(x.dtype)


@cache
def _scalar(value: float) -> Tensor:
    with torch.inference_mode(False):  # it may be asked for in that mode and then used by autograd
        return torch.tensor(float(value))


@torch.no_grad()
def _is_plain(module: nn.Module) -> bool:
    weight: Tensor = module.weight  # type: ignore[assignment]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, weight.numel(), generator=generator).to(weight)
    other = torch.randn(weight.numel(), generator=generator).to(weight)
    expected = torch.func.functional_call(module, {"weight": other}, (x,))
    return torch.equal(expected, _forward(x, other, module.variance_epsilon))  # type: ignore[arg-type]


class _RMSNorm(torch.autograd.Function):
    """``weight * (x / sqrt(mean(x^2) + eps))``, the quotient rounded to x's dtype, as transformers does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return _forward(x, weight, eps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        """With n = x r and r = 1 / sqrt(mean(x^2) + eps): dx = r (g w - n mean(g w n)), dw = sum(g n)."""
        x, weight = ctx.saved_tensors
        full, g, w = (
            x.float(),
            grad.float(),
            weight.float(),
        )  # not to be written to: in fp32 these are no copies
        r = (torch.linalg.vecdot(full, full)[..., None] / x.shape[-1] + ctx.eps).rsqrt()
        n = full * r
        gn = g * n
        grad_weight = gn.flatten(0, -2).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        along = (gn @ w)[..., None] / x.shape[-1]
        return (g * w).addcmul_(n, along, value=-1).mul_(r).to(x.dtype), grad_weight, None
