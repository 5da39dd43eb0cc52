"""What is written down of every completion of a step (rollouts.jsonl)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from razona.advantages import total_rewards
from razona.rewards import BoundReward
from razona.types import Group


def rollout_records(
    step: int, groups: Sequence[Group], rewards: Tensor, bound: Sequence[BoundReward], advantages: Tensor
) -> list[dict[str, Any]]:
    """One record per completion. ``rewards`` ``[P, G, R]``, nan: abstained, of the functions ``bound``;
    ``advantages`` ``[P, G]`` or ``[B]``.
    """
    totals = total_rewards(rewards, tuple(b.weight for b in bound)).tolist()
    values, credits = rewards.tolist(), advantages.reshape(rewards.shape[:2]).tolist()
    return [
        {
            "step": step,
            "prompt_id": group.prompt.id,
            "sample": g,
            "prompt": group.prompt.input,
            "completion": completion.text,
            "finish_reason": completion.finish_reason,
            "rewards": dict(zip((b.name for b in bound), values[p][g], strict=True)),
            "reward": totals[p][g],
            "advantage": credits[p][g],
            "n_tokens": len(completion.token_ids),
            "policy_version": completion.policy_version,
        }
        for p, group in enumerate(groups)
        for g, completion in enumerate(group.completions)
    ]
