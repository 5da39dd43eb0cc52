"""Reward functions: bound to the data's columns by name, called, and checked."""

from razona.rewards.library import (
    completion_text,
    exact_answer,
    extract_answer,
    length,
    soft_overlong,
    think_format,
)
from razona.rewards.protocol import BoundReward, RewardSpec, bind, pass_reward, score
from razona.rewards.resolve import BUILT_IN, resolve

__all__ = [
    "BUILT_IN",
    "BoundReward",
    "RewardSpec",
    "bind",
    "completion_text",
    "exact_answer",
    "extract_answer",
    "length",
    "pass_reward",
    "resolve",
    "score",
    "soft_overlong",
    "think_format",
]
