"""Held-out evaluation: rewards over prompts, or the loss over rows, with standard errors, during training and
as `razona eval`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from razona.advantages import total_rewards
from razona.batch import collate_demonstrations
from razona.config import GRPOConfig, OptimizerConfig
from razona.config.check import validate
from razona.config.commands import EvaluateConfig
from razona.console import Console
from razona.data import Demonstration, Rows, first_of, output_file
from razona.engines.hf import HFEngine
from razona.errors import ConfigError, nearest
from razona.log import json_line, rollout_records
from razona.metrics import mean_and_error, ratio_and_error
from razona.models import LoadedModel
from razona.policy import Policy
from razona.rewards import BoundReward, RewardSpec, bind
from razona.rollout import completion_seeds, score_groups
from razona.setup import fitting_prompts, load_model, load_table, make_engine, make_policy, overlap_note
from razona.tasks import with_task
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
        self.records = rollout_records(
            EVAL_STEP,
            groups,
            rewards=values.tolist(),
            reward_names=[b.name for b in self.rewards],
            totals=totals.tolist(),
            advantages=totals.mul(0).nan_to_num(0).tolist(),
        )
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
            notes = torch.zeros(2, *micro.loss_mask.shape, device=policy.device)
            logprobs = policy.logprobs(micro, temperature=1.0, notes=notes)
            parts.append(torch.stack([-logprobs, *notes, micro.loss_mask.float()]).sum(2).double())
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


def run(config: EvaluateConfig, *, console: Console, rows: Any = None) -> dict[str, Any]:
    """`razona eval`: score a model on a data set. ``rows`` stands in for ``config.data.path`` (see
    `load_rows`). Raises ConfigError before the model is loaded where the output cannot be written.
    """
    config = with_task(config)
    validate(config)
    output = output_file(config.output)
    table = load_table(config.data.path if rows is None else rows, config.data, console)
    rewards = bind(config.rewards, columns=table.renamed(config.data.rename).columns)
    loaded = load_model(config.model, console)
    fitting = fitting_prompts(table, loaded, config.data, config.sampling, console)
    prompts = first_of(fitting, config.num_prompts, seed=config.seed, shuffle=config.data.shuffle)
    for notice in (line for b in rewards for line in b.notices):
        console.note(notice)
    policy = make_policy(loaded, config.model, OptimizerConfig(), total_updates=1)
    engine = make_engine(policy, loaded, console)
    evaluator = Evaluator(
        prompts, rewards, sampling=config.sampling, seed=config.seed, reward_timeout=config.reward_timeout
    )
    kind = "transformers' generate" if isinstance(engine, HFEngine) else "the native engine"
    console.print(
        f"evaluating {config.model.name} on {len(prompts)} prompts x {config.sampling.group_size} "
        f"completions, temperature {config.sampling.temperature:g}, with {kind}"
    )
    metrics = evaluator(engine)
    console.samples("some completions", evaluator.records[:3])
    for name, value in metrics.items():
        if not name.endswith("/error"):
            error = metrics.get(f"{name}/error")
            console.print(f"{name:<28} {value:.4f}" + (f" +- {error:.4f}" if error is not None else ""))
    if output is not None:
        training_only = {"step", "advantage"}
        lines = [
            json_line({k: v for k, v in record.items() if k not in training_only})
            for record in evaluator.records
        ]
        output.write_bytes(b"".join(lines))
        console.print(f"completions and scores are in {output}")
    return {"model": config.model.name, "prompts": len(prompts), **metrics}


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
    if overlap := overlap_note(training, evaluator.prompts):
        console.note(overlap)
    for notice in (line for b in rewards for line in b.notices):
        console.note(f"held-out evaluation: {notice}")
    return evaluator
