"""One configuration, three spellings: Python, TOML and flags, each over the one before it.

``sampling.group_size`` is ``Sampling(group_size=16)`` in Python, ``group_size = 16`` under ``[sampling]`` in
TOML and ``--sampling.group-size 16`` as a flag.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from razona.config.check import convert, validate
from razona.errors import ConfigError, nearest

if TYPE_CHECKING:
    from tyro.constructors import ConstructorRegistry

C = TypeVar("C")

SHORT_FLAGS = {
    "--model": "--model.name",
    "--device": "--model.device",
    "--data": "--data.path",
    "--prompt-column": "--data.prompt-column",
    "--system": "--data.system",
    "--eval-data": "--eval.data",
    "--objective": "--objective.name",
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

REPEATABLE = {"--reward": "--rewards", "--prompt": "--prompts"}
"""``--reward format --reward exact_answer`` is ``--rewards format exact_answer``."""


def load_config(
    cls: type[C],
    toml_path: str | Path | None = None,
    overrides: Sequence[str] = (),
    *,
    prog: str | None = None,
) -> C:
    """Defaults of ``cls``, under the TOML file, under flags; checked.

    Raises ConfigError for a file that cannot be read, an unknown key, a wrong type, a value that cannot work.
    A wrong flag, like ``--help``, prints and raises SystemExit.
    """
    config = cls()
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
    changes: dict[str, Any] = {}
    for key, value in values.items():
        if key not in hints:
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


def _fields(config: Any, table: str = "") -> Iterator[tuple[str, dataclasses.Field[Any]]]:
    """Every field that is no table, with its dotted name."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from _fields(value, f"{table}{field.name}.")
        else:
            yield f"{table}{field.name}", field


def _unknown_key(config: Any, key: str, table: str, whole: Any) -> str:
    """What is wrong with ``key``, where it belongs if it belongs elsewhere, else the nearest name."""
    known = [field.name for field in dataclasses.fields(config)]
    text = f"unknown key '{key}' in table [{table}]." if table else f"unknown key '{key}' outside any table."
    homes = [name for name, _ in _fields(whole) if name.endswith(f".{key}")]
    if homes:
        return f"{text} It belongs in [{homes[0].rsplit('.', 1)[0]}]."
    return text + (nearest(key.replace("-", "_"), known) or f" Known are: {', '.join(known)}.")


def _parse_flags(config: C, args: Sequence[str], prog: str | None) -> C:
    """``config`` with flags put over it. tyro loads here: ``import razona.config`` does without."""
    import tyro

    flags = {f"--{name.replace('_', '-')}" for name, _ in _fields(config)}
    shorts = {short: long for short, long in SHORT_FLAGS.items() if long in flags and short not in flags}
    repeatable = {short: long for short, long in REPEATABLE.items() if long in flags}
    spellings = ", ".join(f"{short} = {long}" for short, long in {**shorts, **repeatable}.items())
    help_text = f"{type(config).__doc__} Beside these: --json, --traceback; --dry-run when training."
    return tyro.cli(
        type(config),
        prog=prog,
        args=_expand(args, shorts, repeatable),
        default=config,
        description=f"{help_text}\n\nShort spellings: {spellings}." if spellings else help_text,
        registry=_registry(),
    )


def _expand(args: Sequence[str], shorts: Mapping[str, str], repeatable: Mapping[str, str]) -> list[str]:
    """``args`` in long spellings; values of a repeatable flag are gathered behind its one long flag."""
    plain: list[str] = []
    gathered: dict[str, list[str]] = {}
    target = plain
    for arg in args:
        if not arg.startswith("--"):
            target.append(arg)
            continue
        flag, equals, value = arg.partition("=")
        flag = flag.replace("_", "-")
        if flag in repeatable:
            target = gathered.setdefault(repeatable[flag], [])
            target += [value] if equals else []
        else:
            target = plain
            target.append(f"{shorts.get(flag, flag)}{equals}{value}")
    for flag, values in gathered.items():
        plain += [flag, *values]
    return plain


def _registry() -> ConstructorRegistry:
    """tyro's rules plus ours: ``--data.rename question=prompt answer=label``."""
    from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

    registry = ConstructorRegistry()

    def pairs(texts: list[str]) -> dict[str, str]:
        if not all("=" in text for text in texts):
            raise ValueError(f"expected old=new, got {' '.join(texts)}")
        return dict(text.split("=", 1) for text in texts)

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
