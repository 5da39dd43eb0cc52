"""Reward functions as TRL calls them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from razona.errors import ConfigError
from razona.rewards.calling import is_async
from razona.rewards.model import ModelReward

OFFERED = ("trainer_state", "log_metric", "log_extra")


class RewardLogs:
    """What reward functions logged in the present step by ``log_metric`` and ``log_extra``: of each
    function's first call, which is that for training; a held-out evaluation may follow.
    """

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self.metrics: dict[str, list[float]] = {}
        self.extra: dict[str, list[Any]] = {}

    def offer(self, function: int) -> dict[str, Callable[..., None]]:
        """The two functions for one call of the reward function with this number."""
        if function in self._seen:
            return {"log_metric": lambda name, value: None, "log_extra": lambda column, values: None}
        self._seen.add(function)
        return {
            "log_metric": lambda name, value: self.metrics.setdefault(name, []).append(float(value)),
            "log_extra": lambda column, values: self.extra.setdefault(column, []).extend(values),
        }

    def pop(self) -> tuple[dict[str, float], dict[str, list[Any]]]:
        """Means of the metrics, and the columns, of the step that is over."""
        metrics = {name: sum(values) / len(values) for name, values in self.metrics.items()}
        extra = self.extra
        self._seen, self.metrics, self.extra = set(), {}, {}
        return metrics, extra


def listening(
    function: Callable[..., Any], number: int, logs: RewardLogs, state: Callable[[], Any]
) -> Callable[..., Any]:
    """``function`` with TRL's ``trainer_state``, ``log_metric`` and ``log_extra``, where it takes them."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return function  # `bind` says what is wrong
    parameters = signature.parameters.values()
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    taken = [name for name in OFFERED if takes_all or name in signature.parameters]
    if not taken:
        return function

    def offered() -> dict[str, Any]:
        everything = {"trainer_state": state(), **logs.offer(number)}
        return {name: everything[name] for name in taken}

    def call(**columns: Any) -> Any:
        return function(**columns, **offered())

    async def call_async(**columns: Any) -> Any:
        return await function(**columns, **offered())

    wrapped: Any = call_async if is_async(function) else call
    named = function
    while isinstance(named, functools.partial):
        named = named.func
    wrapped.__name__ = getattr(named, "__name__", type(named).__name__)
    wrapped.__signature__ = signature.replace(parameters=[p for p in parameters if p.name not in OFFERED])
    return wrapped  # type: ignore[no-any-return]


def reward_functions(
    reward_funcs: Any, processing_classes: Any, logs: RewardLogs, state: Callable[[], Any], *, device: Any
) -> list[Callable[..., Any]]:
    """``reward_funcs``, one or several, as functions: a name or a model becomes one that scores."""
    given = (
        list(reward_funcs)
        if isinstance(reward_funcs, Sequence) and not isinstance(reward_funcs, str)
        else [reward_funcs]
    )
    tokenizers = (
        list(processing_classes) if isinstance(processing_classes, Sequence) else [processing_classes]
    )
    tokenizers = tokenizers if len(tokenizers) == len(given) else tokenizers * len(given)
    if len(tokenizers) != len(given):
        raise ConfigError(
            f"{len(given)} reward_funcs and {len(tokenizers)} reward_processing_classes. Give one for each, "
            "None for a function."
        )
    return [
        ModelReward(reward, tokenizer, device=device)
        if isinstance(reward, (str, torch.nn.Module))
        else listening(reward, number, logs, state)
        for number, (reward, tokenizer) in enumerate(zip(given, tokenizers, strict=True))
    ]
