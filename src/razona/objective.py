"""An algorithm is a value. The loop in `train/grpo.py` knows none of them by name.

To change one formula, replace one field: ``grpo()._replace(advantage_fn=mine)``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from razona.advantages import Std, group_normalized, total_rewards
from razona.losses.kl import KL_ESTIMATORS, KLFn
from razona.losses.policy import ppo_clip
from razona.losses.weights import WeightFn, fixed_length, per_sequence, per_token, sequence_sum


class Objective(NamedTuple):
    """What a policy-gradient run optimises.

    ``advantage_fn(rewards [P, G, R], *, reward_weights, loss_mask, kl=None) -> [B, 1] or [B, T]``: who did
    better than expected (``kl`` [B, T]: see `Batch.with_advantages`);
    ``loss_fn(logprobs, old_logprobs, advantages, loss_mask) -> [B, T]``: what a token contributes;
    ``weight_fn(loss_mask) -> [B, T]``: how tokens are averaged, over one optimizer step;
    ``kl_fn(logprobs, ref_logprobs, old_logprobs, loss_mask) -> [B, T]``, added ``kl_coef`` times.
    ``clip`` and ``words``, for the header and the metrics, are read off the parts that are there.
    """

    name: str
    advantage_fn: Callable[..., Tensor]
    loss_fn: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    weight_fn: WeightFn
    kl_fn: KLFn
    kl_coef: float

    @property
    def clip(self) -> tuple[float, float] | None:
        """(low, high) around a ratio of 1; None where the loss is not one of ours, and so not known."""
        function, options = _taken_apart(self.loss_fn)
        return (options["clip_low"], options["clip_high"]) if function is ppo_clip else None

    @property
    def words(self) -> dict[str, str]:
        """In words what each part does; "custom: NAME" for one that is not ours."""
        advantage, options = _taken_apart(self.advantage_fn)
        estimators = [name for name, function in KL_ESTIMATORS.items() if function is self.kl_fn]
        ours = advantage is group_advantages
        return {
            "advantage": ADVANTAGE_WORDS[options["std"]] if ours else _custom(self.advantage_fn),
            "loss": _custom(self.loss_fn) if self.clip is None else "the clipped surrogate",
            "aggregation": _weight_words(self.weight_fn),
            "kl": estimators[0] if estimators else _custom(self.kl_fn),
        }

    @property
    def facts(self) -> dict[str, Any]:
        """What a resumed run must have alike, as far as it can be written down."""
        return {"name": self.name, "kl_coef": self.kl_coef, "clip": self.clip, **self.words}


ADVANTAGE_WORDS = {
    "population": (
        "(reward - group mean) / population standard deviation of the group, as open-instruct; TRL and verl "
        "divide by the sample deviation"
    ),
    "sample": "(reward - group mean) / sample standard deviation of the group, as TRL and verl",
    "none": "reward - group mean, not divided by a deviation (TRL: scale_rewards none)",
}
WEIGHT_WORDS = {
    "per_sequence": (
        "mean over the tokens of a completion, then over completions (TRL: grpo, verl: seq-mean-token-mean)"
    ),
    "per_token": "mean over all completion tokens of an update (TRL: dapo, verl: token-mean)",
    "sequence_sum": ("sum over the tokens of a completion, mean over completions (verl: seq-mean-token-sum)"),
    "fixed_length": "sum over all tokens / (completions * {max_tokens}) (TRL: dr_grpo)",
}
WEIGHTS: dict[str, WeightFn] = {
    "per_sequence": per_sequence,
    "per_token": per_token,
    "sequence_sum": sequence_sum,
    "fixed_length": fixed_length,
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
    )


def dr_grpo(*, max_tokens: int, std: Std | None = None, weights: str | None = None, **rest: Any) -> Objective:
    """Dr. GRPO (arXiv 2503.20783): GRPO without its two biases, the deviation and the length of the answer.

    ``max_tokens`` is the generation budget L; ``rest`` as in `grpo`.
    """
    chosen = grpo(std=std or "none", weights=weights or "fixed_length", max_tokens=max_tokens, **rest)
    return chosen._replace(name="Dr. GRPO")


def silent_where_flat(loss_fn: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> bool:
    """Whether ``loss_fn`` has no gradient at all where the advantage is 0: tried on two made-up rows, with
    ratios on both sides of 1. One that an entropy or the like is added to has. One that cannot take these
    rows is taken to have.
    """
    logprobs = torch.tensor([[-0.1, -2.0, -0.7], [-3.0, -0.5, 0.0]], requires_grad=True)
    old = torch.tensor([[-0.1, -0.4, -2.5], [-3.2, -0.5, 0.0]])
    mask = torch.tensor([[True, True, True], [True, True, False]])
    try:
        loss = loss_fn(logprobs, old, torch.zeros(2, 1), mask)
        gradient = (
            torch.autograd.grad(loss.sum(), logprobs, allow_unused=True)[0] if loss.requires_grad else None
        )
    except Exception:  # whatever it fails with, the first step says it better
        return False
    return gradient is None or not gradient.any()


def group_advantages(
    rewards: Tensor,
    *,
    reward_weights: tuple[float, ...],
    loss_mask: Tensor,
    kl: Tensor | None = None,
    std: Std,
) -> Tensor:
    """Rewards ``[P, G, R]`` -> one advantage per sequence ``[B, 1]``, the same for all its tokens. ``kl`` is
    left to the loss."""
    advantages = group_normalized(total_rewards(rewards, reward_weights), std=std)
    return advantages.reshape(-1, 1).to(loss_mask.device)


def _weight_fn(name: str, max_tokens: int | None) -> WeightFn:
    if name == "fixed_length":
        if max_tokens is None:
            raise ValueError("fixed_length weights need max_tokens, the generation budget; none was given")
        return partial(fixed_length, max_tokens=max_tokens)
    return WEIGHTS[name]


def _weight_words(weight_fn: WeightFn) -> str:
    function, options = _taken_apart(weight_fn)
    for name, known in WEIGHTS.items():
        if function is known:
            return WEIGHT_WORDS[name].format(**options)
    return _custom(weight_fn)


def _taken_apart(part: Callable[..., Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The function of a part, and the options that a partial has given it."""
    return (part.func, part.keywords) if isinstance(part, partial) else (part, {})


def _custom(part: Callable[..., Any]) -> str:
    function, _ = _taken_apart(part)
    return f"custom: {getattr(function, '__name__', type(function).__name__)}"
