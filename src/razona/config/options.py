"""The options of a configuration by their dotted names, and how they are spelled as flags."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

SHORT_FLAGS = {
    "--model": "--model.name",
    "--device": "--model.device",
    "--load-in-4bit": "--model.load-in-4bit",
    "--data": "--data.path",
    "--task": "--data.task",
    "--prompt-column": "--data.prompt-column",
    "--gold": "--data.gold",
    "--system": "--data.system",
    "--eval-data": "--eval.data",
    "--eval-every": "--eval.every",
    "--objective": "--objective.name",
    "--min-pass-rate": "--objective.difficulty.min-pass-rate",
    "--max-pass-rate": "--objective.difficulty.max-pass-rate",
    "--filter-every": "--objective.difficulty.filter-every",
    "--group-size": "--sampling.group-size",
    "--max-completion-length": "--sampling.max-completion-length",
    "--temperature": "--sampling.temperature",
    "--lr": "--optimizer.learning-rate",
    "--steps": "--run.num-steps",
    "--num-steps": "--run.num-steps",
    "--output-dir": "--run.output-dir",
    "--seed": "--run.seed",
    "--resume": "--run.resume",
    "--overwrite": "--run.overwrite",
}
"""Short spellings of the most used flags, where the command has the long one."""

SINGULAR = {"--reward": "--rewards", "--prompt": "--prompts"}
"""``--reward format --reward exact_answer`` is ``--rewards format exact_answer``."""


class Option(NamedTuple):
    """A field that is no table. ``name`` is dotted, as in ``sampling.group_size``."""

    name: str
    hint: Any
    default: Any
    doc: str

    @property
    def flag(self) -> str:
        return flag(self.name)


def options(config: Any, table: str = "") -> Iterator[Option]:
    """Every option of ``config``; its values are the defaults."""
    hints, docs = get_type_hints(type(config)), field_docs(type(config))
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), f"{table}{field.name}"
        if dataclasses.is_dataclass(value):
            yield from options(value, f"{name}.")
        else:
            yield Option(name, hints[field.name], value, docs.get(field.name, ""))


def flag(name: str) -> str:
    """``sampling.group_size`` -> ``--sampling.group-size``."""
    return f"--{name.replace('_', '-')}"


def short_flags(config: Any) -> dict[str, str]:
    """Short spelling -> long one, of those that ``config`` has."""
    longs = {option.flag for option in options(config)}
    known = {**SHORT_FLAGS, **SINGULAR, **getattr(config, "SHORT_FLAGS", {})}
    return {short: long for short, long in known.items() if long in longs and short not in longs}


def shortest_flag(config: Any, name: str) -> str:
    """How the option ``name`` is best given: by its short spelling where there is one."""
    shorts = {long: short for short, long in reversed(short_flags(config).items())}
    return shorts.get(flag(name), flag(name))


def takes_many(hint: Any) -> bool:
    """Whether an option of this type has any number of values."""
    return get_origin(hint) is dict or (get_origin(hint) is tuple and get_args(hint)[-1] is Ellipsis)


def field_docs(cls: type) -> dict[str, str]:
    """The text under each field of a dataclass, those it inherits included."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            docs |= _module_docs(base.__module__).get(base.__name__, {})
    return docs


@functools.cache
def _module_docs(module: str) -> dict[str, dict[str, str]]:
    """Class -> field -> the text under it, from the source: Python does not keep it."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {
        node.name: {
            field.target.id: " ".join(str(text.value.value).split())
            for field, text in zip(node.body, node.body[1:], strict=False)
            if isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
        }
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }
