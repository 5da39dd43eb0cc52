"""The GRPO loop: prompts -> rollouts -> rewards -> advantages -> loss -> update. Read `train` downward.

The loop knows no algorithm by name: an `Objective` brings the advantage, the loss and the weights.
Shapes: P prompts, G completions of a prompt, R reward functions, B = P * G sequences, T completion tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from razona.batch import collate, needed
from razona.build.data import fitting_prompts, load_table
from razona.build.header import describe
from razona.build.model import load_model, make_engine, make_policy
from razona.build.objective import make_evaluator, make_reference, objective_from, training_rewards
from razona.build.precision import with_precision
from razona.config import GRPOConfig
from razona.config.check import validate
from razona.data import PromptSource, Rows
from razona.errors import finite
from razona.losses.weights import masked_sum
from razona.models import LoadedModel
from razona.models.quant import refuse_frozen
from razona.objective import Objective, is_zero_at_zero_advantage, without_kl
from razona.policy import Policy, Reference
from razona.rewards import BoundReward, RewardSpec
from razona.rollout.collect import collect
from razona.rollout.difficulty import make_source, refilter
from razona.rollout.dynamic_sampling import DynamicSampling, make_dynamic_sampling
from razona.rollout.evaluate import Evaluator
from razona.rollout.metrics import UpdateMeter, completion_means, rollout_metrics
from razona.rollout.notices import NothingLearned
from razona.rollout.records import rollout_records
from razona.run.console import Console
from razona.run.folder import RunFolder
from razona.run.progress import due
from razona.run.steps import RESUME_HINT, Evaluate, OnStep, Steps, keep_going, running
from razona.tasks import with_task
from razona.types import Engine, Prompt, Stateful


@dataclass(frozen=True)
class Parts:
    """What a run is made of."""

    policy: Policy
    reference: Reference | None
    engine: Engine
    source: PromptSource[Prompt]
    rewards: Sequence[BoundReward]
    dynamic_sampling: DynamicSampling | None
    evaluator: Evaluator | None
    log: RunFolder
    on_step: OnStep = keep_going

    @property
    def state(self) -> dict[str, Stateful]:
        """What a checkpoint holds."""
        state: dict[str, Stateful] = {"policy": self.policy, "source": self.source}
        if self.reference is not None and self.reference.refresh_every:
            state["reference"] = self.reference
        if self.dynamic_sampling is not None:
            state["dynamic_sampling"] = self.dynamic_sampling
        return state

    @property
    def evaluate(self) -> Evaluate | None:
        evaluator = self.evaluator
        return None if evaluator is None else lambda: (evaluator(self.engine), evaluator.records)


def train(config: GRPOConfig, objective: Objective, parts: Parts, console: Console) -> dict[str, Any]:
    """Trains up to ``config.run.num_steps``. Returns the last step's metrics, and how the run ended."""
    policy, engine, reference = parts.policy, parts.engine, parts.reference
    weights = tuple(b.weight for b in parts.rewards)
    temperature, budget = config.sampling.temperature, config.tokens_per_microbatch
    several_updates = config.minibatches_per_rollout * config.epochs_per_rollout > 1
    skip_zero_advantage = is_zero_at_zero_advantage(objective.loss_fn)
    nothing_learned = NothingLearned(console)

    with Steps(
        "GRPO", config.run, config.eval, parts.log, parts.state, parts.evaluate, parts.on_step, console
    ) as steps:
        for step in steps:
            # Sample and score.
            engine.load_weights(policy, version=step)
            filtered = refilter(parts.source, engine, step, steps.phase)  # out go too easy and too hard ones
            with policy.saving_activations(not several_updates):  # for the training pass below
                groups, rewards, sampling_figures = collect(
                    engine,
                    parts.source,
                    parts.rewards,
                    num_prompts=config.prompts_per_step,
                    sampling=config.sampling,
                    seed=config.run.seed,
                    step=step,
                    reward_timeout=config.reward_timeout,
                    phases=steps.phase,
                    dynamic_sampling=parts.dynamic_sampling,
                )
            rollout = collate(groups, rewards, overlong_filter=objective.overlong_filter).to(policy.device)

            # Only the passes that are needed: with one update per rollout the old policy is the present one.
            measure_kl = objective.kl_coef != 0 or due(step, config.measure_kl_every)
            stale = [c.policy_version != step for group in groups for c in group.completions]
            with torch.no_grad(), steps.phase("score"):
                if several_updates or any(stale):
                    rollout = rollout.with_old(policy, temperature=temperature, budget=budget, stale=stale)
                if reference is not None and measure_kl:
                    rollout = rollout.with_reference(reference, temperature=temperature, budget=budget)

            rollout = rollout.with_advantages(without_kl(objective.advantage_fn), reward_weights=weights)
            meter = UpdateMeter(objective)
            meter.watch(policy, rollout, step=step, temperature=temperature)
            for minibatch in rollout.minibatches(
                config.minibatches_per_rollout, epochs=config.epochs_per_rollout, seed=step
            ):
                minibatch = minibatch.weighted(objective.weight_fn)  # counts of this optimizer update
                if skip_zero_advantage and not measure_kl:
                    minibatch = minibatch.with_signal()  # where every advantage is 0 the gradient is too
                for micro in minibatch.split(budget):
                    with steps.phase("train"):
                        logprobs = policy.logprobs(micro, temperature=temperature)  # [b, T]
                        old = logprobs.detach() if micro.old_logprobs is None else micro.old_logprobs
                        token_loss = objective.loss_fn(
                            logprobs, old, needed(micro.advantages), micro.loss_mask
                        )
                        token_loss = token_loss * objective.importance_fn(
                            old, micro.sampler_logprobs, micro.loss_mask
                        )  # 1, unless the objective corrects for a sampler that is not quite the trainer
                        if objective.kl_coef:
                            kl = objective.kl_fn(logprobs, needed(micro.ref_logprobs), old, micro.loss_mask)
                            token_loss = token_loss + objective.kl_coef * kl
                        loss = masked_sum(token_loss, needed(micro.weights))
                        loss.backward()
                    meter.add(micro, logprobs, old, loss)
                finite("loss", meter.loss)
                with steps.phase("optimizer"):
                    meter.updated(finite("gradient norm", policy.update()))
            if reference is not None and due(step + 1, reference.refresh_every):
                reference.refresh()

            # What happened.
            sampled = filtered | rollout_metrics(groups, rewards, parts.rewards) | sampling_figures
            metrics = sampled | meter.metrics() | {"lr": policy.learning_rate(policy.updates - 1)}
            nothing_learned(step + 1, metrics)
            advantages = completion_means(needed(rollout.advantages), rollout.lengths)
            steps.end(metrics, rollout_records(step + 1, groups, rewards, parts.rewards, advantages))
    return steps.result


def run(
    config: GRPOConfig,
    *,
    console: Console | None = None,
    dry_run: bool = False,
    rows: Any = None,
    eval_rows: Any = None,
    reward_fns: Sequence[RewardSpec] = (),
    eval_reward_fns: Sequence[RewardSpec] = (),
    objective: Objective | None = None,
    model: LoadedModel | None = None,
    on_step: OnStep = keep_going,
    resume_hint: str = RESUME_HINT,
) -> dict[str, Any]:
    """Builds the parts that ``config`` asks for and trains: `razona grpo`, and the one call from Python.

    ``rows`` and ``eval_rows`` stand in for the paths (a list of dicts, a `datasets.Dataset`), ``reward_fns``
    for ``config.rewards``, ``objective`` for ``config.objective``, ``model`` (see `razona.models.from_model`)
    for ``config.model.name``. ``dry_run`` stops before anything is written; ``on_step`` listens, and may stop
    the run; ``resume_hint`` is what to say when the run was interrupted.
    """
    config, numbers = with_precision(with_task(config, own_rewards=bool(reward_fns)))
    validate(config, eval_rows=eval_rows is not None, objective=objective)
    console = console or Console()
    reward_fns = tuple(reward_fns) or config.rewards
    table = load_table(config.data.path if rows is None else rows, config.data, console)
    rewards = training_rewards(config, table, reward_fns)
    loaded = load_model(config.model, console, lora=config.lora, seed=config.run.seed, given=model)
    refuse_frozen(loaded.name, loaded.model)
    prompts = fitting_prompts(table, loaded, config.data, config.sampling, console)
    source = make_source(config, prompts, rewards, console)
    say(console, source.warning(config.prompts_per_step), *(line for b in rewards for line in b.notices))
    held_out = eval_rows if eval_rows is not None else config.eval.data or None
    held_out = None if held_out is None else load_table(held_out, config.data, console)
    evaluator = make_evaluator(config, loaded, held_out, reward_fns, eval_reward_fns, console, prompts)
    updates = config.run.num_steps * config.minibatches_per_rollout * config.epochs_per_rollout
    with make_policy(loaded, config.model, config.optimizer, total_updates=updates) as policy:
        objective = objective or objective_from(config)
        dynamic_sampling = make_dynamic_sampling(config, objective, rewards, prompts)
        trains_on = None if dynamic_sampling is None else dynamic_sampling.describe()
        engine = make_engine(policy, loaded, console, config.sampling.engine)
        header = describe(
            config, objective, policy, engine, rewards, len(prompts), trains_on, numbers=numbers
        )
        console.print(header)
        if dry_run:
            console.print("dry run: everything fits; nothing was sampled, trained or written.")
            return {"dry_run": True, "prompts": len(prompts)}

        given = fingerprint(loaded, (table, held_out), objective, rewards, evaluator)
        with running(config, console, header=header, fingerprint=given, resume_hint=resume_hint) as log:
            reference = make_reference(config, objective, policy, log.path)
            parts = Parts(
                policy, reference, engine, source, rewards, dynamic_sampling, evaluator, log, on_step
            )
            return train(config, objective, parts, console)


def say(console: Console, *notices: str | None) -> None:
    """Prints those that are there."""
    for notice in filter(None, notices):
        console.note(notice)


def fingerprint(
    loaded: LoadedModel,
    tables: Sequence[Rows | None],
    objective: Objective,
    rewards: Sequence[BoundReward],
    evaluator: Evaluator | None,
) -> dict[str, Any]:
    """What may have been given from Python, as far as it can be written down and compared on resume."""
    held_out_rewards = evaluator.rewards if evaluator else ()
    return {
        "model": loaded.name,
        "data_fingerprint": "+".join(rows.fingerprint for rows in tables if rows is not None),
        "objective": objective.fingerprint,
        "rewards": {b.name: b.weight for b in rewards},
        "eval_rewards": {b.name: b.weight for b in held_out_rewards},
    }
