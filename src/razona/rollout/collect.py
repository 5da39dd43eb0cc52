"""Sampling and scoring: from a source of prompts to groups with rewards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from razona.config import PassRule
from razona.data import PromptSource
from razona.rewards import BoundReward, score
from razona.types import Engine, Group, Prompt, Sampling, seed_for

Sample = Callable[[], tuple[list[Group], Tensor]]
Fill = Callable[[Sample, int], tuple[list[Group], Tensor, dict[str, float]]]
"""From what samples one round, and a number of groups, to that many (see
`razona.rollout.dynamic_sampling.DynamicSampling`)."""


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
    dynamic_sampling: Fill | None = None,
) -> tuple[list[Group], Tensor, dict[str, float]]:
    """The groups of one step, their rewards ``[P, G, R]`` (float64, nan where a function abstained), and what
    dynamic sampling measured.
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

    return (*sample(), {}) if dynamic_sampling is None else dynamic_sampling(sample, num_prompts)


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


def passes(rewards: Tensor, rule: PassRule) -> Tensor:
    """What `razona.rewards.pass_reward` gave, ``[...]`` -> bool ``[...]``: nan, no reward, does not pass."""
    return rewards > rule.pass_above
