"""What is written down of every completion of a step (rollouts.jsonl)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from razona.types import Group


def rollout_records(
    step: int,
    groups: Sequence[Group],
    *,
    rewards: Sequence[Sequence[Sequence[float]]],
    reward_names: Sequence[str],
    totals: Sequence[Sequence[float]],
    advantages: Sequence[Sequence[float]],
) -> list[dict[str, Any]]:
    """One record per completion. ``rewards`` [P, G, R], nan: abstained; ``totals``, ``advantages`` [P, G]."""
    return [
        {
            "step": step,
            "prompt_id": group.prompt.id,
            "sample": g,
            "prompt": group.prompt.input,
            "completion": completion.text,
            "finish_reason": completion.finish_reason,
            "rewards": dict(zip(reward_names, rewards[p][g], strict=True)),
            "reward": totals[p][g],
            "advantage": advantages[p][g],
            "n_tokens": len(completion.token_ids),
            "policy_version": completion.policy_version,
        }
        for p, group in enumerate(groups)
        for g, completion in enumerate(group.completions)
    ]
