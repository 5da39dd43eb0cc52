"""What every configuration is checked for: types, ranges, and what its own ``check`` refuses."""

from __future__ import annotations

import dataclasses
import math
import types
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from razona.errors import ConfigError, nearest


class Given(NamedTuple):
    """What Python gives beside a configuration; a dataclass with a method ``check(given)`` is asked about it.

    ``eval_rows``: whether held-out rows are given; None: not known yet. ``objective``: an
    `razona.objective.Objective` that stands in for that of the configuration.
    """

    eval_rows: bool | None = None
    objective: Any = None


def validate(config: Any, *, eval_rows: bool | None = None, objective: Any = None) -> None:
    """Raise ConfigError for a wrong type, a value out of range, or options that exclude each other.

    For configurations built in Python too: dataclasses do not check their fields. The rest: see `Given`.
    """
    _check(config, Given(eval_rows, objective))


def _check(config: Any, given: Given, table: str = "") -> None:
    """Types and ranges of every field, then what the class itself refuses."""
    hints = get_type_hints(type(config))
    for field in dataclasses.fields(config):
        hint, value, name = hints[field.name], getattr(config, field.name), f"{table}{field.name}"
        if dataclasses.is_dataclass(hint):
            if not isinstance(value, hints[field.name]):
                expected = hints[field.name].__name__
                raise ConfigError(f"{name} = {value!r} is {_kind(value)}, expected a {expected}.")
            _check(value, given, f"{name}.")
            continue
        if isinstance(value, list):
            raise ConfigError(
                f"{name} = {value!r} is a list, expected a tuple: write ({', '.join(map(repr, value))},)."
            )
        convert(hint, value, name)
        allowed, holds = field.metadata.get("range", ("", bool))
        if allowed and value is not None and not holds(value):
            raise ConfigError(f"{name} = {value!r} cannot work: it must be {allowed}.")
    if hasattr(config, "check"):
        config.check(given)


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
