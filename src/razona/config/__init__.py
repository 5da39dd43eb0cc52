"""Frozen dataclasses, one file per loop."""

from razona.config.commands import DemoConfig, EvaluateConfig, GenerateConfig
from razona.config.common import (
    BUNDLED_MODEL,
    DataConfig,
    EvalConfig,
    LoRAConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
)
from razona.config.grpo import GRPOConfig, ObjectiveConfig
from razona.config.sft import SFTConfig

__all__ = [
    "BUNDLED_MODEL",
    "DataConfig",
    "DemoConfig",
    "EvalConfig",
    "EvaluateConfig",
    "GRPOConfig",
    "GenerateConfig",
    "LoRAConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "OptimizerConfig",
    "RunConfig",
    "SFTConfig",
]
