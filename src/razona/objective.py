"""An algorithm is a value. The loop in `train/grpo.py` knows none of them by name.

To change one formula, replace one field: ``grpo()._replace(advantage_fn=mine)``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from razona.advantages import Std, group_normalized, total_rewards
from razona.losses.kl import KL_ESTIMATORS, KLFn
from razona.losses.policy import ppo_clip
from razona.losses.weights import WeightFn, fixed_length, per_sequence, per_token, sequence_sum


class Objective(NamedTuple):
    """What a policy-gradient run optimises.

    ``advantage_fn(rewards [P, G, R], *, reward_weights, loss_mask) -> [B, 1] or [B, T]``: who did better than
    expected; ``loss_fn(logprobs, old_logprobs, advantages, loss_mask) -> [B, T]``: what a token contributes;
    ``weight_fn(loss_mask) -> [B, T]``: how tokens are averaged, over one optimizer step;
    ``kl_fn(logprobs, ref_logprobs, old_logprobs, loss_mask) -> [B, T]``, added ``kl_coef`` times.
    ``clip`` repeats (low, high) for the header and the metrics; ``words`` says in words what each part does.
    """

    name: str
    advantage_fn: Callable[..., Tensor]
    loss_fn: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    weight_fn: WeightFn
    kl_fn: KLFn
    kl_coef: float
    clip: tuple[float, float]
    words: dict[str, str]


ADVANTAGE_WORDS = {
    "population": "(reward - group mean) / population standard deviation of the group",
    "sample": "(reward - group mean) / sample standard deviation of the group, as TRL and verl",
    "none": "reward - group mean, not divided by a deviation",
}
WEIGHT_WORDS = {
    "per_sequence": "mean over the tokens of a completion, then over completions",
    "per_token": "mean over all completion tokens of an update (TRL: dapo, verl: token-mean)",
    "sequence_sum": "sum over the tokens of a completion, mean over completions",
    "fixed_length": "sum over all tokens / (completions * max_completion_length) (TRL: dr_grpo)",
}


def grpo(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    std: Std | None = None,
    weights: str | None = None,
    kl_coef: float = 0.0,
    kl_estimator: str = "k3",
    max_tokens: int | None = None,
) -> Objective:
    """GRPO (arXiv 2402.03300): group-normalised advantages, clip, mean per sequence.

    ``std`` is the population deviation unless said otherwise, ``weights`` per_sequence; ``max_tokens`` is
    needed by fixed_length weights only.
    """
    std, weights = std or "population", weights or "per_sequence"
    return Objective(
        name="GRPO",
        advantage_fn=partial(group_advantages, std=std),
        loss_fn=partial(ppo_clip, clip_low=clip_low, clip_high=clip_high),
        weight_fn=_weight_fn(weights, max_tokens),
        kl_fn=KL_ESTIMATORS[kl_estimator],
        kl_coef=kl_coef,
        clip=(clip_low, clip_high),
        words={"advantage": ADVANTAGE_WORDS[std], "aggregation": WEIGHT_WORDS[weights], "kl": kl_estimator},
    )


def dr_grpo(*, max_tokens: int, std: Std | None = None, weights: str | None = None, **rest: Any) -> Objective:
    """Dr. GRPO (arXiv 2503.20783): GRPO without its two biases, the deviation and the length of the answer.

    ``max_tokens`` is the generation budget L; ``rest`` as in `grpo`.
    """
    chosen = grpo(std=std or "none", weights=weights or "fixed_length", max_tokens=max_tokens, **rest)
    return chosen._replace(name="Dr. GRPO")


def group_advantages(
    rewards: Tensor, *, reward_weights: tuple[float, ...], loss_mask: Tensor, std: Std
) -> Tensor:
    """Rewards ``[P, G, R]`` -> one advantage per sequence ``[B, 1]``, the same for all its tokens."""
    advantages = group_normalized(total_rewards(rewards, reward_weights), std=std)
    return advantages.reshape(-1, 1).to(loss_mask.device)


def _weight_fn(name: str, max_tokens: int | None) -> WeightFn:
    if name == "fixed_length":
        if max_tokens is None:
            raise ValueError("fixed_length weights need max_tokens, the generation budget; none was given")
        return partial(fixed_length, max_tokens=max_tokens)
    plain: dict[str, WeightFn] = {
        "per_sequence": per_sequence,
        "per_token": per_token,
        "sequence_sum": sequence_sum,
    }
    return plain[name]
