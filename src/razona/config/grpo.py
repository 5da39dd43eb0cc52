"""Configuration of the GRPO loop."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from razona.config.common import DataConfig, EvalConfig, LoRAConfig, ModelConfig, OptimizerConfig, RunConfig
from razona.types import Sampling


@dataclass(frozen=True)
class ObjectiveConfig:
    """Which objective, and where it departs from its paper."""

    name: Literal["grpo", "dr_grpo"] = "grpo"
    clip_low: float = 0.2
    """The probability ratio is clipped below 1 - clip_low (TRL: epsilon)."""
    clip_high: float = 0.2
    """The probability ratio is clipped above 1 + clip_high (TRL: epsilon_high)."""
    std: Literal["population", "sample", "none"] | None = None
    """What group-centred rewards are divided by; None: as the objective's paper has it."""
    weights: Literal["per_sequence", "per_token", "sequence_sum", "fixed_length"] | None = None
    """How token losses are averaged; None: as the objective's paper has it."""
    kl_coef: float = 0.0
    """Weight of the KL term to the starting policy (TRL: beta); 0 loads no reference."""
    kl_estimator: Literal["k1", "k2", "k3", "k3_weighted"] = "k3"
    """k3_weighted multiplies k3 by the probability ratio: its gradient is that of the reverse KL."""
    reward_weights: tuple[float, ...] = ()
    """One weight per reward function; empty: all 1."""


@dataclass(frozen=True)
class GRPOConfig:
    """Everything a GRPO run is decided by."""

    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rewards: tuple[str, ...] = ()
    """format, exact_answer, length, or path/to/file.py:function, or package.module:function."""
    sampling: Sampling = field(default_factory=Sampling)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    run: RunConfig = field(default_factory=RunConfig)
    prompts_per_step: int = 8
    """Prompts sampled per step (P); a step trains on P * G completions."""
    minibatches_per_rollout: int = 1
    """Optimizer updates per pass over a rollout; whole groups stay together."""
    epochs_per_rollout: int = 1
    """Passes over a rollout (mu in the papers)."""
    tokens_per_microbatch: int = 0
    """Tokens, prompts counted once, per forward and backward pass; changes memory and speed, not the
    gradient. 0: 1,280 on a CPU, 16,384 elsewhere."""
    measure_kl_every: int = 0
    """Steps between measurements of the KL to the starting policy when kl_coef is 0; 0: not measured."""
    reward_timeout: float = 60.0
    """Seconds a reward function may take per call."""
