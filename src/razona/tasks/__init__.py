"""Tasks: each owns its prompts, its reward and its evaluation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from razona.config import EvaluateConfig, GenerateConfig, GRPOConfig
from razona.config.common import DataConfig
from razona.tasks import gsm8k

C = TypeVar("C")


def with_task(config: C, *, own_rewards: bool = False) -> C:
    """``config`` with what ``data.task`` brings where nothing else was given; what was given stands.

    ``own_rewards``: reward functions were given from Python. A second call changes nothing.
    """
    given: Any = config
    data: DataConfig = given.data
    if data.task == "none":
        return config
    has_prompts = isinstance(config, GenerateConfig) and config.prompts
    changes: dict[str, Any] = {
        "data": replace(
            data,
            path=data.path or ("" if has_prompts else gsm8k.HUB_ID),
            prompt_column=gsm8k.PROMPT_COLUMN if data.prompt_column == "prompt" else data.prompt_column,
            gold=data.gold or gsm8k.GOLD,
            system=gsm8k.SYSTEM if data.system is None else data.system,
        )
    }
    if isinstance(config, (GRPOConfig, EvaluateConfig)) and not config.rewards and not own_rewards:
        changes["rewards"] = gsm8k.REWARDS
        if isinstance(config, GRPOConfig) and not config.objective.reward_weights:
            changes["objective"] = replace(config.objective, reward_weights=gsm8k.REWARD_WEIGHTS)
    return replace(given, **changes)  # type: ignore[no-any-return]
