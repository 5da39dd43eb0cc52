"""An algorithm is a value. The loop in `train/grpo.py` knows none of them by name.

To change one formula, replace one field: ``grpo()._replace(advantage_fn=mine)``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from razona.advantages import Std, group_normalized, leave_one_out, total_rewards
from razona.losses import policy
from razona.losses.importance import ImportanceFn, Level, Outside, importance_weights, uncorrected
from razona.losses.kl import KL_ESTIMATORS, KLFn
from razona.losses.weights import WeightFn, fixed_length, per_sequence, per_token, sequence_sum


class Objective(NamedTuple):
    """What a policy-gradient run optimises.

    ``advantage_fn(rewards [P, G, R], *, reward_weights, loss_mask, kl=None) -> [B, 1] or [B, T]``: who did
    better than expected (``kl`` [B, T]: see `Batch.with_advantages`; a function may do without it);
    ``loss_fn(logprobs, old_logprobs, advantages, loss_mask) -> [B, T]``: what a token contributes;
    ``weight_fn(loss_mask) -> [B, T]``: how tokens are averaged, over one optimizer step; ``kl_fn(logprobs,
    ref_logprobs, old_logprobs, loss_mask) -> [B, T]``, added ``kl_coef`` times. ``importance_fn(old_logprobs,
    sampler_logprobs, loss_mask) -> [B, T]`` is multiplied with the token loss; ``overlong_filter`` takes the
    loss from completions that were cut off. ``dynamic_sampling``: a step should train on groups that are
    neither all right nor all wrong, unless the configuration says otherwise. ``clip``, ``ratio_fn``,
    ``importance_bounds`` and ``description``, for the header and the metrics, are read off the parts that are
    there.
    """

    name: str
    advantage_fn: Callable[..., Tensor]
    loss_fn: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    weight_fn: WeightFn
    kl_fn: KLFn
    kl_coef: float
    importance_fn: ImportanceFn = uncorrected
    overlong_filter: bool = False
    dynamic_sampling: bool = False

    @property
    def clip(self) -> tuple[float | None, float] | None:
        """(low, high) around a ratio of 1, low None: not bounded below. None where nothing is clipped, or the
        loss is not one of ours, and so not known.
        """
        _, options = _taken_apart(self.loss_fn)
        if _known_loss(self.loss_fn) is None or "clip_high" not in options:
            return None
        return options.get("clip_low"), options["clip_high"]

    @property
    def ratio_fn(self) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """``(logprobs, old_logprobs, loss_mask) -> [B, T]``: the ratio that ``clip`` bounds; that of a token
        where the loss is not known.
        """
        known = _known_loss(self.loss_fn)
        return policy.ratio if known is None else known.ratio_fn

    @property
    def importance_bounds(self) -> tuple[float, float] | None:
        """(low, high) of `importance_weights`; None where there is no correction, or one of your own."""
        function, options = _taken_apart(self.importance_fn)
        return (options.get("low", 0.0), options["high"]) if function is importance_weights else None

    @property
    def description(self) -> dict[str, str]:
        """What each part does, in words; "custom: NAME" for one that is not ours. ``ratio``, ``dual_clip``
        and ``importance`` stand there where the loss is known, and where there is such a thing.
        """
        loss, (_, options) = _known_loss(self.loss_fn), _taken_apart(self.loss_fn)
        estimators = [name for name, function in KL_ESTIMATORS.items() if function is self.kl_fn]
        whole = loss is not None and loss.whole and self.weight_fn is per_sequence
        description = {
            "advantage": _advantage_description(self.advantage_fn),
            "loss": _custom(self.loss_fn) if loss is None else loss.description,
            "aggregation": WHOLE_COMPLETIONS if whole else _weight_description(self.weight_fn),
            "kl": estimators[0] if estimators else _custom(self.kl_fn),
        }
        if loss is not None:
            description["ratio"] = loss.ratio_description
            if (bound := options.get("dual_clip")) is not None:
                description["dual_clip"] = f", and a loss of at most {bound:g} |A| where A < 0 (dual clip)"
        if self.importance_fn is not uncorrected:
            description["importance"] = _importance_description(self.importance_fn)
        return description

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What a resumed run must have alike, as far as it can be written down."""
        return {
            "name": self.name,
            "kl_coef": self.kl_coef,
            "clip": self.clip,
            "overlong_filter": self.overlong_filter,
            "dynamic_sampling": self.dynamic_sampling,
            **self.description,
        }


class KnownLoss(NamedTuple):
    """What can be said of a loss of ours. ``whole``: all trained tokens of a row carry the row's one term."""

    function: Callable[..., Tensor]
    description: str
    ratio_fn: Callable[[Tensor, Tensor, Tensor], Tensor]
    ratio_description: str
    whole: bool = False


MEAN_RATIO = "length-normalised ratio of a completion"
LOSSES = (
    KnownLoss(policy.ppo_clip, "the clipped surrogate", policy.ratio, "ratio of a token"),
    KnownLoss(policy.gspo, "the clipped surrogate of completions", policy.mean_ratio, MEAN_RATIO, True),
    KnownLoss(
        policy.gspo_token,
        "the clipped surrogate of completions, with advantages of tokens",
        policy.mean_ratio,
        MEAN_RATIO,
    ),
    KnownLoss(
        policy.sequence_clip,
        "the clipped surrogate of completions",
        policy.sequence_ratio,
        "ratio of a whole completion",
        True,
    ),
    KnownLoss(policy.cispo, "-A log pi, weighted", policy.ratio, "weight of a token, its ratio,"),
    KnownLoss(policy.reinforce, "-A log pi", policy.ratio, "ratio of a token"),
)


ADVANTAGE_WORDS = {
    "population": (
        "(reward - group mean) / population standard deviation of the group, as open-instruct; TRL and verl "
        "divide by the sample deviation"
    ),
    "sample": "(reward - group mean) / sample standard deviation of the group, as TRL and verl",
    "batch": "(reward - group mean) / population standard deviation of all rewards of the step",
    "none": "reward - group mean, not divided by a deviation (TRL: scale_rewards none)",
}
LEFT_OUT_WORDS = "reward - mean of the group's other rewards (leave one out)"
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
WHOLE_COMPLETIONS = "one term per completion, mean over completions"
IMPORTANCE_UNITS = {"token": "token", "sequence": "completion", "geometric": "completion's geometric mean"}
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
    return Objective(
        name="GRPO",
        advantage_fn=partial(group_advantages, std=std),
        loss_fn=partial(policy.ppo_clip, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip),
        weight_fn=_weight_fn(weights, max_tokens),
        kl_fn=KL_ESTIMATORS[kl_estimator],
        kl_coef=kl_coef,
        overlong_filter=overlong_filter,
    )


def dr_grpo(*, max_tokens: int, std: Std = "none", weights: str = "fixed_length", **rest: Any) -> Objective:
    """Dr. GRPO (arXiv 2503.20783): GRPO without its two biases, the deviation and the length of the answer.

    ``max_tokens`` is the generation budget L; ``rest`` as in `grpo`.
    """
    return grpo(std=std, weights=weights, max_tokens=max_tokens, **rest)._replace(name="Dr. GRPO")


def dapo(*, clip_high: float = 0.28, weights: str = "per_token", **rest: Any) -> Objective:
    """DAPO (arXiv 2503.14476 eq. 8): a higher upper clip, every token weighs the same, no KL, dynamic
    sampling; ``rest`` as in `grpo`. ``overlong_filter`` and `razona.rewards.soft_overlong` are its two
    answers to cut-off completions.
    """
    return grpo(clip_high=clip_high, weights=weights, **rest)._replace(name="DAPO", dynamic_sampling=True)


def gspo(*, clip_low: float = 3e-4, clip_high: float = 4e-4, **rest: Any) -> Objective:
    """GSPO (arXiv 2507.18071 eq. 5): ratio and clip of whole completions, length-normalised; ``rest`` as in
    `grpo`, without weights and dual_clip.
    """
    chosen = grpo(weights="per_sequence", dual_clip=None, **rest)
    return chosen._replace(
        name="GSPO",
        loss_fn=partial(policy.gspo, clip_low=clip_low, clip_high=clip_high),
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
    )


def rloo(*, clip_low: float = 0.2, clip_high: float = 0.2, **rest: Any) -> Objective:
    """RLOO (arXiv 2402.14740): the baseline is the mean of the other rewards, the unit the whole completion;
    ``rest`` as in `grpo`, without std, weights and dual_clip.

    With one update per rollout the gradient is REINFORCE's, the paper's own. The KL of the paper's reward is
    not there; ``kl_coef`` puts one into the loss.
    """
    chosen = grpo(std="none", weights="per_sequence", dual_clip=None, **rest)
    return chosen._replace(
        name="RLOO",
        advantage_fn=leave_one_out_advantages,
        loss_fn=partial(policy.sequence_clip, clip_low=clip_low, clip_high=clip_high),
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
    return objective._replace(
        importance_fn=partial(importance_weights, level=level, outside=outside, low=low, high=high)
    )


def is_zero_at_zero_advantage(loss_fn: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> bool:
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


def without_kl(advantage_fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``advantage_fn`` as the loop calls it: one without a parameter ``kl`` is not given the KL that was
    measured.
    """
    parameters = inspect.signature(advantage_fn).parameters.values()
    if any(p.name == "kl" or p.kind is p.VAR_KEYWORD for p in parameters):
        return advantage_fn
    return lambda rewards, *, kl=None, **options: advantage_fn(rewards, **options)


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


def leave_one_out_advantages(
    rewards: Tensor, *, reward_weights: tuple[float, ...], loss_mask: Tensor, kl: Tensor | None = None
) -> Tensor:
    """As `group_advantages`, by `leave_one_out`."""
    return leave_one_out(total_rewards(rewards, reward_weights)).reshape(-1, 1).to(loss_mask.device)


def _weight_fn(name: str, max_tokens: int | None) -> WeightFn:
    if name == "fixed_length":
        if max_tokens is None:
            raise ValueError("fixed_length weights need max_tokens, the generation budget; none was given")
        return partial(fixed_length, max_tokens=max_tokens)
    return WEIGHTS[name]


def _known_loss(loss_fn: Callable[..., Tensor]) -> KnownLoss | None:
    function, _ = _taken_apart(loss_fn)
    return next((known for known in LOSSES if known.function is function), None)


def _advantage_description(advantage_fn: Callable[..., Tensor]) -> str:
    function, options = _taken_apart(advantage_fn)
    if function is group_advantages:
        return ADVANTAGE_WORDS[options["std"]]
    return LEFT_OUT_WORDS if function is leave_one_out_advantages else _custom(advantage_fn)


def _importance_description(importance_fn: ImportanceFn) -> str:
    function, options = _taken_apart(importance_fn)
    if function is not importance_weights:
        return _custom(importance_fn)
    level, outside, low, high = (options.get(name, 0.0) for name in ("level", "outside", "low", "high"))
    what = "kept within" if outside == "truncate" else "0 outside"
    name = IMPORTANCE_NAMES.get((level, outside), "")
    unit = IMPORTANCE_UNITS[level]
    return f"trainer / sampler probability per {unit}, {what} [{low:g}, {high:g}]{name}"


def _weight_description(weight_fn: WeightFn) -> str:
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
