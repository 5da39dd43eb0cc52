"""Advantages from group rewards: ``[P, G]`` in, ``[P, G]`` out. Pure functions.

nan means "this completion could not be scored": it enters no mean and no deviation, and its advantage is 0.
So is that of a completion that is the only scored one of its group. A group whose rewards differ by at most
1e-9 teaches nothing and gets exactly 0: dividing rounding noise by a tiny deviation would turn it into
advantages of size 1.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

EQUAL = 1e-9  # rewards of a group closer than this are equal

Std = Literal["population", "sample", "batch", "none"]


def group_normalized(rewards: Tensor, *, std: Std = "population", eps: float = 1e-4) -> Tensor:
    """``(r - mean) / (std + eps)`` within each group (GRPO, arXiv 2402.03300 section 4.1.2).

    ``std`` divides by the deviation with G ("population", numpy's default), with G - 1 ("sample", as TRL and
    verl do), by the population deviation of all scored rewards, the mean still being the group's ("batch",
    arXiv 2508.08221), or not at all ("none"). Computed in float64.

    >>> group_normalized(torch.tensor([[3.0, 1.0, 0.0, 3.0]])).double().round(decimals=2).tolist()
    [[0.96, -0.58, -1.35, 0.96]]
    """
    centred, counted, informative = _centred(rewards)
    if std == "none":
        scaled = centred
    elif std == "batch":
        scored = rewards.to(torch.float64)[counted]
        scaled = centred / ((scored - scored.mean()).square().mean().sqrt() + eps)
    else:
        freedom = counted.sum(1, keepdim=True) - (1 if std == "sample" else 0)
        deviation = (centred.square().sum(1, keepdim=True) / freedom.clamp(min=1)).sqrt()
        scaled = centred / (deviation + eps)
    return torch.where(counted & informative, scaled, 0.0).to(torch.float32)


def group_centered(rewards: Tensor) -> Tensor:
    """``r - mean`` within each group, no deviation (Dr. GRPO, arXiv 2503.20783)."""
    return group_normalized(rewards, std="none")


def leave_one_out(rewards: Tensor) -> Tensor:
    """``r_i - mean of the other scored rewards`` within each group (RLOO, arXiv 2402.14740); n / (n - 1) (r_i
    - mean).

    >>> leave_one_out(torch.tensor([[3.0, 1.0, 0.0, 3.0]])).double().round(decimals=4).tolist()
    [[1.6667, -1.0, -2.3333, 1.6667]]
    """
    centred, counted, informative = _centred(rewards)
    n = counted.sum(1, keepdim=True)
    return torch.where(counted & informative, centred * n / (n - 1).clamp(min=1), 0.0).to(torch.float32)


def zero_std_groups(rewards: Tensor) -> Tensor:
    """Which groups teach nothing, bool ``[P]``: fewer than two scored rewards, or all equal."""
    return ~_centred(rewards)[2][:, 0]


def total_rewards(rewards: Tensor, weights: tuple[float, ...] = ()) -> Tensor:
    """Weighted sum over the reward functions, ``[P, G, R] -> [P, G]``; abstentions count nothing.

    A completion that every function abstained on stays nan. ``weights`` empty: all 1. Float64, so that sums
    of equal parts are equal.
    """
    values = rewards.to(torch.float64)
    scale = torch.tensor(weights or (1.0,) * values.shape[-1], dtype=torch.float64, device=values.device)
    scored = ~values.isnan()
    total = (torch.where(scored, values, 0.0) * scale).sum(-1)
    return torch.where(scored.any(-1), total, torch.nan)


def _centred(rewards: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(r - mean with 0 for nan [P, G], scored [P, G], group has something to teach [P, 1]), in float64."""
    values = rewards.to(torch.float64)
    counted = ~values.isnan()
    known = torch.where(counted, values, 0.0)
    mean = known.sum(1, keepdim=True) / counted.sum(1, keepdim=True).clamp(min=1)
    high = torch.where(counted, values, -torch.inf).amax(1, keepdim=True)
    low = torch.where(counted, values, torch.inf).amin(1, keepdim=True)
    informative = (counted.sum(1, keepdim=True) > 1) & (high - low > EQUAL)
    return torch.where(counted, values - mean, 0.0), counted, informative
