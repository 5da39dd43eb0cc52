"""Dynamic sampling (DAPO): a step samples until it has enough groups that are not all right or all wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from razona.advantages import total_rewards
from razona.config import DynamicSamplingConfig, GRPOConfig
from razona.errors import CheckpointError, DifficultyError
from razona.objective import Objective
from razona.rewards import BoundReward, pass_reward
from razona.rollout.collect import Sample, passes
from razona.types import Completion, Group, Prompt


class DynamicSampling:
    """Dynamic sampling (DAPO, arXiv 2503.14476 section 3.2): a step trains on groups with at least one right
    and one wrong completion only, and samples until it has enough of them.

    Right is what one reward says, not their sum: a punishment of length makes sums differ among completions
    that are all right. Mixed groups beyond what the step needs wait for the next one, which takes them first.
    """

    def __init__(
        self,
        options: DynamicSamplingConfig,
        rewards: Sequence[BoundReward],
        prompts: Sequence[Prompt],
    ) -> None:
        self.options, self.rewards = options, rewards
        reward = pass_reward(rewards, options.pass_reward, option="objective.dynamic-sampling.pass-reward")
        self.pass_index = [b.name for b in rewards].index(reward.name)
        self.prompts = {prompt.id: prompt for prompt in prompts}
        self.surplus: list[tuple[Group, Tensor]] = []  # a mixed group and its rewards [G, R]

    def describe(self) -> str:
        """For the header."""
        return (
            f"groups that are neither all right nor all wrong (right: {self._rule}), sampled in at most "
            f"{self.options.max_rounds} rounds a step"
        )

    @property
    def _rule(self) -> str:
        return f"{self.rewards[self.pass_index].name} > {self.options.pass_above:g}"

    def right(self, rewards: Tensor) -> Tensor:
        """``[..., G, R] -> [..., G]`` bool; a completion without a reward is not right."""
        return passes(rewards[..., self.pass_index], self.options)

    def __call__(self, sample: Sample, count: int) -> tuple[list[Group], Tensor, dict[str, float]]:
        """``count`` mixed groups, their rewards, and figures. DifficultyError when ``max_rounds`` of
        ``sample`` do not give as many.
        """
        waiting, rounds = len(self.surplus), 0
        sampled: list[Tensor] = []
        tokens = 0
        while len(self.surplus) < count:
            if rounds == self.options.max_rounds:
                raise DifficultyError(self._gave_up(torch.cat(sampled), count))
            groups, rewards = sample()
            rounds += 1
            sampled.append(rewards)
            tokens += sum(len(c.token_ids) for group in groups for c in group.completions)
            counts = self.right(rewards).sum(-1).tolist()
            self.surplus += [
                (group, own)
                for group, own, right in zip(groups, rewards, counts, strict=True)
                if 0 < right < len(group.completions)
            ]
        batch, self.surplus = self.surplus[:count], self.surplus[count:]
        trained = torch.stack([rewards for _, rewards in batch])
        figures = self._figures(torch.cat(sampled) if sampled else trained[:0], trained)
        figures |= {
            "dynamic_sampling/rounds": rounds,
            "dynamic_sampling/waiting": waiting,
            "dynamic_sampling/surplus": len(self.surplus),
        }
        figures["dynamic_sampling/sampled_tokens"] = tokens
        return [group for group, _ in batch], trained, figures

    def _figures(self, sampled: Tensor, trained: Tensor) -> dict[str, float]:
        """Before: all that this step sampled; after: what it trains on."""
        weights = tuple(b.weight for b in self.rewards)
        figures = {
            "dynamic_sampling/sampled_groups": float(len(sampled)),
            "dynamic_sampling/extra_completions": float((len(sampled) - len(trained)) * trained.shape[1]),
            "dynamic_sampling/pass_rate/after": self.right(trained).double().mean().item(),
            "dynamic_sampling/reward/after": total_rewards(trained, weights).nanmean().item(),
        }
        if len(sampled):
            right = self.right(sampled).double()
            figures |= {
                "dynamic_sampling/pass_rate/before": right.mean().item(),
                "dynamic_sampling/reward/before": total_rewards(sampled, weights).nanmean().item(),
                "dynamic_sampling/all_wrong": (right.amax(-1) == 0).double().mean().item(),
                "dynamic_sampling/all_right": (right.amin(-1) == 1).double().mean().item(),
            }
        return figures

    def _gave_up(self, sampled: Tensor, count: int) -> str:
        right = self.right(sampled)
        wrong, solved = (~right.any(-1)).sum().item(), right.all(-1).sum().item()
        hard = wrong >= solved
        cure = (
            "Start from a model that solves some of them (a cold start by SFT), give easier ones"
            if hard
            else "Give harder ones, or raise objective.dynamic_sampling.pass_above for graded rewards"
        )
        return (
            f"{self.options.max_rounds} rounds, {len(sampled)} prompts of {sampled.shape[1]} completions, "
            f"gave {len(self.surplus)} mixed groups where a step needs {count}: in {wrong} groups every "
            f"completion was wrong and in {solved} every one right (right: {self._rule}). The prompts are "
            f"too {'hard' if hard else 'easy'} for this model. {cure}, sample more completions per prompt "
            "(sampling.group_size), or allow more rounds (objective.dynamic_sampling.max_rounds). If "
            "completions that read right count as wrong, look at the reward."
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


def make_dynamic_sampling(
    config: GRPOConfig, objective: Objective, rewards: Sequence[BoundReward], prompts: Sequence[Prompt]
) -> DynamicSampling | None:
    """Dynamic sampling, where it is asked for or belongs to the objective."""
    options = config.objective.dynamic_sampling
    wanted = options.mode == "on" or (options.mode == "auto" and objective.dynamic_sampling)
    return DynamicSampling(options, rewards, prompts) if wanted else None


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
