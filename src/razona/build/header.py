"""The header of a run: in words, what it optimises, with what, and what is not measured."""

from __future__ import annotations

from collections.abc import Sequence

from razona.config import GRPOConfig
from razona.losses.policy import mean_ratio
from razona.objective import Objective
from razona.policy import Policy
from razona.rewards import BoundReward
from razona.types import Engine


def describe(
    config: GRPOConfig,
    objective: Objective,
    policy: Policy,
    engine: Engine,
    rewards: Sequence[BoundReward],
    num_prompts: int,
    trains_on: str | None = None,
    *,
    numbers: str,
) -> str:
    """Several lines: advantage rule, aggregation, clip and whether it can act, KL, models in memory, what
    samples, tokens per step. ``trains_on`` says in words which of the sampled groups are trained on, where
    not all are; ``numbers`` in what is computed, and why.
    """
    sampling, completions = config.sampling, config.prompts_per_step * config.sampling.group_size
    lines = {
        "optimises": " + ".join(f"{b.weight:g} x {b.name}" for b in rewards) + f", by {objective.name}",
        "advantage": objective.description["advantage"],
        "averages": objective.description["aggregation"],
        "clip": _clip(config, objective, on_policy=trains_on is None),
        "KL": _kl(config, objective),
        **(
            {"importance": objective.description["importance"]}
            if "importance" in objective.description
            else {}
        ),
        **({"overlong": overlong} if (overlong := _overlong(config, objective)) else {}),
        **({"trains on": trains_on} if trains_on else {}),
        "models": _models(config, objective, policy),
        "numbers": numbers,
        "samples": f"{engine.description}; {engine.exactness}",
        "one step": (
            f"{config.prompts_per_step} prompts x {sampling.group_size} completions of at most "
            f"{sampling.max_completion_length} tokens = {completions} completions, "
            f"at temperature {sampling.temperature:g}{_truncation(config)}; {_updates(config)}"
        ),
        "data": f"{num_prompts} prompts, an epoch is {num_prompts / config.prompts_per_step:.3g} steps",
    }
    return "\n".join(f"{name:>10}: {text}" for name, text in lines.items())


def _updates(config: GRPOConfig) -> str:
    count = config.minibatches_per_rollout * config.epochs_per_rollout
    return f"{count} update{'s' if count > 1 else ''} per rollout"


def _clip(config: GRPOConfig, objective: Objective, *, on_policy: bool) -> str:
    if objective.clip is None:
        loss = objective.description["loss"]
        known = "not known" if loss.startswith("custom: ") else "none"
        return f"{known}: the loss is {loss}. clip/low and clip/high are not measured"
    low, high = objective.clip
    name = objective.description["ratio"]
    bounds = f"{name} at most {1 + high:g}" if low is None else f"{name} in [{1 - low:g}, {1 + high:g}]"
    bounds += objective.description.get("dual_clip", "")
    if on_policy and config.minibatches_per_rollout * config.epochs_per_rollout == 1:
        return f"{bounds}, but it cannot act: one update per rollout, so the ratio is exactly 1"
    if objective.ratio_fn is mean_ratio and high >= 0.05:
        return f"{bounds}: so wide that it hardly ever acts; GSPO's paper has 0.0003 and 0.0004"
    return bounds


def _kl(config: GRPOConfig, objective: Objective) -> str:
    every = config.objective.refresh_reference_every
    reference = (
        f"a reference that the policy replaces every {every} steps" if every else "the starting policy"
    )
    if objective.kl_coef:
        line = f"{objective.kl_coef:g} x {objective.description['kl']} to {reference}, in the loss"
        vain = "; its gradient is 0 in expectation: it holds the policy nowhere and adds noise (take k3)"
        return line + (vain if objective.description["kl"] == "k1" else "")
    if config.measure_kl_every:
        return f"none in the loss; measured every {config.measure_kl_every} steps against {reference}"
    return "none in the loss; KL not measured (measure_kl_every = 0)"


def _overlong(config: GRPOConfig, objective: Objective) -> str:
    cache, limit = config.objective.soft_overlong, config.sampling.max_completion_length
    parts = [
        "no loss for completions that are cut off; their rewards count in their group"
        if objective.overlong_filter
        else "",
        f"soft_overlong falls from 0 at {limit - cache} tokens to -1 at {limit}" if cache else "",
    ]
    return "; ".join(part for part in parts if part)


def _models(config: GRPOConfig, objective: Objective, policy: Policy) -> str:
    size = sum(p.numel() for p in policy.compute) / 1e6
    reference = (
        "; the reference's weights lie on disk" if objective.kl_coef or config.measure_kl_every else ""
    )
    if policy.adapter is not None:
        if policy.starts_at_its_base and reference:
            reference = "; the reference is the base, the adapter switched off"
        return f"one, with {policy.adapter}; it samples from itself, unmerged{reference}"
    return f"one, {size:.0f} M trained parameters; it samples from itself{reference}"


def _truncation(config: GRPOConfig) -> str:
    sampling = config.sampling
    parts = [
        f"top_p {sampling.top_p:g}" if sampling.top_p < 1 else "",
        f"top_k {sampling.top_k}" if sampling.top_k else "",
        f"min_p {sampling.min_p:g}" if sampling.min_p else "",
    ]
    named = [part for part in parts if part]
    if not named:
        return ""
    return f", {', '.join(named)} (the sampler's distribution is then not the trainer's: mismatch is not 0)"
