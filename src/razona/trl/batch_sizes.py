"""How many completions and updates a rollout has, from TRL's five fields that say it."""

from __future__ import annotations

import math

from razona.errors import ConfigError
from razona.trl.arguments import Arguments


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


def check_batch(args: Arguments) -> None:
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
