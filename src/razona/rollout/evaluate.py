"""Held-out evaluation: rewards over prompts, or the loss over rows, with standard errors, during training and
as `razona eval`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from razona.advantages import total_rewards
from razona.batch import collate_demonstrations
from razona.data import Demonstration
from razona.errors import ConfigError, nearest
from razona.policy import Policy
from razona.rewards import BoundReward
from razona.rollout.collect import completion_seeds, score_groups
from razona.rollout.metrics import mean_and_error, ratio_and_error
from razona.rollout.records import rollout_records
from razona.types import Engine, Group, Prompt, Sampling

EVAL_STEP = (
    -1
)  # in place of a step in the seeds: every evaluation draws with the same ones, so differences are smaller

LENGTH_FIGURES = ("eval/completion_length", "eval/truncated")


class Evaluator:
    """Held-out prompts and what to measure on them. Call it with an engine to get ``eval/...`` figures."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        rewards: Sequence[BoundReward],
        *,
        sampling: Sampling,
        seed: int,
        reward_timeout: float,
    ) -> None:
        self.prompts, self.rewards, self.sampling = list(prompts), list(rewards), sampling
        self.seed, self.reward_timeout = seed, reward_timeout
        self.records: list[dict[str, Any]] = []

    def check_best(self, name: str) -> None:
        """ConfigError unless ``name`` is a figure that the best checkpoint can be chosen by."""
        measured = [*(f"eval/{b.name}" for b in self.rewards), "eval/reward"]
        if name in LENGTH_FIGURES:
            raise ConfigError(
                f"eval.best_metric is '{name}': the step with the highest value is kept as the best, and of "
                f"this figure the highest is not. Choose among: {', '.join(measured)}."
            )
        if name not in measured:
            raise ConfigError(
                f"eval.best_metric is '{name}', which is not measured.{nearest(name, measured)} "
                f"Measured are: {', '.join(measured)}."
            )

    def __call__(self, engine: Engine) -> dict[str, float]:
        """Every reward's mean over prompts and its standard error, under ``eval/NAME`` and
        ``eval/NAME/error``; also ``eval/reward`` (the weighted sum), ``eval/completion_length`` and
        ``eval/truncated``.

        The completions stay in ``records`` until the next call.
        """
        seeds = completion_seeds(self.prompts, self.sampling.group_size, seed=self.seed, step=EVAL_STEP)
        groups = engine.generate(self.prompts, self.sampling, seeds=seeds)
        values = score_groups(groups, self.rewards, timeout=self.reward_timeout)
        totals = total_rewards(values, tuple(b.weight for b in self.rewards))
        nothing = totals.mul(0).nan_to_num(0)
        self.records = rollout_records(EVAL_STEP, groups, values, self.rewards, advantages=nothing)
        series = {f"eval/{b.name}": values[..., index] for index, b in enumerate(self.rewards)}
        metrics = {}
        for name, per_completion in {**series, "eval/reward": totals}.items():
            metrics[name], metrics[f"{name}/error"] = mean_and_error(per_completion.nanmean(1))
        return metrics | _lengths(groups)


class LossEvaluator:
    """Held-out demonstrations. Call it with a policy to get ``eval/...`` figures."""

    def __init__(self, demonstrations: Sequence[Demonstration], *, budget: int) -> None:
        self.demonstrations, self.budget = list(demonstrations), budget

    @torch.no_grad()
    def __call__(self, policy: Policy) -> dict[str, float]:
        """Means over all trained tokens, with standard errors over rows under ``eval/NAME/error``:
        ``eval/loss``, ``eval/token_accuracy`` (share of tokens that are the most probable ones) and
        ``eval/entropy``. ``budget`` tokens go through the model at once.
        """
        batch = collate_demonstrations([(d.token_ids, d.loss_mask) for d in self.demonstrations])
        parts = []  # [4, b]
        for micro in batch.to(policy.device).split(self.budget):
            token_stats = torch.zeros(2, *micro.loss_mask.shape, device=policy.device)
            logprobs = policy.logprobs(micro, temperature=1.0, token_stats=token_stats)
            parts.append(torch.stack([-logprobs, *token_stats, micro.loss_mask.float()]).sum(2).double())
        *totals, counts = torch.cat(parts, 1)
        metrics = {}
        for name, total in zip(("loss", "token_accuracy", "entropy"), totals, strict=True):
            metrics[f"eval/{name}"], metrics[f"eval/{name}/error"] = ratio_and_error(total, counts)
        return metrics


def _lengths(groups: Sequence[Group]) -> dict[str, float]:
    completions = [completion for group in groups for completion in group.completions]
    length = sum(len(c.token_ids) for c in completions) / len(completions)
    truncated = sum(c.finish_reason == "length" for c in completions) / len(completions)
    return dict(zip(LENGTH_FIGURES, (length, truncated), strict=True))
