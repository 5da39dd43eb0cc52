"""From a configuration to what a run optimises, and what it is measured by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from razona.build.data import fitting_prompts, overlap_notice
from razona.config import (
    GRPOConfig,
)
from razona.data import Rows
from razona.models import LoadedModel
from razona.objective import OBJECTIVES, Objective, with_importance
from razona.policy import Policy, Reference
from razona.rewards import BoundReward, RewardSpec, bind, soft_overlong
from razona.rollout.evaluate import Evaluator
from razona.run.console import Console
from razona.types import Prompt


def training_rewards(config: GRPOConfig, rows: Rows, reward_fns: Sequence[RewardSpec]) -> list[BoundReward]:
    """``reward_fns`` fitted to ``rows``, and the punishment of overlong completions where it is asked for."""
    weights = config.objective.reward_weights
    if config.objective.soft_overlong and reward_fns:
        limit = config.sampling.max_completion_length
        weights = (*(weights or (1.0,) * len(reward_fns)), 1.0)
        reward_fns = (*reward_fns, soft_overlong(limit, config.objective.soft_overlong))
    return bind(reward_fns, columns=rows.renamed(config.data.rename).columns, weights=weights or None)


def objective_from(config: GRPOConfig) -> Objective:
    """The objective that the configuration names; None stands for what its paper has."""
    chosen, importance = config.objective, config.objective.importance
    options: dict[str, Any] = {
        "clip_low": chosen.clip_low,
        "clip_high": chosen.clip_high,
        "dual_clip": chosen.dual_clip,
        "std": chosen.std,
        "weights": chosen.weights,
        "kl_coef": chosen.kl_coef,
        "kl_estimator": chosen.kl_estimator,
        "max_tokens": config.sampling.max_completion_length,
        "overlong_filter": chosen.overlong_filter,
    }
    objective = OBJECTIVES[chosen.name](**{k: v for k, v in options.items() if v is not None})
    if importance.level == "none":
        return objective
    return with_importance(
        objective,
        level=importance.level,
        outside=importance.outside,
        low=importance.low,
        high=importance.high,
    )


def make_reference(
    config: GRPOConfig, objective: Objective, policy: Policy, folder: Path
) -> Reference | None:
    """What the KL is measured against, where it is; its weights go to ``folder``."""
    if not objective.kl_coef and not config.measure_kl_every:
        return None
    return policy.reference(folder, refresh_every=config.objective.refresh_reference_every)


def make_evaluator(
    config: GRPOConfig,
    loaded: LoadedModel,
    rows: Rows | None,
    reward_fns: Sequence[RewardSpec],
    eval_reward_fns: Sequence[RewardSpec],
    console: Console,
    training: Sequence[Prompt],
) -> Evaluator | None:
    """What measures held-out ``rows``: with the rewards of training unless evaluation has its own. Says which
    of its prompts are ``training`` prompts too.
    """
    if rows is None:
        return None
    own = tuple(eval_reward_fns) or config.eval.rewards
    rewards = bind(
        own or reward_fns,
        columns=rows.renamed(config.data.rename).columns,
        weights=None if own else config.objective.reward_weights or None,
    )
    evaluator = Evaluator(
        fitting_prompts(rows, loaded, config.data, config.sampling, console),
        rewards,
        sampling=replace(
            config.sampling, group_size=config.eval.samples, temperature=config.eval.temperature
        ),
        seed=config.run.seed,
        reward_timeout=config.reward_timeout,
    )
    evaluator.check_best(config.eval.best_metric or "eval/reward")
    if overlap := overlap_notice(training, evaluator.prompts):
        console.note(overlap)
    for notice in (line for b in rewards for line in b.notices):
        console.note(f"held-out evaluation: {notice}")
    return evaluator
