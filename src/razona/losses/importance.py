"""Importance weights for a sampler that is not quite the trainer: ``[B, T]`` constants that token losses are
multiplied with (a KL term is not).

The policy that sampled (``sampler_logprobs``: another engine, precision or truncation of the distribution)
and the trainer's with the same weights (``old_logprobs``) may give a token different probabilities. The ratio
pi_old / pi_sampler corrects for it, bounded one way or the other, because its variance is not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from razona.losses.policy import MAX_LOG_RATIO

Level = Literal["token", "sequence", "geometric"]
Outside = Literal["truncate", "mask"]
ImportanceFn = Callable[[Tensor, Tensor, Tensor], Tensor]


@torch.no_grad()
def importance_weights(
    old_logprobs: Tensor,
    sampler_logprobs: Tensor,
    loss_mask: Tensor,
    *,
    level: Level,
    outside: Outside,
    low: float = 0.0,
    high: float,
) -> Tensor:
    """``exp(old - sampler)``, moved to the nearer bound of [low, high] ("truncate") or set to 0 ("mask")
    where it lies outside. No gradient; 0 where ``loss_mask`` is False.

    ``level``: of a token (biased, low variance), of the whole completion (unbiased, its variance grows with
    the length), or the geometric mean over the completion. A nan in ``sampler_logprobs`` means unknown, ratio
    1; log-ratios are clamped to +-20. Token, truncate, high 2 is TIS (fengyao.notion.site/off-policy-rl);
    token, mask, [0.5, 5] is IcePop (arXiv 2510.18855); sequence, mask, high 3 is MIS, TRL's default. What is
    masked still counts in the token weights' denominators.
    """
    known = torch.where(loss_mask, old_logprobs - sampler_logprobs, 0.0).nan_to_num(0.0)
    log_ratio = known.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if level != "token":
        total = log_ratio.sum(1, keepdim=True)
        lengths = loss_mask.sum(1, keepdim=True).clamp(min=1) if level == "geometric" else 1
        log_ratio = (total / lengths).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    weight = log_ratio.exp()
    inside = weight.clamp(low, high)
    weight = inside if outside == "truncate" else torch.where(weight == inside, weight, 0.0)
    return torch.where(loss_mask, weight, 0.0)


def uncorrected(old_logprobs: Tensor, sampler_logprobs: Tensor, loss_mask: Tensor) -> Tensor:
    """1 on every trained token: sampler and trainer are taken to agree."""
    return loss_mask.to(old_logprobs.dtype)
