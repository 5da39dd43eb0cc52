"""Sampling and scoring: from a source of prompts to groups with rewards, refilled where that is asked for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from razona.advantages import total_rewards
from razona.config import RefillConfig
from razona.data import PromptSource
from razona.errors import CheckpointError, ConfigError, DifficultyError, nearest
from razona.rewards import BoundReward, score
from razona.types import Completion, Engine, Group, Prompt, Sampling, seed_for

Sample = Callable[[], tuple[list[Group], Tensor]]


def collect(
    engine: Engine,
    source: PromptSource[Prompt],
    rewards: Sequence[BoundReward],
    *,
    num_prompts: int,
    sampling: Sampling,
    seed: int,
    step: int,
    reward_timeout: float,
    phases: Callable[[str], contextlib.AbstractContextManager[Any]],
    refill: Refill | None = None,
) -> tuple[list[Group], Tensor, dict[str, float]]:
    """The groups of one step, their rewards ``[P, G, R]`` (float64, nan where a function abstained), and what
    the refill measured.
    """
    taken: list[Prompt] = []

    def sample() -> tuple[list[Group], Tensor]:
        prompts = source.take(num_prompts)
        taken.extend(prompts)
        with phases("generate"):
            seeds = completion_seeds(taken, sampling.group_size, seed=seed, step=step)[-len(prompts) :]
            groups = engine.generate(prompts, sampling, seeds=seeds)
        with phases("reward"):
            return groups, score_groups(groups, rewards, timeout=reward_timeout)

    return (*sample(), {}) if refill is None else refill.fill(sample, num_prompts)


class Refill:
    """Dynamic sampling (DAPO, arXiv 2503.14476 section 3.2): a step trains on groups with at least one right
    and one wrong completion only, and samples until it has enough of them.

    Right is what one reward says, not their sum: a punishment of length makes sums differ among completions
    that are all right. Mixed groups beyond what the step needs wait for the next one, which takes them first.
    """

    def __init__(
        self,
        options: RefillConfig,
        rewards: Sequence[BoundReward],
        prompts: Sequence[Prompt],
    ) -> None:
        self.options, self.rewards = options, rewards
        judge = pass_reward(rewards, options.reward, option="objective.refill.reward")
        self.judge = [b.name for b in rewards].index(judge.name)
        self.prompts = {prompt.id: prompt for prompt in prompts}
        self.surplus: list[tuple[Group, Tensor]] = []  # a mixed group and its rewards [G, R]

    @property
    def words(self) -> str:
        """For the header."""
        return (
            f"groups that are neither all right nor all wrong (right: {self._rule}), sampled in at most "
            f"{self.options.max_rounds} rounds a step"
        )

    @property
    def _rule(self) -> str:
        return f"{self.rewards[self.judge].name} > {self.options.above:g}"

    def right(self, rewards: Tensor) -> Tensor:
        """``[..., G, R] -> [..., G]`` bool; a completion without a judgement is not right."""
        return rewards[..., self.judge] > self.options.above

    def fill(self, sample: Sample, count: int) -> tuple[list[Group], Tensor, dict[str, float]]:
        """``count`` mixed groups, their rewards, and figures. DifficultyError when ``max_rounds`` of
        ``sample`` do not give as many.
        """
        waiting, rounds = len(self.surplus), 0
        sampled: list[Tensor] = []
        while len(self.surplus) < count:
            if rounds == self.options.max_rounds:
                raise DifficultyError(self._gave_up(torch.cat(sampled), count))
            groups, rewards = sample()
            rounds += 1
            sampled.append(rewards)
            counts = self.right(rewards).sum(-1).tolist()
            self.surplus += [
                (group, own)
                for group, own, right in zip(groups, rewards, counts, strict=True)
                if 0 < right < len(group.completions)
            ]
        batch, self.surplus = self.surplus[:count], self.surplus[count:]
        trained = torch.stack([rewards for _, rewards in batch])
        figures = self._figures(torch.cat(sampled) if sampled else trained[:0], trained)
        figures |= {"refill/rounds": rounds, "refill/waiting": waiting, "refill/surplus": len(self.surplus)}
        return [group for group, _ in batch], trained, figures

    def _figures(self, sampled: Tensor, trained: Tensor) -> dict[str, float]:
        """Before: all that this step sampled; after: what it trains on."""
        weights = tuple(b.weight for b in self.rewards)
        figures = {
            "refill/sampled_groups": float(len(sampled)),
            "refill/extra_completions": float((len(sampled) - len(trained)) * trained.shape[1]),
            "refill/pass_rate/after": self.right(trained).double().mean().item(),
            "refill/reward/after": total_rewards(trained, weights).nanmean().item(),
        }
        if len(sampled):
            right = self.right(sampled).double()
            figures |= {
                "refill/pass_rate/before": right.mean().item(),
                "refill/reward/before": total_rewards(sampled, weights).nanmean().item(),
                "refill/all_wrong": (right.amax(-1) == 0).double().mean().item(),
                "refill/all_right": (right.amin(-1) == 1).double().mean().item(),
            }
        return figures

    def _gave_up(self, sampled: Tensor, count: int) -> str:
        right = self.right(sampled)
        wrong, solved = (~right.any(-1)).sum().item(), right.all(-1).sum().item()
        hard = wrong >= solved
        cure = (
            "Start from a model that solves some of them (a cold start by SFT), give easier ones"
            if hard
            else "Give harder ones, or raise objective.refill.above where the reward is a grade"
        )
        return (
            f"{self.options.max_rounds} rounds, {len(sampled)} prompts of {sampled.shape[1]} completions, "
            f"gave {len(self.surplus)} mixed groups where a step needs {count}: in {wrong} groups every "
            f"completion was wrong and in {solved} every one right (right: {self._rule}). The prompts are "
            f"too {'hard' if hard else 'easy'} for this model. {cure}, sample more completions per prompt "
            "(sampling.group_size), or allow more rounds (objective.refill.max_rounds). If completions that "
            "read right count as wrong, look at the reward."
        )

    def state_dict(self) -> dict[str, Any]:
        return {"surplus": [_pack(group, rewards) for group, rewards in self.surplus]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.surplus = [self._unpack(entry) for entry in state["surplus"]]

    def _unpack(self, entry: Mapping[str, Any]) -> tuple[Group, Tensor]:
        prompt = self.prompts.get(entry["prompt"])
        if prompt is None:
            raise CheckpointError(
                f"The checkpoint holds completions of prompt {entry['prompt']}, which the data set no longer "
                "has. Resume with the data the run began with, or start a new run."
            )
        completions = [
            Completion(tuple(ids), tuple(logprobs), *rest) for ids, logprobs, *rest in entry["completions"]
        ]
        return Group(prompt, tuple(completions), entry["kv_length"]), entry["rewards"]


def _pack(group: Group, rewards: Tensor) -> dict[str, Any]:
    completions = [
        [list(c.token_ids), list(c.logprobs), c.text, c.finish_reason, c.policy_version]
        for c in group.completions
    ]
    return {
        "prompt": group.prompt.id,
        "kv_length": group.kv_length,
        "completions": completions,
        "rewards": rewards.clone(),
    }


def pass_reward(rewards: Sequence[BoundReward], name: str, *, option: str) -> BoundReward:
    """The reward function that says whether a completion is right: the one called ``name``, else the only
    one, else ``exact_answer``. ConfigError, naming ``option``, when it cannot be told."""
    judges = {b.name: b for b in rewards if b.name != "soft_overlong"}  # which only punishes
    if not name:
        name = next(iter(judges)) if len(judges) == 1 else "exact_answer"
        given = "none is named."
    else:
        given = f"'{name}' is none of the reward functions.{nearest(name, judges)}"
    if name in judges:
        return judges[name]
    raise ConfigError(
        "Prompts are chosen by how often their completions are right, and which reward function says so? "
        f"{given} Give --{option} one of: {', '.join(judges)}."
    )


def completion_seeds(prompts: Sequence[Prompt], group_size: int, *, seed: int, step: int) -> list[list[int]]:
    """Sampling seeds ``[P][G]``. A prompt that stands twice in one step does not get the same ones twice."""
    seen: dict[int, int] = {}
    seeds = []
    for prompt in prompts:
        first = seen.get(prompt.id, 0) * group_size
        seen[prompt.id] = seen.get(prompt.id, 0) + 1
        seeds.append([seed_for(seed, step, prompt.id, first + g) for g in range(group_size)])
    return seeds


def score_groups(groups: Sequence[Group], rewards: Sequence[BoundReward], *, timeout: float) -> Tensor:
    """Rewards ``[P, G, R]`` of groups of one size."""
    flat = torch.tensor(score(rewards, groups, timeout=timeout), dtype=torch.float64)
    return flat.reshape(len(groups), -1, len(rewards))
