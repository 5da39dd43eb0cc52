"""Frozen dataclasses, one file per loop."""

from razona.config.commands import DemoConfig, EvaluateConfig, GenerateConfig, SelectConfig
from razona.config.common import (
    BUNDLED_MODEL,
    DataConfig,
    EvalConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
)
from razona.config.grpo import DifficultyConfig, GRPOConfig, ObjectiveConfig
from razona.config.sft import SFTConfig

__all__ = [
    "BUNDLED_MODEL",
    "DataConfig",
    "DemoConfig",
    "DifficultyConfig",
    "EvalConfig",
    "EvaluateConfig",
    "GRPOConfig",
    "GenerateConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "OptimizerConfig",
    "RunConfig",
    "SFTConfig",
    "SelectConfig",
]
