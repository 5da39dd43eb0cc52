"""One configuration, three spellings: Python, TOML and flags, each over the one before it.

``sampling.group_size`` is ``Sampling(group_size=16)`` in Python, ``group_size = 16`` under ``[sampling]`` in
TOML and ``--sampling.group-size 16`` as a flag.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from razona.config.check import convert, validate
from razona.config.help import short_help
from razona.config.names import home_of, other_name
from razona.config.options import options, short_flags, takes_many
from razona.errors import ConfigError, nearest

if TYPE_CHECKING:
    from tyro.constructors import ConstructorRegistry

C = TypeVar("C")


def load_config(
    cls: type[C],
    toml_path: str | Path | None = None,
    overrides: Sequence[str] = (),
    *,
    prog: str = "razona",
) -> C:
    """Defaults of ``cls``, under the TOML file, under flags; checked.

    Raises ConfigError for a file that cannot be read, an unknown key, a wrong type, a value that cannot work.
    ``--help`` and ``--help-all``, like a flag that nothing is known about, print and raise SystemExit.
    """
    config = cls()
    if "--help" in overrides or "-h" in overrides:
        print(short_help(config, prog))
        raise SystemExit(0)
    if toml_path is not None:
        config = merge(config, read_toml(Path(toml_path)), source=str(toml_path))
    if overrides:
        config = _parse_flags(config, overrides, prog)
    validate(config)
    return config


def read_toml(path: Path) -> dict[str, Any]:
    """The file's tables. Raises ConfigError where it is missing or is not TOML."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"The configuration file {path} cannot be read: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}.") from error


def merge(base: C, values: Mapping[str, Any], *, source: str = "", table: str = "", whole: Any = None) -> C:
    """``base`` with nested ``values`` (as TOML and JSON have them) put over it.

    ``source`` names where they come from; in a ``table``, ``whole`` is what it is part of. Raises ConfigError
    for an unknown key or a wrong type.
    """
    prefix = f"{source}: " if source else ""
    hints = get_type_hints(type(base))
    known = {field.name for field in dataclasses.fields(base)}  # type: ignore[arg-type]
    changes: dict[str, Any] = {}
    for key, value in values.items():
        if key not in known:
            raise ConfigError(f"{prefix}{_unknown_key(base, key, table, whole or base)}")
        path = f"{table}.{key}" if table else key
        current = getattr(base, key)
        if not dataclasses.is_dataclass(current):
            changes[key] = convert(hints[key], value, f"{prefix}{path}")
        elif isinstance(value, Mapping):
            changes[key] = merge(current, value, source=source, table=path, whole=whole or base)
        else:
            raise ConfigError(
                f"{prefix}{path} is a table of options, not {value!r}. "
                f"Write [{path}] and its options below it."
            )
    return dataclasses.replace(base, **changes)  # type: ignore[type-var]


def _unknown_key(config: Any, key: str, table: str, whole: Any) -> str:
    """What is wrong with ``key``, where it belongs if it belongs elsewhere, else the nearest name."""
    known = [field.name for field in dataclasses.fields(config)]
    text = f"unknown key '{key}' in table [{table}]." if table else f"unknown key '{key}' outside any table."
    if other := other_name(whole, f"{table}.{key}" if table else key):
        return f"{text} {other}"
    homes = [option.name for option in options(whole) if option.name.endswith(f".{key}")]
    if homes:
        return f"{text} It belongs in [{homes[0].rsplit('.', 1)[0]}]."
    return text + (nearest(key.replace("-", "_"), known) or f" Known are: {', '.join(known)}.")


def _parse_flags(config: C, args: Sequence[str], prog: str) -> C:
    """``config`` with flags put over it. tyro loads here: ``import razona.config`` does without."""
    import tyro

    shorts = short_flags(config)
    spellings = ", ".join(f"{short} = {long}" for short, long in shorts.items())
    help_text = f"{type(config).__doc__} Beside these: --json, --traceback; --dry-run to train or push."
    return tyro.cli(
        type(config),
        prog=prog,
        args=["--help" if arg == "--help-all" else arg for arg in _expand(config, args, shorts)],
        default=config,
        description=f"{help_text}\n\nShort spellings: {spellings}." if spellings else help_text,
        registry=_registry(),
    )


def _expand(config: Any, args: Sequence[str], shorts: Mapping[str, str]) -> list[str]:
    """``args`` in long spellings. A flag that takes any number of values has them gathered from all its
    spellings; any other one given twice is a ConfigError, and so are a TOML file after a flag and a name that
    is ours in other words.
    """
    flags = {option.flag: option.hint for option in options(config)}
    plain: list[str] = []
    gathered: dict[str, list[str]] = {}
    given: dict[str, str] = {}
    target, open_flag = plain, False  # open: the next word is its value
    for arg in args:
        if not arg.startswith("--"):
            if arg.endswith(".toml") and not open_flag:
                raise ConfigError(
                    f"'{arg}' stands where no configuration file can: there is one at most, and it comes "
                    "first, before every flag: razona COMMAND run.toml --flag value."
                )
            target.append(arg)
            open_flag = False
            continue
        written, equals, value = arg.partition("=")
        flag = written.replace("_", "-")
        flag = shorts.get(flag, flag)
        option = re.sub(r"(--|\.)no-", r"\1", flag)
        open_flag = not equals and flags.get(option) is not bool
        if option not in flags:
            name = option[2:].replace("-", "_")
            if other := other_name(config, name) or home_of(config, name):
                raise ConfigError(f"unknown option {written}. {other}")
        if takes_many(flags.get(flag)):
            target = gathered.setdefault(flag, [])
            target += [value] if equals else []
            continue
        target = plain
        plain.append(f"{flag}{equals}{value}")
        if option in flags and option in given:
            first = given[option]
            how = f"{written} is given twice" if written == first else f"{first} and {written} are both given"
            raise ConfigError(f"{how}, and only one of them could count. Give {option[2:]} once.")
        given[option] = written
    return plain + [word for flag, values in gathered.items() for word in (flag, *values)]


def _registry() -> ConstructorRegistry:
    """tyro's rules plus ours: ``--data.rename question=prompt answer=label``."""
    from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

    registry = ConstructorRegistry()

    def pairs(texts: list[str]) -> dict[str, str]:
        renamed = dict(text.split("=", 1) for text in texts if "=" in text)
        if len(renamed) < len(texts):
            raise ValueError(f"expected old=new, each column once, got {' '.join(texts)}")
        return renamed

    @registry.primitive_rule
    def rename(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[dict[str, str]] | None:
        if info.type != dict[str, str]:
            return None
        return PrimitiveConstructorSpec(
            nargs="*",
            metavar="[OLD=NEW ...]",
            instance_from_str=pairs,
            is_instance=lambda value: isinstance(value, dict),
            str_from_instance=lambda value: [f"{old}={new}" for old, new in value.items()],
        )

    return registry
