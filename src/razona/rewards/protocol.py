"""Reward functions are bound to the data's columns before anything is generated, then called by keyword."""

from __future__ import annotations

import functools
import inspect
import math
import numbers
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from razona.errors import ConfigError, RewardError, nearest
from razona.rewards.calling import TimedOut, call, call_all, is_async
from razona.rewards.resolve import resolve
from razona.types import Group

ALWAYS = ("prompts", "completions", "completion_ids")
RESERVED = ("reward", "truncated", "completion_length")
"""Names of eval/... series that are there beside those of the reward functions."""


RewardSpec = Callable[..., Any] | str
"""A reward function, or what ``resolve`` finds one by."""


@dataclass(frozen=True)
class BoundReward:
    """A reward function that fits the data. ``parameters`` are the names it is called with (None: all)."""

    function: Callable[..., Any]
    name: str
    weight: float
    parameters: frozenset[str] | None
    fixed: frozenset[str]
    """Names that a functools.partial has already given a value."""
    notices: tuple[str, ...]
    """Lines to print: parameters that stay at their defaults because no column feeds them."""


def bind(
    reward_fns: Sequence[RewardSpec],
    *,
    columns: Sequence[str],
    names: Sequence[str] | None = None,
    weights: Sequence[float] | None = None,
) -> list[BoundReward]:
    """Check reward functions (or their specs, see ``resolve``) against the columns of the data.

    A function that takes ``**kwargs`` gets everything, another only what it names. Display names are the
    functions' own; where two are alike the later ones become ``name_2``, ``name_3`` (``lambda`` for lambdas).
    ``weights`` default to 1. Raises RewardError when a required parameter is fed by no column, and for a name
    whose figures would fall together with others.
    """
    if not reward_fns:
        raise RewardError(
            "No reward function was given: there is nothing to learn from. Name one with --rewards."
        )
    for what, given in (("names", names), ("weights", weights)):
        if given and len(given) != len(reward_fns):
            raise RewardError(
                f"There are {len(reward_fns)} reward functions and {len(given)} {what}. Give one for each, "
                "in the same order."
            )
    for weight in weights or ():
        if not math.isfinite(weight):
            raise RewardError(f"A reward weight is {weight}. Weights are finite numbers.")
    if names and len(set(names)) < len(names):
        raise RewardError(f"Reward names must differ, and these do not: {', '.join(names)}.")
    for column in columns:
        if column in ALWAYS:
            raise RewardError(
                f"The data set has a column {column!r}, a name that reward functions get something else "
                f"under. Rename it: --data.rename {column}=data_{column}."
            )
    functions = [resolve(fn) if isinstance(fn, str) else fn for fn in reward_fns]
    shown = names or _unique([_own_name(fn) for fn in functions])
    given_weights = weights or [1.0] * len(functions)
    return [
        _bind_one(fn, name, float(weight), columns)
        for fn, name, weight in zip(functions, shown, given_weights, strict=True)
    ]


def _bind_one(function: Callable[..., Any], name: str, weight: float, columns: Sequence[str]) -> BoundReward:
    if isinstance(function, type) or not callable(function):
        raise RewardError(f"Reward {name!r} is {function!r:.80}. It must be a function or a callable object.")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise RewardError(
            f"Reward function {name!r} does not say which parameters it takes ({error}). Wrap it in a def."
        ) from error
    fed = {*ALWAYS, *columns}
    fixed = frozenset(function.keywords) if isinstance(function, functools.partial) else frozenset()
    named: set[str] = set()
    notices: list[str] = []
    takes_all = False
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            takes_all = True
        elif parameter.kind is parameter.VAR_POSITIONAL or parameter.name in fixed:
            continue
        elif parameter.kind is parameter.POSITIONAL_ONLY and parameter.default is parameter.empty:
            raise RewardError(
                f"Reward function {name!r} takes {parameter.name!r} by position only (the / in its "
                "signature), and reward functions are called by keyword. Remove the /."
            )
        elif parameter.name in fed:
            named.add(parameter.name)
        elif parameter.default is parameter.empty:
            raise _unfed(name, parameter.name, columns)
        else:
            notices.append(
                f"Reward function {name!r}: no column feeds its parameter {parameter.name!r}, which stays at "
                f"its default {parameter.default!r:.40}.{nearest(parameter.name, columns)}"
            )
    if name in RESERVED or "/" in name:
        raise RewardError(
            f"A reward function is called {name!r}, and its figures, such as eval/{name}, would fall "
            "together with those of the run. Give the function another name: in its def, or with "
            f"{name.replace('/', '_')}.__name__ = 'another'."
        )
    return BoundReward(function, name, weight, None if takes_all else frozenset(named), fixed, tuple(notices))


def _unfed(name: str, parameter: str, columns: Sequence[str]) -> RewardError:
    others = [*columns, *ALWAYS]
    if parameter in ("completion", "prompt", "completion_id"):
        hint = f" Did you mean '{parameter}s'?"
    else:
        hint = nearest(parameter, others)
    return RewardError(
        f"Reward function {name!r} needs {parameter!r}, and the data has no column of that name. Columns: "
        f"{', '.join(columns) or 'none'}; always there: {', '.join(ALWAYS)}.{hint} Give the parameter the "
        f"exact name of a column, or rename the column: --data.rename COLUMN={parameter}."
    )


def _own_name(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__name__", None) or type(function).__name__
    return "lambda" if name == "<lambda>" else str(name)


def _unique(names: Sequence[str]) -> list[str]:
    unique: list[str] = []
    for name in names:
        number, candidate = 1, name
        while candidate in unique:
            number += 1
            candidate = f"{name}_{number}"
        unique.append(candidate)
    return unique


class _Fault(Exception):
    """What is wrong with an answer. ``index``: the completion it is about, where that is known."""

    def __init__(self, text: str, index: int | None = None, *, timed_out: bool = False) -> None:
        super().__init__(text)
        self.index = index
        self.timed_out = timed_out


def score(
    bound: Sequence[BoundReward], groups: Sequence[Group], *, timeout: float | None = None
) -> list[list[float]]:
    """Rewards [B][R] of the completions of ``groups``, group after group; nan where a function abstained
    (None).

    Functions get strings or messages as the prompt was. Plain functions run one after another; coroutine
    functions run at the same time, on an event loop of their own, so this also works inside a notebook.
    ``timeout`` is in seconds per call; plain functions then run in a worker thread, which cannot be stopped:
    after a time-out it goes on in the background, and one stuck in C code that holds the interpreter lock (a
    catastrophic regular expression) cannot even be noticed. With None or 0 there is no limit, and plain
    functions run in this thread. Raises RewardError for an exception (sys.exit() is one), a time-out, a wrong
    length, NaN, inf or what is no number.
    """
    limit = timeout or None
    calls = [(b.function, _arguments(b, groups)) for b in bound]
    size = sum(len(group.completions) for group in groups)
    columns: list[list[float]] = []
    for one, outcome in zip(bound, call_all(calls, limit), strict=True):
        try:
            columns.append(_values(outcome, size))
        except _Fault as fault:
            raise _explain(one, groups, fault, limit) from fault.__cause__
    return [list(row) for row in zip(*columns, strict=True)]


def _arguments(bound: BoundReward, groups: Sequence[Group]) -> dict[str, Any]:
    """The keyword arguments of one call. Lists and messages are fresh: a function may change them."""
    pairs = [(group.prompt, completion) for group in groups for completion in group.completions]
    columns = groups[0].prompt.columns if groups else {}
    arguments: dict[str, Any] = {name: [prompt.columns[name] for prompt, _ in pairs] for name in columns}
    arguments["prompts"] = [
        p.input if isinstance(p.input, str) else [dict(m) for m in p.input] for p, _ in pairs
    ]
    arguments["completions"] = [
        c.text if isinstance(p.input, str) else [{"role": "assistant", "content": c.text}] for p, c in pairs
    ]
    arguments["completion_ids"] = [list(c.token_ids) for _, c in pairs]
    wanted = arguments.keys() if bound.parameters is None else bound.parameters
    return {name: value for name, value in arguments.items() if name in wanted and name not in bound.fixed}


def _values(outcome: Any, size: int) -> list[float]:
    """A function's answer as ``size`` floats. Raises _Fault."""
    if isinstance(outcome, TimedOut):
        raise _Fault(f"took longer than {outcome.seconds:g} s (reward_timeout)", timed_out=True) from outcome
    if isinstance(outcome, BaseException):
        hint = ""
        if "main thread" in str(outcome):
            hint = (
                ". Reward functions run in a worker thread, where signal.alarm does not work: switch such "
                "time limits off (math_verify: parsing_timeout=None, timeout_seconds=None)"
            )
        elif isinstance(outcome, SystemExit):
            hint = ". It may not end the program: return None where it cannot score, or raise an error"
        raise _Fault(f"raised {type(outcome).__name__}: {outcome}{hint}") from outcome
    plain = outcome.tolist() if hasattr(outcome, "tolist") else outcome
    if isinstance(plain, (str, Mapping)) or not isinstance(plain, Iterable):
        raise _Fault(f"returned {outcome!r:.60}, not a list of {size} numbers, one per completion")
    values = list(plain)
    if len(values) != size:
        raise _Fault(f"returned {len(values)} rewards for {size} completions. It must return one for each")
    return [_number(value, index) for index, value in enumerate(values)]


def _number(value: Any, index: int) -> float:
    if value is None:
        return math.nan
    try:
        plain = value.item() if hasattr(value, "item") else value
        if not isinstance(plain, numbers.Real):
            raise TypeError
        number = float(plain)
    except (TypeError, ValueError, RuntimeError):
        raise _Fault(
            f"returned {value!r:.60} ({type(value).__name__}), which is not a number", index
        ) from None
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise _Fault(f"returned {number}. Return a finite number, or None where it cannot score", index)
    return number


def _explain(
    bound: BoundReward, groups: Sequence[Group], fault: _Fault, timeout: float | None
) -> RewardError:
    """The error, with the row and the completion it is about."""
    singles = [Group(group.prompt, (completion,)) for group in groups for completion in group.completions]
    if not singles:
        return RewardError(f"Reward function {bound.name!r} {fault}. It was called without completions.")
    index = fault.index if fault.index is not None else _culprit(bound, singles, fault, timeout)
    at = singles[index or 0]
    text = at.completions[0].text
    quoted = repr(text if len(text) <= 80 else text[:77] + "...")
    batch = f"The call was for {len(singles)} completions, and no single one explains it; the first: "
    return RewardError(
        f"Reward function {bound.name!r} {fault}. {batch if index is None else ''}"
        f"Row {at.prompt.id}, completion {quoted}."
    )


def _culprit(
    bound: BoundReward, singles: Sequence[Group], fault: _Fault, timeout: float | None
) -> int | None:
    """The first completion that fails when scored alone, searched for at most as long as a call may take."""
    if fault.timed_out and is_async(bound.function):
        return None  # its event loop may still be blocked, and then every completion looks guilty
    budget = timeout or 60.0
    end = time.monotonic() + budget
    for index, group in enumerate(singles):
        left = end - time.monotonic()
        if left <= 0:
            return None
        outcome = call(bound.function, _arguments(bound, [group]), left)
        if isinstance(outcome, TimedOut) and left < budget / 2:
            return None  # slow everywhere, not stuck here
        try:
            _values(outcome, 1)
        except _Fault:
            return index
    return None


def pass_reward(rewards: Sequence[BoundReward], name: str, *, option: str) -> BoundReward:
    """The reward function that says whether a completion is right: the one called ``name``, else the only
    one, else ``exact_answer``. ConfigError, naming ``option``, when it cannot be told."""
    scoring = {b.name: b for b in rewards if b.name != "soft_overlong"}  # which only punishes
    if not name:
        name = next(iter(scoring)) if len(scoring) == 1 else "exact_answer"
        given = "none is named."
    else:
        given = f"'{name}' is none of the reward functions.{nearest(name, scoring)}"
    if name in scoring:
        return scoring[name]
    raise ConfigError(
        "Prompts are chosen by how often their completions are right, and which reward function says so? "
        f"{given} Give --{option} one of: {', '.join(scoring)}."
    )
