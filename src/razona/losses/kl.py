"""Estimators of KL(pi || ref) from tokens sampled from pi, per token: ``[B, T]`` (Schulman, "Approximating
KL").

With ``u = ref_logprobs - logprobs``. In value, k1 and k3 are unbiased. As a *loss term* their gradients
differ: k1's is 0 in expectation (useless), k2's and ``kl_k3_weighted``'s are those of KL(pi || ref), plain
k3's that of KL(ref || pi). u is clamped to +-20, as verl does: a log-prob of -inf leaves the loss
finite and has no gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from razona.losses.policy import MAX_LOG_RATIO, ratio

KLFn = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def kl_k1(logprobs: Tensor, ref_logprobs: Tensor, loss_mask: Tensor | None = None) -> Tensor:
    """``-u``: unbiased, high variance, may be negative."""
    return -_log_ratio(logprobs, ref_logprobs, loss_mask)


def kl_k2(logprobs: Tensor, ref_logprobs: Tensor, loss_mask: Tensor | None = None) -> Tensor:
    """``u^2 / 2``: biased in value, but its gradient is that of KL(pi || ref)."""
    return _log_ratio(logprobs, ref_logprobs, loss_mask).square() / 2


def kl_k3(logprobs: Tensor, ref_logprobs: Tensor, loss_mask: Tensor | None = None) -> Tensor:
    """``e^u - u - 1 >= 0``: unbiased in value, low variance (arXiv 2402.03300 eq. 4)."""
    u = _log_ratio(logprobs, ref_logprobs, loss_mask)
    return torch.expm1(u) - u


def kl_k3_weighted(logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor, loss_mask: Tensor) -> Tensor:
    """k3 times the probability ratio pi / pi_old, which is differentiated too (arXiv 2512.02556,
    DeepSeek-V3.2).
    """
    return ratio(logprobs, old_logprobs, loss_mask) * kl_k3(logprobs, ref_logprobs, loss_mask)


KL_ESTIMATORS: dict[str, KLFn] = {
    "k1": lambda logprobs, ref, old, mask: kl_k1(logprobs, ref, mask),
    "k2": lambda logprobs, ref, old, mask: kl_k2(logprobs, ref, mask),
    "k3": lambda logprobs, ref, old, mask: kl_k3(logprobs, ref, mask),
    "k3_weighted": kl_k3_weighted,
}
"""By name, all called as (logprobs, ref_logprobs, old_logprobs, loss_mask)."""


def _log_ratio(logprobs: Tensor, ref_logprobs: Tensor, loss_mask: Tensor | None) -> Tensor:
    u = ref_logprobs - logprobs
    if loss_mask is not None:
        u = torch.where(loss_mask, u, 0.0)
    return u.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
