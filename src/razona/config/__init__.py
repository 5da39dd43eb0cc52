"""Frozen dataclasses, one file per loop."""

from razona.config.commands import (
    DemoConfig,
    EvaluateConfig,
    GenerateConfig,
    MergeConfig,
    PushConfig,
    SelectConfig,
)
from razona.config.common import (
    BUNDLED_MODEL,
    DataConfig,
    EvalConfig,
    LoRAConfig,
    ModelConfig,
    OptimizerConfig,
    PassRule,
    RunConfig,
)
from razona.config.grpo import (
    DifficultyConfig,
    DynamicSamplingConfig,
    GRPOConfig,
    ImportanceConfig,
    ObjectiveConfig,
)
from razona.config.sft import SFTConfig, SFTEvalConfig

__all__ = [
    "BUNDLED_MODEL",
    "DataConfig",
    "DemoConfig",
    "DifficultyConfig",
    "DynamicSamplingConfig",
    "EvalConfig",
    "EvaluateConfig",
    "GRPOConfig",
    "GenerateConfig",
    "ImportanceConfig",
    "LoRAConfig",
    "MergeConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "OptimizerConfig",
    "PassRule",
    "PushConfig",
    "RunConfig",
    "SFTConfig",
    "SFTEvalConfig",
    "SelectConfig",
]
