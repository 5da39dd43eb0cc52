"""Which values an option can have: types for every spelling, ranges, and options that exclude each other."""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Callable
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from razona.config.commands import GenerateConfig
from razona.config.common import EvalConfig, LoRAConfig
from razona.config.grpo import GRPOConfig, ObjectiveConfig
from razona.config.sft import SFTConfig, SFTEvalConfig
from razona.errors import ConfigError, nearest

_REASONS = {
    "sampling.group_size": (
        "GRPO compares the completions of one prompt with each other: alone, a completion always has "
        "advantage 0. Give at least 2; 8 to 16 is usual."
    ),
    "sampling.temperature": (
        "greedy sampling makes all completions of a group identical: their deviation is 0, every "
        "advantage is 0, and nothing is learned. Give a value clearly above 0, such as 0.7 to 1.0."
    ),
}

_RANGES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "model.name": ("not empty", bool),
    "lora.r": ("at least 0 (0: no adapter)", lambda v: v >= 0),
    "lora.alpha": ("at least 1", lambda v: v >= 1),
    "data.max_prompt_length": ("at least 1", lambda v: v is None or v >= 1),
    "sampling.group_size": ("at least 1", lambda v: v >= 1),
    "sampling.max_completion_length": ("at least 1", lambda v: v >= 1),
    "sampling.temperature": ("at least 0", lambda v: v >= 0),
    "sampling.top_p": ("above 0 and at most 1 (1 keeps all tokens)", lambda v: 0 < v <= 1),
    "sampling.top_k": ("at least 0 (0 keeps all tokens)", lambda v: v >= 0),
    "sampling.min_p": ("at least 0 and below 1 (0 keeps all tokens)", lambda v: 0 <= v < 1),
    "sampling.stop_token_ids": ("token ids, at least 0", lambda v: all(i >= 0 for i in v)),
    "objective.clip_low": ("above 0 and at most 1", lambda v: v is None or 0 < v <= 1),
    "objective.clip_high": ("above 0", lambda v: v is None or v > 0),
    "objective.dual_clip": ("above 1: below, it would undo the clip", lambda v: v is None or v > 1),
    "objective.kl_coef": ("at least 0", lambda v: v >= 0),
    "objective.refresh_reference_every": ("at least 0 (0: never)", lambda v: v >= 0),
    "objective.soft_overlong": ("at least 0 (0: no punishment)", lambda v: v >= 0),
    "objective.dynamic_sampling.max_rounds": ("at least 1", lambda v: v >= 1),
    "objective.importance.low": ("at least 0 and at most 1, the ratio of equals", lambda v: 0 <= v <= 1),
    "objective.importance.high": ("at least 1, the ratio of equals", lambda v: v >= 1),
    "objective.difficulty.min_pass_rate": ("at least 0 and at most 1", lambda v: 0 <= v <= 1),
    "objective.difficulty.max_pass_rate": ("at least 0 and at most 1", lambda v: 0 <= v <= 1),
    "objective.difficulty.filter_every": ("at least 0 (0: only before step 1)", lambda v: v >= 0),
    "objective.difficulty.filter_samples": ("at least 2", lambda v: v >= 2),
    "optimizer.learning_rate": ("at least 0", lambda v: v >= 0),
    "optimizer.warmup_steps": ("at least 0", lambda v: v >= 0),
    "optimizer.betas": ("two numbers, at least 0 and below 1", lambda v: all(0 <= b < 1 for b in v)),
    "optimizer.eps": ("above 0", lambda v: v > 0),
    "optimizer.weight_decay": ("at least 0", lambda v: v >= 0),
    "optimizer.max_grad_norm": ("at least 0 (0 leaves gradients as they are)", lambda v: v >= 0),
    "eval.every": ("at least 0 (0: only after the last step)", lambda v: v >= 0),
    "eval.samples": ("at least 1", lambda v: v >= 1),
    "eval.temperature": ("at least 0", lambda v: v >= 0),
    "eval.best_metric": ("the name of an eval/... series", lambda v: not v or v.startswith("eval/")),
    "run.output_dir": ("not empty", bool),
    "run.num_steps": ("at least 1", lambda v: v >= 1),
    "run.seed": ("at least 0", lambda v: v >= 0),
    "run.save_every": ("at least 0 (0: only at the end)", lambda v: v >= 0),
    "run.keep_checkpoints": ("at least 1", lambda v: v >= 1),
    "run.print_every": ("at least 0 (0: never)", lambda v: v >= 0),
    "prompts_per_step": ("at least 1", lambda v: v >= 1),
    "minibatches_per_rollout": ("at least 1", lambda v: v >= 1),
    "epochs_per_rollout": ("at least 1", lambda v: v >= 1),
    "tokens_per_microbatch": ("at least 0 (0: chosen by device)", lambda v: v >= 0),
    "measure_kl_every": ("at least 0 (0: not measured)", lambda v: v >= 0),
    "reward_timeout": ("above 0 seconds", lambda v: v > 0),
    "rows_per_step": ("at least 1", lambda v: v >= 1),
    "max_length": ("at least 2: a prompt token and a token to learn", lambda v: v >= 2),
    "num_prompts": ("at least 0 (0: all)", lambda v: v >= 0),
    "prompts_per_chunk": ("at least 1", lambda v: v >= 1),
    "seed": ("at least 0", lambda v: v >= 0),
    "cold_start_steps": ("at least 1", lambda v: v >= 1),
    "grpo_steps": ("at least 1", lambda v: v >= 1),
    "eval_prompts": ("at least 2: an error bar needs two", lambda v: v >= 2),
}


def validate(config: Any, *, eval_rows: bool | None = None, objective: Any = None) -> None:
    """Raise ConfigError for a wrong type, a value out of range, or options that exclude each other.

    For configurations built in Python too: dataclasses do not check their fields. ``eval_rows`` says whether
    held-out rows are given beside the configuration; None: not known yet. ``objective`` is an
    `razona.objective.Objective` that stands in for that of the configuration.
    """
    _check_fields(config)
    if isinstance(config, GRPOConfig):
        _check_grpo(config)
        _check_objective(config, objective)
    if isinstance(config, GRPOConfig | SFTConfig) and eval_rows is False and not config.eval.data:
        _check_no_evaluation(config.eval)
    if isinstance(config, GenerateConfig) and config.prompts and config.data.path:
        raise ConfigError(
            f"prompts ({len(config.prompts)}) and data.path = {config.data.path!r} are both given, and one "
            "would be left out. Give --prompt or --data."
        )
    lora = getattr(config, "lora", None)
    if lora and lora.r and lora.adapter:
        raise ConfigError(
            f"lora.r = {lora.r} and lora.adapter = {lora.adapter!r}: a fresh adapter, and one that has its "
            "own rank. Give one of them."
        )
    evaluation, run, optimizer = (getattr(config, name, None) for name in ("eval", "run", "optimizer"))
    if isinstance(evaluation, EvalConfig) and evaluation.temperature == 0 and evaluation.samples > 1:
        raise ConfigError(
            f"eval.samples = {evaluation.samples} at eval.temperature = 0: greedy completions of a "
            "prompt are all the same. Set eval.samples = 1, or a temperature above 0."
        )
    if run and run.resume and run.overwrite:
        raise ConfigError(
            "run.resume and run.overwrite exclude each other: go on with the run, or start anew."
        )
    updates = run.num_steps if run else 0
    if isinstance(config, GRPOConfig):
        updates *= config.minibatches_per_rollout * config.epochs_per_rollout
    if run and optimizer and optimizer.warmup_steps > updates:
        raise ConfigError(
            f"optimizer.warmup_steps = {optimizer.warmup_steps} is more than the run has updates, "
            f"{updates}: the learning rate would never be reached. Warm up for fewer steps."
        )


def convert(hint: Any, value: Any, name: str) -> Any:
    """``value`` as the type ``hint``: lists become tuples, whole numbers floats; nothing else is guessed.

    Raises ConfigError naming ``name``, the value and the type expected.
    """
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        return convert(next(arg for arg in args if arg is not type(None)), value, name)
    if origin is Literal:
        if isinstance(value, str) and value in args:
            return value
        given = nearest(value, args) if isinstance(value, str) else ""
        raise ConfigError(f"{name} = {value!r} is none of {', '.join(map(repr, args))}.{given}")
    if origin is tuple and isinstance(value, (list, tuple)):
        if args[-1] is Ellipsis:
            return tuple(convert(args[0], item, f"{name}[{i}]") for i, item in enumerate(value))
        if len(value) == len(args):
            return tuple(
                convert(arg, item, f"{name}[{i}]")
                for i, (arg, item) in enumerate(zip(args, value, strict=True))
            )
    elif origin is dict and isinstance(value, dict):
        return {convert(args[0], k, name): convert(args[1], v, f"{name}.{k}") for k, v in value.items()}
    elif hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        if math.isfinite(value):
            return float(value)
        raise ConfigError(f"{name} = {value!r} is not a finite number.")
    elif type(value) is hint:
        return value
    raise ConfigError(f"{name} = {value!r} is {_kind(value)}, expected {_expected(hint)}.")


def _check_fields(config: Any, table: str = "") -> None:
    """Types, then ranges, of every field."""
    hints = get_type_hints(type(config))
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), f"{table}{field.name}"
        if dataclasses.is_dataclass(hints[field.name]):
            if not isinstance(value, hints[field.name]):
                raise ConfigError(
                    f"{name} = {value!r} is {_kind(value)}, expected a {hints[field.name].__name__}."
                )
            _check_fields(value, f"{name}.")
            continue
        if isinstance(value, list):
            raise ConfigError(
                f"{name} = {value!r} is a list, expected a tuple: write ({', '.join(map(repr, value))},)."
            )
        convert(hints[field.name], value, name)
        if name in _RANGES and not _RANGES[name][1](value):
            raise ConfigError(f"{name} = {value!r} cannot work: it must be {_RANGES[name][0]}.")


def _check_no_evaluation(config: EvalConfig | SFTEvalConfig) -> None:
    """Without held-out rows every other option of evaluation would be ignored."""
    values = {field: getattr(config, field.name) for field in dataclasses.fields(config)}
    given = [f"eval.{field.name} = {v!r}" for field, v in values.items() if v != field.default]
    if given:
        raise ConfigError(
            f"{' and '.join(given)}: but eval.data is empty, nothing to evaluate on. "
            "Give --eval-data FILE, or eval_rows from Python."
        )


def check_adapter(config: LoRAConfig) -> None:
    """ConfigError for options of a fresh adapter where none is made: they would be ignored."""
    given = {name: getattr(config, name) for name in ("alpha", "rslora", "target_modules")}
    ignored = [f"lora.{name} = {v!r}" for name, v in given.items() if v != getattr(LoRAConfig, name)]
    if ignored and not config.r:
        raise ConfigError(
            f"{' and '.join(ignored)}: but lora.r is 0, no fresh adapter to make. Give --lora.r 16."
        )


def _check_grpo(config: GRPOConfig) -> None:
    """What only a GRPO run needs."""
    if config.sampling.group_size < 2:
        raise ConfigError(
            f"sampling.group_size = {config.sampling.group_size}: {_REASONS['sampling.group_size']}"
        )
    if config.sampling.temperature == 0:
        raise ConfigError(f"sampling.temperature = 0: {_REASONS['sampling.temperature']}")
    if config.minibatches_per_rollout > config.prompts_per_step:
        raise ConfigError(
            f"minibatches_per_rollout = {config.minibatches_per_rollout} is more than prompts_per_step = "
            f"{config.prompts_per_step}: whole groups stay together, so some minibatches would be empty. "
            "Sample more prompts per step or make fewer minibatches."
        )
    weights, rewards = config.objective.reward_weights, config.rewards
    if weights and rewards and len(weights) != len(rewards):
        raise ConfigError(
            f"objective.reward_weights has {len(weights)} values for {len(rewards)} rewards "
            f"({', '.join(rewards)}). "
            "Give one weight per reward function, in their order, or none for all 1."
        )
    if weights and not any(weights):
        raise ConfigError(
            "objective.reward_weights are all 0: every total reward would be 0 and nothing is learned."
        )


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


def _check_objective(config: GRPOConfig, given: Any) -> None:
    """Options of the objective that exclude each other, or would do nothing. ``given``: see `validate`."""
    objective, importance = config.objective, config.objective.importance
    kl_coef = objective.kl_coef if given is None else given.kl_coef
    replaced = {name: getattr(objective, name) for name in _PARTS if given is not None}
    ignored = [f"objective.{n} = {v!r}" for n, v in replaced.items() if v != getattr(ObjectiveConfig(), n)]
    if ignored:
        raise ConfigError(
            f"{' and '.join(ignored)}: but objective= is given from Python, a {given.name} with parts of its "
            "own. Give it these values, as in razona.objective.grpo(clip_high=0.28), or leave objective= out."
        )
    for (name, option), reason in _REFUSED.items():
        value = getattr(objective, option)
        if objective.name == name and value is not None:
            raise ConfigError(
                f"objective.{option} = {value!r} cannot work with objective.name = '{name}': {reason}. "
                "Leave it out, or choose another objective."
            )
    for option in ("outside", "low", "high"):
        value = getattr(importance, option)
        if importance.level == "none" and value != getattr(type(importance)(), option):
            raise ConfigError(
                f"objective.importance.{option} = {value!r} has nothing to act on: importance.level is none. "
                "Set objective.importance.level to token, sequence or geometric, or leave the others out."
            )
    if objective.refresh_reference_every and not kl_coef and not config.measure_kl_every:
        raise ConfigError(
            f"objective.refresh_reference_every = {objective.refresh_reference_every}: there is nothing to "
            "refresh, because without a KL no reference is kept. Set objective.kl_coef (DeepSeek-R1: 0.001) "
            "or measure_kl_every, or leave it out."
        )
    limit = config.sampling.max_completion_length
    if objective.soft_overlong > limit:
        raise ConfigError(
            f"objective.soft_overlong = {objective.soft_overlong} is more than a completion has, "
            f"sampling.max_completion_length = {limit}: every completion would be punished. Give a part of "
            "the limit, such as a fifth (DAPO: 4096 of 20480)."
        )


def _kind(value: Any) -> str:
    names = {bool: "a truth value", int: "a whole number", float: "a number", str: "text", dict: "a table"}
    return names.get(
        type(value), "a list" if isinstance(value, (list, tuple)) else f"a {type(value).__name__}"
    )


def _expected(hint: Any) -> str:
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text", dict: "a table"}
    if get_origin(hint) is tuple:
        args = get_args(hint)
        count = "a list" if args[-1] is Ellipsis else f"a list of {len(args)}"
        plural = {int: "whole numbers", float: "numbers", str: "texts"}
        return f"{count} of {plural[args[0]]}" if args[-1] is Ellipsis else f"{count} {plural[args[0]]}"
    return names.get(hint if isinstance(hint, type) else get_origin(hint), str(hint))
