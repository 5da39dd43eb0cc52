"""The configurations under TRL's names: any field of TRL's by keyword, checked as soon as it is set."""

from __future__ import annotations

import copy
import math
from typing import Any, ClassVar, Literal

from razona.config.check import validate
from razona.errors import ConfigError
from razona.trl import fields
from razona.trl.fields import Field


class Arguments:
    """What both have. A field is set in the constructor or later; a wrong one is a ConfigError at once."""

    TABLE: ClassVar[dict[str, Field]]
    BEST_METRIC: ClassVar[str]
    """What the best model is chosen by where only load_best_model_at_end is set."""

    def __init__(self, output_dir: str | None = None, **given: Any) -> None:
        for name, field in self.TABLE.items():
            self.__dict__[name] = copy.copy(field.default)
        for name, value in {"output_dir": output_dir, **given}.items():
            setattr(self, name, value)
        own = self.__dict__
        own["output_dir"] = str(output_dir or "trainer_output")
        own["bf16"] = True if own["bf16"] is None else own["bf16"]
        if own["metric_for_best_model"] is None and own["load_best_model_at_end"]:
            own["metric_for_best_model"] = self.BEST_METRIC
        if own["metric_for_best_model"] is not None and own["greater_is_better"] is None:
            own["greater_is_better"] = self.higher_is_better
        self.check()

    def __getattr__(self, name: str) -> Any:  # for the type checker: the fields stand in __dict__
        raise AttributeError(f"{type(self).__name__} has no field '{name}'")

    def __setattr__(self, name: str, value: Any) -> None:
        fields.check_field(self.TABLE, type(self).__name__, name, value)
        self.__dict__[name] = value

    def __repr__(self) -> str:
        default = {**{name: field.default for name, field in self.TABLE.items()}, "bf16": True}
        given = (f"{name}={value!r}" for name, value in self.to_dict().items() if value != default[name])
        return f"{type(self).__name__}({', '.join(given)})"

    def to_dict(self) -> dict[str, Any]:
        """Every field by name; a token is not shown."""
        return {**self.__dict__, "hub_token": self.hub_token and "<HUB_TOKEN>"}

    @property
    def higher_is_better(self) -> bool:
        """Of ``metric_for_best_model``: every figure but a loss."""
        return self.metric_for_best_model not in ("loss", "eval_loss")

    def check(self) -> None:
        """ConfigError for what cannot work together."""
        if self.greater_is_better not in (None, self.higher_is_better):
            which = "highest" if self.higher_is_better else "lowest"
            raise ConfigError(
                f"greater_is_better={self.greater_is_better} with metric_for_best_model="
                f"{self.metric_for_best_model!r}: the best model is the one with the {which} value. Leave "
                "greater_is_better out."
            )
        for name, known in CHOICES.items():
            if name in self.TABLE and getattr(self, name) not in known:
                raise ConfigError(
                    f"{name} = {getattr(self, name)!r} is none of {', '.join(map(repr, known))}, those that "
                    "are supported."
                )


CHOICES: dict[str, tuple[Any, ...]] = {
    "lr_scheduler_type": ("linear", "cosine", "constant", "constant_with_warmup"),
    "optim": ("adamw_torch_fused", "adamw_torch"),
    "logging_strategy": ("steps", "epoch", "no"),
    "eval_strategy": ("steps", "epoch", "no"),
    "save_strategy": ("steps", "epoch", "no"),
    "scale_rewards": ("group", "batch", "none", True, False),
    "importance_sampling_level": ("token", "sequence"),
    "train_sampling_strategy": ("random", "sequential"),
}
"""Values that are honoured. An enum of transformers equals its text."""


class GRPOConfig(Arguments):
    """TRL's GRPOConfig, with the defaults of TRL 1.16.0. docs/from-trl.md says what becomes of each field.

    ``num_generations`` completions per prompt; ``per_device_train_batch_size`` counts completions.
    """

    TABLE = fields.GRPO
    BEST_METRIC = "eval_reward"

    def check(self) -> None:
        """As in TRL, before any model is loaded: batch sizes, and what the objective cannot do."""
        super().check()
        _check_batch(self)
        _check_loss(self)
        from razona.trl.translate import grpo_config  # it imports this class

        validate(grpo_config(self, num_rows=10**9))  # the data are not known yet: no run is too short


class SFTConfig(Arguments):
    """TRL's SFTConfig, with the defaults of TRL 1.16.0. docs/from-trl.md says what becomes of each field."""

    TABLE = fields.SFT
    BEST_METRIC = "eval_loss"

    def check(self) -> None:
        super().check()
        metric = str(self.metric_for_best_model or self.BEST_METRIC)
        if metric.removeprefix("eval_") not in SFT_METRICS:
            raise ConfigError(
                f"metric_for_best_model = {metric!r} is none of 'eval_loss', 'eval_mean_token_accuracy', "
                "those that are measured."
            )


SFT_METRICS: dict[str, Literal["eval/loss", "eval/token_accuracy"]] = {
    "loss": "eval/loss",
    "mean_token_accuracy": "eval/token_accuracy",
}
"""Figures of a held-out evaluation in SFT that can choose the best model: TRL's name -> razona's."""


def updates_per_rollout(args: Arguments) -> int:
    """TRL's steps, which are optimizer updates, that one rollout serves."""
    return _minibatches(args) * int(args.num_iterations)


def completions_per_rollout(args: Arguments) -> int:
    """Completions sampled at once, for one update or more."""
    update = args.per_device_train_batch_size * args.gradient_accumulation_steps
    return int(update * _minibatches(args))


def _minibatches(args: Arguments) -> int:
    """Updates that go once over a rollout: micro-steps of a generation batch / those of an update. Fewer than
    one is one: several generations with the same weights are one rollout.
    """
    micro_steps, accumulated = _steps_per_generation(args), args.gradient_accumulation_steps
    return max(1, micro_steps // accumulated)


def _steps_per_generation(args: Arguments) -> int:
    if args.steps_per_generation is not None:
        return int(args.steps_per_generation)
    if args.generation_batch_size is not None:
        return int(args.generation_batch_size // args.per_device_train_batch_size)
    return int(args.gradient_accumulation_steps)


def _check_batch(args: Arguments) -> None:
    size, group, accumulated = (
        args.per_device_train_batch_size, args.num_generations, args.gradient_accumulation_steps,
    )  # fmt: skip
    for name in ("per_device_train_batch_size", "gradient_accumulation_steps", "num_iterations"):
        if not isinstance(getattr(args, name), int) or getattr(args, name) < 1:
            raise ConfigError(f"{name} = {getattr(args, name)!r} cannot work: it must be at least 1.")
    if not isinstance(group, int) or group < 2:
        raise ConfigError(
            f"num_generations = {group!r}: GRPO compares the completions of one prompt with each other: "
            "alone, a completion always has advantage 0. Give at least 2; 8 to 16 is usual."
        )
    if args.generation_batch_size is not None and args.steps_per_generation is not None:
        raise ConfigError(
            f"generation_batch_size = {args.generation_batch_size} and steps_per_generation = "
            f"{args.steps_per_generation} say the same in two ways. Give one of them."
        )
    if args.generation_batch_size is not None and args.generation_batch_size % size:
        raise ConfigError(
            f"generation_batch_size = {args.generation_batch_size} must be a multiple of "
            f"per_device_train_batch_size = {size}."
        )
    micro_steps = _steps_per_generation(args)
    if micro_steps < 1 or (micro_steps % accumulated and accumulated % micro_steps):
        raise ConfigError(
            f"a generation serves {micro_steps} micro-steps and an update takes {accumulated} "
            "(gradient_accumulation_steps): one must be a multiple of the other."
        )
    if (size * micro_steps) % group:
        step = group // math.gcd(group, micro_steps)
        low = size // step * step
        sizes = " or ".join(str(n) for n in (low, low + step) if n)
        divisors = [n for n in range(2, size * micro_steps + 1) if size * micro_steps % n == 0]
        times = f" * {micro_steps} micro-steps" if micro_steps > 1 else ""
        raise ConfigError(
            f"per_device_train_batch_size = {size}{times} is not divisible by num_generations = {group}: it "
            f"counts completions, and every prompt takes {group} places. Give {sizes} (any multiple of "
            f"{step}), or num_generations = {', '.join(map(str, divisors))}."
        )
    prompts, minibatches = completions_per_rollout(args) // group, _minibatches(args)
    if minibatches > prompts:
        raise ConfigError(
            f"a generation of {prompts} prompts cannot serve {minibatches} updates: the completions of a "
            "prompt stay together here. Raise per_device_train_batch_size, or lower steps_per_generation."
        )
    per = updates_per_rollout(args)
    if args.max_steps > 0 and args.max_steps % per:
        raise ConfigError(
            f"max_steps = {args.max_steps} ends within a rollout, which serves {per} updates. Give a "
            f"multiple of {per}."
        )


LOSSES = ("grpo", "dr_grpo", "dapo", "bnpo", "cispo")


def _check_loss(args: Arguments) -> None:
    if args.loss_type not in LOSSES:
        raise ConfigError(
            f"loss_type = {args.loss_type!r} is none of {', '.join(map(repr, LOSSES))}, those that are "
            "supported."
        )
    if args.loss_type == "bnpo" and args.gradient_accumulation_steps > 1:
        raise ConfigError(
            "loss_type = 'bnpo' averages over the tokens of each micro-batch, so it changes with "
            f"gradient_accumulation_steps = {args.gradient_accumulation_steps}. Take 'dapo', which averages "
            "over all tokens of the update."
        )
    if args.importance_sampling_level == "sequence" and args.loss_type != "grpo":
        raise ConfigError(
            f"importance_sampling_level = 'sequence' with loss_type = {args.loss_type!r}: GSPO has one term "
            "per completion, whatever its length. Set loss_type='grpo'."
        )
    high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    if args.loss_type == "cispo" and high <= 1:
        raise ConfigError(
            f"loss_type = 'cispo' with a largest weight of {high} (epsilon_high): every token would be "
            "weighted down alike. Set epsilon_high=5.0, ScaleRL's."
        )
    if args.delta is not None and (args.loss_type == "cispo" or args.importance_sampling_level == "sequence"):
        raise ConfigError(
            f"delta = {args.delta} bounds the ratio of a token, and this loss has none. Leave it out."
        )
    if args.sync_ref_model and (not args.beta or args.ref_model_mixup_alpha != 1.0):
        raise ConfigError(
            f"sync_ref_model=True with beta = {args.beta} and ref_model_mixup_alpha = "
            f"{args.ref_model_mixup_alpha}: the policy replaces the reference of a KL whole. Set beta above "
            "0 and ref_model_mixup_alpha=1.0."
        )
    if args.ref_model_mixup_alpha != 0.6 and not args.sync_ref_model:
        raise ConfigError(
            "ref_model_mixup_alpha does nothing without sync_ref_model=True. Set it, or leave both out."
        )
    if args.ref_model_sync_steps != 512 and not args.sync_ref_model:
        raise ConfigError(
            "ref_model_sync_steps does nothing without sync_ref_model=True. Set it, or leave both out."
        )
