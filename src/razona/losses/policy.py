"""Policy-gradient losses, per token: ``[B, T]`` in, ``[B, T]`` out, to be minimised, not reduced.

``logprobs`` are those of the trained policy, ``old_logprobs`` those of the policy the ratio is anchored to,
``advantages`` are ``[B, 1]`` or ``[B, T]`` constants, ``loss_mask`` is True on trained tokens. Where it is
False the result is exactly 0 and so is its gradient, whatever stands in the other tensors.

`gspo` and `sequence_clip` compare whole completions: all trained tokens of a row carry the row's one term, so
``per_sequence`` weights, and no others, count each completion once. A row must not be cut.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0  # exp of more overflows what follows; the band is far outside every clip


def ratio(logprobs: Tensor, old_logprobs: Tensor, loss_mask: Tensor) -> Tensor:
    """Probability ratio pi / pi_old per token, ``[B, T]``; 1 where masked.

    The log-ratio is clamped to +-20 (as verl and OpenRLHF do); beyond it the gradient is 0.
    """
    return _log_ratio(logprobs, old_logprobs, loss_mask).exp()


def mean_ratio(logprobs: Tensor, old_logprobs: Tensor, loss_mask: Tensor) -> Tensor:
    """Length-normalised ratio of a completion, the geometric mean of its tokens' ratios (GSPO, arXiv
    2507.18071 eq. 7): ``[B, T]``, alike along a row, 1 where masked.
    """
    total = _log_ratio(logprobs, old_logprobs, loss_mask).sum(1, keepdim=True)
    return torch.where(loss_mask, (total / loss_mask.sum(1, keepdim=True).clamp(min=1)).exp(), 1.0)


def sequence_ratio(logprobs: Tensor, old_logprobs: Tensor, loss_mask: Tensor) -> Tensor:
    """Probability ratio of a whole completion, the product of its tokens' ratios: ``[B, T]``, alike along a
    row, 1 where masked. Its logarithm is clamped to +-20 as a token's.
    """
    total = _log_ratio(logprobs, old_logprobs, loss_mask).sum(1, keepdim=True)
    return torch.where(loss_mask, total.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp(), 1.0)


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
    objective = _surrogate(ratio(logprobs, old_logprobs, loss_mask), advantages, clip_low, clip_high)
    if dual_clip is not None:
        bounded = torch.maximum(objective, dual_clip * advantages)
        objective = torch.where(advantages < 0, bounded, objective)
    return torch.where(loss_mask, -objective, 0.0)


def gspo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> Tensor:
    """The clipped surrogate of the length-normalised ratio of a completion, `mean_ratio` (GSPO, arXiv
    2507.18071 eq. 5). A completion is kept or clipped as a whole.

    The ratio is a mean of log-ratios and hardly leaves 1: the paper's bounds are 3e-4 and 4e-4.
    """
    s = mean_ratio(logprobs, old_logprobs, loss_mask)
    return torch.where(loss_mask, -_surrogate(s, advantages, clip_low, clip_high), 0.0)


def gspo_token(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> Tensor:
    """`gspo` for advantages that differ within a completion: its ratio is ``sg[s] pi / sg[pi]``, which has
    the value of the completion's and the gradient of the token's (arXiv 2507.18071 eq. 14).

    With one advantage per row it equals `gspo`, gradient included.
    """
    known = loss_mask & ~logprobs.isneginf()
    s = mean_ratio(logprobs, old_logprobs, loss_mask).detach() * ratio(logprobs, logprobs.detach(), known)
    return torch.where(loss_mask, -_surrogate(s, advantages, clip_low, clip_high), 0.0)


def sequence_clip(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> Tensor:
    """The clipped surrogate of the ratio of a whole completion, `sequence_ratio`: how RLOO (arXiv 2402.14740)
    reuses a rollout, as in TRL. Where the ratio is 1 the gradient is that of `reinforce` under
    ``sequence_sum`` weights, the paper's own.
    """
    s = sequence_ratio(logprobs, old_logprobs, loss_mask)
    return torch.where(loss_mask, -_surrogate(s, advantages, clip_low, clip_high), 0.0)


def cispo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    clip_low: float | None = None,
    clip_high: float,
) -> Tensor:
    """``-sg[clip(rho, 1 - clip_low, 1 + clip_high)] A log pi`` (CISPO, arXiv 2506.13585 eq. 4 and 5): the
    clip bounds the weight of a token, and no token loses its gradient.

    ``clip_low`` None: no lower bound, as the paper has it. TRL's bound is absolute: its epsilon_high 5 is
    ``clip_high`` 4 here. The value of the loss scales with log pi and is not worth watching.
    """
    lowest = None if clip_low is None else 1.0 - clip_low
    weight = ratio(logprobs, old_logprobs, loss_mask).detach().clamp(lowest, 1.0 + clip_high)
    return reinforce(logprobs, old_logprobs, weight * advantages, loss_mask)


def reinforce(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, loss_mask: Tensor) -> Tensor:
    """``-A log pi`` (Williams 1992): right for one update per rollout; ``old_logprobs`` are not read.

    A token of probability 0 contributes nothing.
    """
    known = loss_mask & ~logprobs.isneginf()
    return torch.where(loss_mask, -advantages * torch.where(known, logprobs, 0.0), 0.0)


def clip_fractions(
    rho: Tensor, advantages: Tensor, loss_mask: Tensor, *, clip_low: float | None, clip_high: float
) -> tuple[Tensor, Tensor]:
    """Masks ``[B, T]`` of tokens whose ratio ``rho`` the clip acts on: (below, above).

    Below: A < 0 and rho < 1 - clip_low (None: no such bound). Above: A > 0 and rho > 1 + clip_high. There a
    clipped surrogate has no gradient, and `cispo` has a smaller one.
    """
    lowest = -torch.inf if clip_low is None else 1.0 - clip_low
    below = loss_mask & (advantages < 0) & (rho < lowest)
    above = loss_mask & (advantages > 0) & (rho > 1.0 + clip_high)
    return below, above


def _log_ratio(logprobs: Tensor, old_logprobs: Tensor, loss_mask: Tensor) -> Tensor:
    """log pi / pi_old per token within +-20; 0 where masked, and where both probabilities are 0."""
    both = logprobs.isneginf() & old_logprobs.isneginf()
    log_ratio = torch.where(loss_mask & ~both, logprobs - old_logprobs, 0.0)
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _surrogate(rho: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """``min(rho A, clip(rho) A)``, to be maximised."""
    return torch.minimum(rho * advantages, rho.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages)
