"""The floors of the house: a room imports only rooms with a lower number."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import razona

SRC = Path(razona.__file__).parent
FLOORS = {
    **dict.fromkeys(("types", "errors", "chat"), 0),
    **dict.fromkeys(("config", "losses", "advantages"), 1),
    **dict.fromkeys(("objective", "batch"), 2),
    "models": 3,
    **dict.fromkeys(("policy", "value_model", "engines"), 4),
    **dict.fromkeys(("data", "tasks", "rewards", "console"), 5),
    **dict.fromkeys(("rollout", "checkpoint", "log", "metrics", "header", "card", "setup"), 6),
    **dict.fromkeys(
        [
            "evaluate",
            "progress",
            "generate",
            "merge",
            "push",
            "testing",
            "explain",
            "difficulty",
            "refill",
            "doctor",
            "advise",
        ],
        7,
    ),
    **dict.fromkeys(("train", "select"), 8),
    **dict.fromkeys(("labels", "recipes", "report", "demo"), 9),
    **dict.fromkeys(("trl", "unsloth"), 10),
    "cli": 11,
    "__main__": 12,
}
ONLY_STDLIB = ("types", "errors", "config", "explain")
STDLIB_AND = {"config": {"tyro", "tomllib", "tomli"}}  # imported inside functions
PURE_TORCH = ("losses", "advantages", "objective")

FILES = sorted(SRC.rglob("*.py"))


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(SRC.parent).with_suffix("").parts)


def room(module: str) -> str | None:
    """``razona.train.grpo`` -> ``train``; None for the package itself."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] != "__init__" else None


def imports(path: Path) -> Iterator[str]:
    """Dotted names of all that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import; write it out"
            # "from razona.train import grpo" imports a module, "from razona import __version__" a name.
            yield from (
                f"{node.module}.{alias.name}"
                if is_module(f"{node.module}.{alias.name}")
                else str(node.module)
                for alias in node.names
            )


def is_module(name: str) -> bool:
    path = SRC.parent.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def third_party(path: Path) -> set[str]:
    tops = {name.split(".")[0] for name in imports(path)}
    return {top for top in tops if top != "razona" and top not in sys.stdlib_module_names}


def test_every_room_has_a_floor() -> None:
    rooms = {room(module_name(path)) for path in FILES} - {None}
    assert rooms <= set(FLOORS), f"give {sorted(rooms - set(FLOORS))} a floor, here and in the docs"


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_a_room_imports_only_lower_floors(path: Path) -> None:
    here = room(module_name(path))
    if here is None:
        return  # the package's own __init__ loads public names lazily
    for name in imports(path):
        there = room(name) if name.split(".")[0] == "razona" else None
        if there is not None and there != here:
            assert FLOORS[there] < FLOORS[here], f"{module_name(path)} (floor {FLOORS[here]}) imports {name}"


def test_loops_never_import_each_other() -> None:
    for path in sorted((SRC / "train").glob("*.py")):
        others = [name for name in imports(path) if name.startswith("razona.train.")]
        assert not others, (
            f"{module_name(path)} imports {others}: a helper of two loops belongs on a lower floor"
        )


def test_low_floors_import_little() -> None:
    for path in FILES:
        here = room(module_name(path))
        if here in ONLY_STDLIB:
            assert third_party(path) <= STDLIB_AND.get(str(here), set()), module_name(path)
        if here in PURE_TORCH:
            assert third_party(path) <= {"torch"}, module_name(path)


def test_configs_types_and_errors_load_no_torch() -> None:
    code = (
        "import sys, razona, razona.config.load, razona.types, razona.errors, razona.cli;"
        "import razona.commands.explain;"
        "razona.GRPOConfig, razona.Prompt, razona.ConfigError;"
        "print([m for m in ('torch', 'transformers', 'numpy', 'tyro', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_public_names_resolve() -> None:
    for name in razona.__all__:
        assert getattr(razona, name) is not None
    assert set(razona.__all__) <= set(dir(razona))
    with pytest.raises(AttributeError, match="no attribute 'GRPO'"):
        _ = razona.GRPO


def test_openmp_spin_count_is_set_before_torch() -> None:
    code = "import os; os.environ.pop({0!r}, 0); import razona; print(os.environ[{0!r}])".format(
        "GOMP_SPINCOUNT"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "3000"
