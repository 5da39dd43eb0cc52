"""Configuration of the GRPO loop."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from razona.config.check import Given
from razona.config.common import (
    DataConfig,
    EvalConfig,
    LoRAConfig,
    ModelConfig,
    OptimizerConfig,
    PassRule,
    RunConfig,
    check_warmup,
)
from razona.errors import ConfigError
from razona.types import Sampling, at_least, ranged

_WHOLE = "{} has one term per completion, whatever its length"
_REFUSED = {
    ("gspo", "weights"): _WHOLE.format("GSPO"),
    ("rloo", "weights"): _WHOLE.format("RLOO"),
    ("rloo", "std"): "RLOO's advantage is the reward less the mean of the group's others, not divided",
    ("gspo", "dual_clip"): "GSPO's ratio is a mean over the completion, which needs no second bound",
    ("rloo", "dual_clip"): "RLOO's ratio is that of the completion, and the dual clip is of a token's",
    ("cispo", "dual_clip"): "CISPO's clip bounds every token's weight already",
}
"""Options that an objective has no place for, and why."""

_PARTS = (
    "name", "clip_low", "clip_high", "dual_clip", "std", "weights", "kl_coef", "kl_estimator",
    "overlong_filter", "importance",
)  # fmt: skip
"""Options that decide a part of an `Objective`; the others are the run's."""


@dataclass(frozen=True)
class ImportanceConfig:
    """Weights against a sampler that is not quite the trainer: token losses times pi_trainer / pi_sampler."""

    level: Literal["none", "token", "sequence", "geometric"] = "none"
    """The ratio of a token, of a whole completion, or its geometric mean; none: no correction."""
    outside: Literal["truncate", "mask"] = "truncate"
    """A ratio outside of [low, high] is moved to the bound (TIS), or its loss is dropped (IcePop, MIS)."""
    low: float = ranged(0.0, "at least 0 and at most 1, the ratio of equals", lambda v: 0 <= v <= 1)
    """Smallest ratio that stays as it is: 0 for TIS and MIS, 0.5 for IcePop."""
    high: float = ranged(2.0, "at least 1, the ratio of equals", lambda v: v >= 1)
    """Largest ratio that stays as it is: 2 for TIS, 5 for IcePop, 3 for MIS."""

    def check(self, given: Given) -> None:
        for option in ("outside", "low", "high"):
            value = getattr(self, option)
            if self.level == "none" and value != getattr(type(self), option):
                raise ConfigError(
                    f"objective.importance.{option} = {value!r} has nothing to act on: importance.level is "
                    "none. Set objective.importance.level to token, sequence or geometric, or leave the "
                    "others out."
                )


@dataclass(frozen=True)
class DynamicSamplingConfig(PassRule):
    """Dynamic sampling (DAPO): groups all right or all wrong teach nothing, others take their place."""

    mode: Literal["auto", "on", "off"] = "auto"
    """on: a step samples until prompts_per_step groups are mixed; auto: as the objective's paper has it."""
    max_rounds: int = at_least(1, default=10)
    """Rounds of prompts_per_step prompts that a step may sample before the run gives up."""


@dataclass(frozen=True)
class DifficultyConfig(PassRule):
    """Train on prompts of middle difficulty only: where completions pass neither always nor never."""

    min_pass_rate: float = ranged(0.0, "at least 0 and at most 1", lambda v: 0 <= v <= 1)
    """Prompts whose completions pass less often are left out."""
    max_pass_rate: float = ranged(1.0, "at least 0 and at most 1", lambda v: 0 <= v <= 1)
    """Prompts whose completions pass more often are left out."""
    filter_every: int = at_least(0, default=0, note="0: only before step 1")
    """Steps between measurements of all prompts, the first before step 1; 0: only that one."""
    filter_samples: int = at_least(2, default=8)
    """Completions per prompt and measurement."""

    @property
    def filters(self) -> bool:
        """Whether any pass rate is left out."""
        return (self.min_pass_rate, self.max_pass_rate) != (0.0, 1.0)

    def check(self, given: Given) -> None:
        if self.min_pass_rate > self.max_pass_rate:
            raise ConfigError(
                f"objective.difficulty.min_pass_rate = {self.min_pass_rate:g} is above max_pass_rate = "
                f"{self.max_pass_rate:g}: no prompt can have both. Give bounds such as 0.2 and 0.8."
            )
        if self != DifficultyConfig() and not self.filters:
            raise ConfigError(
                f"{self} leaves out no prompt: every pass rate lies in 0..1. Give --min-pass-rate or "
                "--max-pass-rate, or leave the other options of objective.difficulty out."
            )


@dataclass(frozen=True)
class ObjectiveConfig:
    """Which objective, and where it departs from its paper."""

    name: Literal["grpo", "dr_grpo", "dapo", "rloo", "gspo", "cispo"] = "grpo"
    """The algorithm, with the settings of its paper."""
    clip_low: float | None = ranged(None, "above 0 and at most 1", lambda v: 0 < v <= 1)
    """The ratio is clipped below 1 - clip_low (TRL: epsilon). None: 0.2; GSPO 0.0003; CISPO unbounded."""
    clip_high: float | None = ranged(None, "above 0", lambda v: v > 0)
    """The ratio is clipped above 1 + clip_high (TRL: epsilon_high). None: 0.2; DAPO 0.28; GSPO 0.0004;
    CISPO 4, a weight of at most 5."""
    dual_clip: float | None = ranged(None, "above 1: below, it would undo the clip", lambda v: v > 1)
    """Where the advantage A is negative, the loss of a token is at most this many times |A|; 3 is usual."""
    std: Literal["population", "sample", "batch", "none"] | None = None
    """What group-centred rewards are divided by; None: as the objective's paper has it."""
    weights: Literal["per_sequence", "per_token", "sequence_sum", "fixed_length"] | None = None
    """How token losses are averaged; None: as the objective's paper has it."""
    kl_coef: float = at_least(0, default=0.0)
    """Weight of the KL term to the reference (TRL: beta); 0 loads no reference."""
    kl_estimator: Literal["k1", "k2", "k3", "k3_weighted"] = "k3"
    """k3_weighted multiplies k3 by the probability ratio: its gradient is that of the reverse KL."""
    refresh_reference_every: int = at_least(0, default=0, note="0: never")
    """Steps after which the policy replaces the reference (DeepSeek-R1: 400); 0: it stays as it was."""
    overlong_filter: bool = False
    """Completions that were cut off get no loss (DAPO); their rewards still count in their group's mean."""
    soft_overlong: int = at_least(0, default=0, note="0: no punishment")
    """Tokens before max_completion_length over which the reward falls from 0 to -1, added to the others
    (DAPO's soft overlong punishment); 0: none."""
    importance: ImportanceConfig = field(default_factory=ImportanceConfig)
    dynamic_sampling: DynamicSamplingConfig = field(default_factory=DynamicSamplingConfig)
    difficulty: DifficultyConfig = field(default_factory=DifficultyConfig)
    reward_weights: tuple[float, ...] = ()
    """One weight per reward function; empty: all 1."""

    def check(self, given: Given) -> None:
        replaced = {name: getattr(self, name) for name in _PARTS if given.objective is not None}
        ignored = [
            f"objective.{n} = {v!r}" for n, v in replaced.items() if v != getattr(ObjectiveConfig(), n)
        ]
        if ignored:
            raise ConfigError(
                f"{' and '.join(ignored)}: but objective= is given from Python, a {given.objective.name} "
                "with parts of its own. Give it these values, as in razona.objective.grpo(clip_high=0.28), "
                "or leave objective= out."
            )
        for (name, option), reason in _REFUSED.items():
            value = getattr(self, option)
            if self.name == name and value is not None:
                raise ConfigError(
                    f"objective.{option} = {value!r} cannot work with objective.name = '{name}': {reason}. "
                    "Leave it out, or choose another objective."
                )
        if self.reward_weights and not any(self.reward_weights):
            raise ConfigError(
                "objective.reward_weights are all 0: every total reward would be 0 and nothing is learned."
            )


@dataclass(frozen=True)
class GRPOConfig:
    """Train with GRPO and its family: sample completions, score them, learn from who did better."""

    HELP: ClassVar[dict[str, str]] = {
        "model": "model.name model.device model.precision lora.r",
        "prompts and rewards": "data.path data.prompt_column data.system data.task rewards",
        "sampling": "prompts_per_step sampling.group_size sampling.max_completion_length "
        "sampling.temperature",
        "learning": "objective.name objective.kl_coef objective.clip_high optimizer.learning_rate "
        "optimizer.schedule minibatches_per_rollout tokens_per_microbatch",
        "evaluation": "eval.data eval.every",
        "run": "run.num_steps run.output_dir run.seed run.save_every run.resume run.overwrite",
    }

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
    prompts_per_step: int = at_least(1, default=8)
    """Prompts sampled per step (P); a step trains on P * G completions."""
    minibatches_per_rollout: int = at_least(1, default=1)
    """Optimizer updates per pass over a rollout; whole groups stay together."""
    epochs_per_rollout: int = at_least(1, default=1)
    """Passes over a rollout (mu in the papers)."""
    tokens_per_microbatch: int = at_least(0, default=0, note="0: chosen by device")
    """Tokens, prompts counted once, per forward and backward pass; changes memory and speed, not the
    gradient. 0: 1,280 on a CPU, 16,384 elsewhere."""
    measure_kl_every: int = at_least(0, default=0, note="0: not measured")
    """Steps between measurements of the KL to the reference when kl_coef is 0; 0: not measured."""
    reward_timeout: float = ranged(60.0, "above 0 seconds", lambda v: v > 0)
    """Seconds a reward function may take per call."""

    def check(self, given: Given) -> None:
        check_warmup(
            self.optimizer, self.run.num_steps * self.minibatches_per_rollout * self.epochs_per_rollout
        )
        self._check_sampling()
        self._check_objective(given)

    def _check_sampling(self) -> None:
        """Groups that have something to compare, and enough of them."""
        if self.sampling.group_size < 2:
            raise ConfigError(
                f"sampling.group_size = {self.sampling.group_size}: GRPO compares the completions of one "
                "prompt with each other: alone, a completion always has advantage 0. Give at least 2; 8 to "
                "16 is usual."
            )
        if self.sampling.temperature == 0:
            raise ConfigError(
                "sampling.temperature = 0: greedy sampling makes all completions of a group identical: their "
                "deviation is 0, every advantage is 0, and nothing is learned. Give a value clearly above 0, "
                "such as 0.7 to 1.0."
            )
        if self.minibatches_per_rollout > self.prompts_per_step:
            raise ConfigError(
                f"minibatches_per_rollout = {self.minibatches_per_rollout} is more than prompts_per_step = "
                f"{self.prompts_per_step}: whole groups stay together, so some minibatches would be empty. "
                "Sample more prompts per step or make fewer minibatches."
            )

    def _check_objective(self, given: Given) -> None:
        """Options of the objective beside those of the run."""
        objective = self.objective
        weights, rewards = objective.reward_weights, self.rewards
        if weights and rewards and len(weights) != len(rewards):
            raise ConfigError(
                f"objective.reward_weights has {len(weights)} values for {len(rewards)} rewards "
                f"({', '.join(rewards)}). "
                "Give one weight per reward function, in their order, or none for all 1."
            )
        kl_coef = objective.kl_coef if given.objective is None else given.objective.kl_coef
        if objective.refresh_reference_every and not kl_coef and not self.measure_kl_every:
            raise ConfigError(
                f"objective.refresh_reference_every = {objective.refresh_reference_every}: there is nothing "
                "to refresh, because without a KL no reference is kept. Set objective.kl_coef (DeepSeek-R1: "
                "0.001) or measure_kl_every, or leave it out."
            )
        limit = self.sampling.max_completion_length
        if objective.soft_overlong > limit:
            raise ConfigError(
                f"objective.soft_overlong = {objective.soft_overlong} is more than a completion has, "
                f"sampling.max_completion_length = {limit}: every completion would be punished. Give a part "
                "of the limit, such as a fifth (DAPO: 4096 of 20480)."
            )
