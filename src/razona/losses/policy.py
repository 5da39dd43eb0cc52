"""Policy-gradient losses, per token: ``[B, T]`` in, ``[B, T]`` out, to be minimised, not reduced.

``logprobs`` are those of the trained policy, ``old_logprobs`` those of the policy the ratio is anchored to,
``advantages`` are ``[B, 1]`` or ``[B, T]`` constants, ``loss_mask`` is True on trained tokens. Where it is
False the result is exactly 0 and so is its gradient, whatever stands in the other tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0  # exp of more overflows what follows; the band is far outside every clip


def ratio(logprobs: Tensor, old_logprobs: Tensor, loss_mask: Tensor) -> Tensor:
    """Probability ratio pi / pi_old per token, ``[B, T]``; 1 where masked.

    The log-ratio is clamped to +-20 (as verl and OpenRLHF do); beyond it the gradient is 0.
    """
    log_ratio = torch.where(loss_mask, logprobs - old_logprobs, 0.0)
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def ppo_clip(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Tensor:
    """The clipped surrogate, ``-min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)`` (arXiv 1707.06347 eq.
    7).

    ``dual_clip`` c bounds the term for negative advantages, where the minimum alone does not: objective >= c
    A (arXiv 1912.09729 eq. 5); c must exceed 1.
    """
    rho = ratio(logprobs, old_logprobs, loss_mask)
    clipped = rho.clamp(1.0 - clip_low, 1.0 + clip_high)
    objective = torch.minimum(rho * advantages, clipped * advantages)
    if dual_clip is not None:
        bounded = torch.maximum(objective, dual_clip * advantages)
        objective = torch.where(advantages < 0, bounded, objective)
    return torch.where(loss_mask, -objective, 0.0)


def clip_fractions(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, Tensor]:
    """Masks ``[B, T]`` of tokens whose gradient the clip takes away: (below, above).

    Below: A < 0 and rho < 1 - clip_low. Above: A > 0 and rho > 1 + clip_high.
    """
    rho = ratio(logprobs, old_logprobs, loss_mask)
    below = loss_mask & (advantages < 0) & (rho < 1.0 - clip_low)
    above = loss_mask & (advantages > 0) & (rho > 1.0 + clip_high)
    return below, above
