"""Configuration of the SFT loop."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from razona.config.common import DataConfig, LoRAConfig, ModelConfig, OptimizerConfig, RunConfig, resumable


@dataclass(frozen=True)
class SFTEvalConfig:
    """Held-out loss during training."""

    data: str = ""
    """Held-out rows, read like the training data; empty: no evaluation."""
    every: int = resumable(0)
    """Steps between evaluations; 0: only after the last step."""
    best_metric: Literal["eval/loss", "eval/token_accuracy"] = "eval/loss"
    """The step with the lowest loss, or the highest accuracy, is kept as best/."""


@dataclass(frozen=True)
class SFTConfig:
    """Everything an SFT run is decided by."""

    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(learning_rate=2e-5))
    eval: SFTEvalConfig = field(default_factory=SFTEvalConfig)
    run: RunConfig = field(default_factory=RunConfig)
    rows_per_step: int = 8
    """Demonstrations per optimizer step."""
    max_length: int = 2048
    """Tokens a row may have, prompt and completion together; what is longer: see data.too_long."""
    tokens_per_microbatch: int = 0
    """Tokens per forward and backward pass; changes memory and speed, not the gradient. 0: 1,280 on a CPU,
    16,384 elsewhere."""
