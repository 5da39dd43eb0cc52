"""An algorithm is a value. The loop in `train/grpo.py` knows none of them by name.

To change one formula, replace one field: ``grpo()._replace(advantage_fn=mine)``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from razona.advantages import Std, group_normalized, leave_one_out, total_rewards
from razona.losses import policy
from razona.losses.importance import ImportanceFn, Level, Outside, importance_weights, uncorrected
from razona.losses.kl import KL_ESTIMATORS, KLFn
from razona.losses.weights import WeightFn, fixed_length, per_sequence, per_token, sequence_sum


class Objective(NamedTuple):
    """What a policy-gradient run optimises.

    ``advantage_fn(rewards [P, G, R], *, reward_weights, loss_mask) -> [B, 1] or [B, T]``: who did better than
    expected; ``loss_fn(logprobs, old_logprobs, advantages, loss_mask) -> [B, T]``: what a token contributes;
    ``weight_fn(loss_mask) -> [B, T]``: how tokens are averaged, over one optimizer step;
    ``kl_fn(logprobs, ref_logprobs, old_logprobs, loss_mask) -> [B, T]``, added ``kl_coef`` times.
    ``clip`` repeats (low, high) for the header and the metrics; ``words`` says in words what each part does.

    ``ratio_fn(logprobs, old_logprobs, loss_mask) -> [B, T]`` is the ratio that ``clip`` bounds;
    ``importance_fn(old_logprobs, sampler_logprobs, loss_mask) -> [B, T]`` is multiplied with the token loss,
    its bounds repeated in ``importance_bounds`` (None: no correction); ``overlong_filter`` takes the loss
    from completions that were cut off.
    """

    name: str
    advantage_fn: Callable[..., Tensor]
    loss_fn: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    weight_fn: WeightFn
    kl_fn: KLFn
    kl_coef: float
    clip: tuple[float | None, float]
    words: dict[str, str]
    ratio_fn: Callable[[Tensor, Tensor, Tensor], Tensor] = policy.ratio
    importance_fn: ImportanceFn = uncorrected
    importance_bounds: tuple[float, float] | None = None
    overlong_filter: bool = False


ADVANTAGE_WORDS = {
    "population": "(reward - group mean) / population standard deviation of the group",
    "sample": "(reward - group mean) / sample standard deviation of the group, as TRL and verl",
    "batch": "(reward - group mean) / population standard deviation of all rewards of the step",
    "none": "reward - group mean, not divided by a deviation",
}
WEIGHT_WORDS = {
    "per_sequence": "mean over the tokens of a completion, then over completions",
    "per_token": "mean over all completion tokens of an update (TRL: dapo, verl: token-mean)",
    "sequence_sum": "sum over the tokens of a completion, mean over completions",
    "fixed_length": "sum over all tokens / (completions * max_completion_length) (TRL: dr_grpo)",
}
WHOLE_COMPLETIONS = "one term per completion, mean over completions"
IMPORTANCE_NAMES = {
    ("token", "truncate"): " (TIS)",
    ("token", "mask"): " (IcePop)",
    ("sequence", "truncate"): " (sequence TIS)",
    ("sequence", "mask"): " (MIS)",
}


def grpo(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    std: Std = "population",
    weights: str = "per_sequence",
    kl_coef: float = 0.0,
    kl_estimator: str = "k3",
    max_tokens: int | None = None,
    overlong_filter: bool = False,
) -> Objective:
    """GRPO (arXiv 2402.03300 eq. 3): group-normalised advantages, clip, mean per sequence.

    ``max_tokens``, the generation budget, is needed by fixed_length weights only.
    """
    words = {"advantage": ADVANTAGE_WORDS[std], "aggregation": WEIGHT_WORDS[weights], "kl": kl_estimator}
    bound = "" if dual_clip is None else f", and a loss of at most {dual_clip:g} |A| where A < 0 (dual clip)"
    return Objective(
        name="GRPO",
        advantage_fn=partial(group_advantages, std=std),
        loss_fn=partial(policy.ppo_clip, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip),
        weight_fn=_weight_fn(weights, max_tokens),
        kl_fn=KL_ESTIMATORS[kl_estimator],
        kl_coef=kl_coef,
        clip=(clip_low, clip_high),
        words={**words, "ratio": "ratio of a token", "dual_clip": bound},
        overlong_filter=overlong_filter,
    )


def dr_grpo(*, max_tokens: int, std: Std = "none", weights: str = "fixed_length", **rest: Any) -> Objective:
    """Dr. GRPO (arXiv 2503.20783): GRPO without its two biases, the deviation and the length of the answer.

    ``max_tokens`` is the generation budget L; ``rest`` as in `grpo`.
    """
    return grpo(std=std, weights=weights, max_tokens=max_tokens, **rest)._replace(name="Dr. GRPO")


def dapo(*, clip_high: float = 0.28, weights: str = "per_token", **rest: Any) -> Objective:
    """DAPO (arXiv 2503.14476 eq. 8): a higher upper clip, every token weighs the same, no KL; ``rest`` as in
    `grpo`. ``overlong_filter`` and `razona.rewards.soft_overlong` are its two answers to cut-off completions.
    """
    return grpo(clip_high=clip_high, weights=weights, **rest)._replace(name="DAPO")


def gspo(*, clip_low: float = 3e-4, clip_high: float = 4e-4, **rest: Any) -> Objective:
    """GSPO (arXiv 2507.18071 eq. 5): ratio and clip of whole completions, length-normalised; ``rest`` as in
    `grpo`, without weights and dual_clip.
    """
    chosen = grpo(clip_low=clip_low, clip_high=clip_high, weights="per_sequence", dual_clip=None, **rest)
    return chosen._replace(
        name="GSPO",
        loss_fn=partial(policy.gspo, clip_low=clip_low, clip_high=clip_high),
        ratio_fn=policy.mean_ratio,
        words=chosen.words
        | {"aggregation": WHOLE_COMPLETIONS, "ratio": "length-normalised ratio of a completion"},
    )


def cispo(
    *, clip_low: float | None = None, clip_high: float = 4.0, weights: str = "per_token", **rest: Any
) -> Objective:
    """CISPO (arXiv 2506.13585 eq. 4): the clip bounds a token's weight and takes no gradient; ``rest`` as in
    `grpo`, without dual_clip. The paper does not say its bound: weights of at most 5 are ScaleRL's (arXiv
    2510.13786).
    """
    chosen = grpo(weights=weights, dual_clip=None, **rest)
    return chosen._replace(
        name="CISPO",
        loss_fn=partial(policy.cispo, clip_low=clip_low, clip_high=clip_high),
        clip=(clip_low, clip_high),
        words=chosen.words | {"ratio": "weight of a token, its ratio,"},
    )


def rloo(*, clip_low: float = 0.2, clip_high: float = 0.2, **rest: Any) -> Objective:
    """RLOO (arXiv 2402.14740): the baseline is the mean of the other rewards, the unit the whole completion;
    ``rest`` as in `grpo`, without std, weights and dual_clip.

    With one update per rollout the gradient is REINFORCE's, the paper's own. The KL of the paper's reward is
    not there; ``kl_coef`` puts one into the loss.
    """
    chosen = grpo(std="none", weights="per_sequence", dual_clip=None, **rest)
    words = {
        "advantage": "reward - mean of the group's other rewards (leave one out)",
        "aggregation": WHOLE_COMPLETIONS,
        "ratio": "ratio of a whole completion",
    }
    return chosen._replace(
        name="RLOO",
        advantage_fn=leave_one_out_advantages,
        loss_fn=partial(policy.sequence_clip, clip_low=clip_low, clip_high=clip_high),
        clip=(clip_low, clip_high),
        ratio_fn=policy.sequence_ratio,
        words=chosen.words | words,
    )


OBJECTIVES: dict[str, Callable[..., Objective]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "dapo": dapo,
    "rloo": rloo,
    "gspo": gspo,
    "cispo": cispo,
}
"""By the names of ``objective.name``."""


def with_importance(
    objective: Objective, *, level: Level, outside: Outside, low: float = 0.0, high: float
) -> Objective:
    """``objective`` with its token losses multiplied by `importance_weights`."""
    unit = {"token": "token", "sequence": "completion", "geometric": "completion's geometric mean"}[level]
    name = IMPORTANCE_NAMES.get((level, outside), "")
    what = "kept within" if outside == "truncate" else "0 outside"
    return objective._replace(
        importance_fn=partial(importance_weights, level=level, outside=outside, low=low, high=high),
        importance_bounds=(low, high),
        words=objective.words
        | {"importance": f"trainer / sampler probability per {unit}, {what} [{low:g}, {high:g}]{name}"},
    )


def group_advantages(
    rewards: Tensor, *, reward_weights: tuple[float, ...], loss_mask: Tensor, std: Std
) -> Tensor:
    """Rewards ``[P, G, R]`` -> one advantage per sequence ``[B, 1]``, the same for all its tokens."""
    advantages = group_normalized(total_rewards(rewards, reward_weights), std=std)
    return advantages.reshape(-1, 1).to(loss_mask.device)


def leave_one_out_advantages(
    rewards: Tensor, *, reward_weights: tuple[float, ...], loss_mask: Tensor
) -> Tensor:
    """As `group_advantages`, by `leave_one_out`."""
    return leave_one_out(total_rewards(rewards, reward_weights)).reshape(-1, 1).to(loss_mask.device)


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
