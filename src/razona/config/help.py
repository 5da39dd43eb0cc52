"""The short ``--help`` of a command: the options people use, a line each. ``--help-all`` is tyro's."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from razona.config.options import Option, options, shortest_flag, takes_many

WIDTH = 32
"""Columns of a flag with its value."""
COLUMNS = 100
"""Of a whole line."""
SENTENCE = 78
"""Characters that a whole first sentence may have; of a longer one the part before the semicolon is shown."""


def short_help(config: Any, prog: str) -> str:
    """What ``config``, a configuration of defaults, lists in ``HELP`` (a heading -> names of options), or
    all of its options where it lists none."""
    known = {option.name: option for option in options(config)}
    shown: dict[str, str] = getattr(config, "HELP", {"options": " ".join(known)})
    lines = [f"usage: {prog} [options]", "", str(type(config).__doc__)]
    for heading, names in shown.items():
        lines += ["", f"{heading}:", *(_line(config, known[name]) for name in names.split())]
    lines += ["", "and:", *_rest(len(known) if hasattr(config, "HELP") else 0)]
    return "\n".join(lines)


def _rest(count: int) -> Iterator[str]:
    if count:
        yield f"  {'--help-all':<{WIDTH}}All {count} options, by the names that they have in run.toml"
    yield f"  {'--json, --traceback, --dry-run':<{WIDTH}}See razona --help"


def _line(config: Any, option: Option) -> str:
    spelled = shortest_flag(config, option.name)
    if option.default is True:
        spelled = re.sub(r"(--|\.)(?=[^.]*$)", r"\1no-", spelled)
    written = f"{spelled} {_value(option.hint)}".rstrip()
    margin = f"\n{'':<{WIDTH + 2}}"
    gap = " " if len(written) < WIDTH else margin
    text = re.split(r"\. |\.$", option.doc, maxsplit=1)[0]
    text = text if len(text) <= SENTENCE else text.partition("; ")[0]
    choices = f" ({', '.join(get_args(option.hint))})" if get_origin(option.hint) is Literal else ""
    default = "" if option.default in ("", (), {}, None) or option.hint is bool else _text(option.default)
    lines = textwrap.wrap(
        f"{text}{choices}{default and f' [{default}]'}", COLUMNS - WIDTH - 2, break_on_hyphens=False
    )
    return f"  {written:<{WIDTH - 1}}{gap}{margin.join(lines)}".rstrip()


def _value(hint: Any) -> str:
    """What stands behind the flag."""
    kinds = [kind for kind in get_args(hint) if kind not in (type(None), Ellipsis)]
    if takes_many(hint):
        return "OLD=NEW ..." if get_origin(hint) is dict else f"{_value(kinds[0])} ..."
    if get_origin(hint) is tuple:
        return " ".join(map(_value, kinds))
    if get_origin(hint) is Literal:
        return "NAME"
    named = {bool: "", int: "INT", float: "NUMBER", str: "TEXT"}
    return named[hint] if hint in named else _value(kinds[0])


def _text(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
