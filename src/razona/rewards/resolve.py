"""The names of reward functions on the command line."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from razona.errors import RewardError, nearest
from razona.rewards import library

BUILT_IN: dict[str, Callable[[], Callable[..., Any]]] = {
    "format": library.think_format,
    "exact_answer": library.exact_answer,
    "length": library.length,
}

MODEL = "model:"
"""Before the folder or hub id of a reward model."""


def resolve(spec: str) -> Callable[..., Any]:
    """A reward function from ``format``, ``exact_answer`` or ``length``, from ``path/to/file.py:function``,
    from ``package.module:function``, or a reward model from ``model:FOLDER`` or ``model:OWNER/NAME``. The
    file is run: it is code. Raises RewardError."""
    if spec in BUILT_IN:
        return BUILT_IN[spec]()
    if spec.startswith(MODEL):
        from razona.rewards.model import reward_model  # transformers: only where one is asked for

        return reward_model(spec.removeprefix(MODEL))
    place, colon, name = spec.rpartition(":")
    if not colon or not place or not name:
        raise RewardError(
            f"There is no built-in reward {spec!r}.{nearest(spec, BUILT_IN)} Built in are "
            f"{', '.join(BUILT_IN)}; your own are written path/to/file.py:function or "
            "package.module:function, and a reward model model:FOLDER or model:OWNER/NAME."
        )
    module = _from_file(Path(place).expanduser()) if place.endswith(".py") else _from_package(place)
    function = getattr(module, name, None)
    if not callable(function):
        there = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        what = "has no function" if function is None else "has no function but a value"
        raise RewardError(
            f"{place} {what} {name!r}.{nearest(name, there)} It has: {', '.join(there) or 'no functions'}."
        )
    return function  # type: ignore[no-any-return]


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        there = [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise RewardError(
            f"There is no file {path} to read a reward function from.{nearest(path.name, there)} "
            f"Paths start at {Path.cwd()}."
        )
    path = path.resolve()
    known = f"razona_rewards_{path.stem}_{abs(hash(path)):x}"
    if known in sys.modules:
        return sys.modules[known]
    spec = importlib.util.spec_from_file_location(known, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    _reach(path.parent)
    sys.modules[known] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[known]
        raise RewardError(
            f"{path} cannot be run: {type(error).__name__}: {error}. Run it with python to see more."
        ) from error
    return module


def _from_package(name: str) -> ModuleType:
    _reach(Path.cwd())
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise RewardError(
            f"The module {name!r} cannot be imported: {type(error).__name__}: {error}. "
            "A file is written with its ending: path/to/file.py:function."
        ) from error


def _reach(folder: Path) -> None:
    """Modules beside the user's own can be imported; at the end of the path, so that they hide nothing."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
