"""Configuration of the GRPO loop."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from razona.config.common import DataConfig, EvalConfig, LoRAConfig, ModelConfig, OptimizerConfig, RunConfig
from razona.types import Sampling


@dataclass(frozen=True)
class ImportanceConfig:
    """Weights against a sampler that is not quite the trainer: token losses times pi_trainer / pi_sampler."""

    level: Literal["none", "token", "sequence", "geometric"] = "none"
    """The ratio of a token, of a whole completion, or its geometric mean; none: no correction."""
    outside: Literal["truncate", "mask"] = "truncate"
    """A ratio outside of [low, high] is moved to the bound (TIS), or its loss is dropped (IcePop, MIS)."""
    low: float = 0.0
    """Smallest ratio that stays as it is: 0 for TIS and MIS, 0.5 for IcePop."""
    high: float = 2.0
    """Largest ratio that stays as it is: 2 for TIS, 5 for IcePop, 3 for MIS."""


@dataclass(frozen=True)
class DynamicSamplingConfig:
    """Dynamic sampling (DAPO): groups all right or all wrong teach nothing, others take their place."""

    mode: Literal["auto", "on", "off"] = "auto"
    """on: a step samples until prompts_per_step groups are mixed; auto: as the objective's paper has it."""
    reward: str = ""
    """The reward that says what is right, by its display name; may be empty where there is one only."""
    above: float = 0.0
    """A completion is right when that reward is above this."""
    max_rounds: int = 10
    """Rounds of prompts_per_step prompts that a step may sample before the run gives up."""


@dataclass(frozen=True)
class DifficultyConfig:
    """Train on prompts of middle difficulty only: where completions pass neither always nor never."""

    min_pass_rate: float = 0.0
    """Prompts whose completions pass less often are left out."""
    max_pass_rate: float = 1.0
    """Prompts whose completions pass more often are left out."""
    filter_every: int = 0
    """Steps between measurements of all prompts, the first before step 1; 0: only that one."""
    filter_samples: int = 8
    """Completions per prompt and measurement."""
    pass_reward: str = ""
    """Name of the reward function that says what passes; empty: the only one, or exact_answer."""
    pass_above: float = 0.0
    """A completion passes when that reward is above this."""


@dataclass(frozen=True)
class ObjectiveConfig:
    """Which objective, and where it departs from its paper."""

    name: Literal["grpo", "dr_grpo", "dapo", "rloo", "gspo", "cispo"] = "grpo"
    clip_low: float | None = None
    """The ratio is clipped below 1 - clip_low (TRL: epsilon). None: 0.2; GSPO 0.0003; CISPO unbounded."""
    clip_high: float | None = None
    """The ratio is clipped above 1 + clip_high (TRL: epsilon_high). None: 0.2; DAPO 0.28; GSPO 0.0004;
    CISPO 4, a weight of at most 5."""
    dual_clip: float | None = None
    """Where the advantage A is negative, the loss of a token is at most this many times |A|; 3 is usual."""
    std: Literal["population", "sample", "batch", "none"] | None = None
    """What group-centred rewards are divided by; None: as the objective's paper has it."""
    weights: Literal["per_sequence", "per_token", "sequence_sum", "fixed_length"] | None = None
    """How token losses are averaged; None: as the objective's paper has it."""
    kl_coef: float = 0.0
    """Weight of the KL term to the reference (TRL: beta); 0 loads no reference."""
    kl_estimator: Literal["k1", "k2", "k3", "k3_weighted"] = "k3"
    """k3_weighted multiplies k3 by the probability ratio: its gradient is that of the reverse KL."""
    refresh_reference_every: int = 0
    """Steps after which the policy replaces the reference (DeepSeek-R1: 400); 0: it stays as it was."""
    overlong_filter: bool = False
    """Completions that were cut off get no loss (DAPO); their rewards still count in their group's mean."""
    soft_overlong: int = 0
    """Tokens before max_completion_length over which the reward falls from 0 to -1, added to the others
    (DAPO's soft overlong punishment); 0: none."""
    importance: ImportanceConfig = field(default_factory=ImportanceConfig)
    dynamic_sampling: DynamicSamplingConfig = field(default_factory=DynamicSamplingConfig)
    difficulty: DifficultyConfig = field(default_factory=DifficultyConfig)
    reward_weights: tuple[float, ...] = ()
    """One weight per reward function; empty: all 1."""


@dataclass(frozen=True)
class GRPOConfig:
    """Everything a GRPO run is decided by."""

    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rewards: tuple[str, ...] = ()
    """format, exact_answer, length, path/to/file.py:function, package.module:function or model:FOLDER."""
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
    """Steps between measurements of the KL to the reference when kl_coef is 0; 0: not measured."""
    reward_timeout: float = 60.0
    """Seconds a reward function may take per call."""
