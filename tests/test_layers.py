"""The floors of the house: a file imports only files of lower floors or of its own, never in a circle."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import razona

SRC = Path(razona.__file__).parent
LIST = """
    types errors
    config
    losses advantages
    batch objective
    data tasks rewards
    models
    policy
    engines
    run
    rollout
    build
    train
    doctor advise
    labels recipes report
    commands
    trl unsloth
    cli
    __main__
"""
"""The house, from the ground up: a file imports only what stands above its room in this list, and files of
its own line, in no circle.
"""
FLOORS = {name: floor for floor, line in enumerate(LIST.split("\n")) for name in line.split()}
ONLY_STDLIB = ("types", "errors", "config")
STDLIB_AND = {"config": {"tyro", "tomllib", "tomli"}}  # imported inside functions
PURE_TORCH = ("losses", "advantages", "objective")
MAX_ROOT_FILES = 10

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


def imported_files() -> dict[str, set[str]]:
    """Every file and those of razona that it imports; the package itself loads its names lazily."""
    names = {module_name(path).removesuffix(".__init__"): path for path in FILES}
    files = set(names) - {"razona"}
    return {name: {other for other in imports(names[name]) if other in files} for name in files}


def circle(graph: Mapping[str, set[str]]) -> list[str]:
    """Files that cannot be put in an order in which each imports only earlier ones."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_every_room_has_a_floor() -> None:
    rooms = {room(module_name(path)) for path in FILES} - {None}
    assert rooms <= set(FLOORS), f"give {sorted(rooms - set(FLOORS))} a floor, here and in the docs"


def test_no_file_imports_one_of_a_higher_floor() -> None:
    wrong = [
        f"{name} (floor {FLOORS[str(room(name))]}) imports {other} (floor {FLOORS[str(room(other))]})"
        for name, others in sorted(imported_files().items())
        for other in sorted(others)
        if FLOORS[str(room(other))] > FLOORS[str(room(name))]
    ]
    assert not wrong, "\n".join(wrong)


def test_no_files_import_each_other_in_a_circle() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}), "the test itself sees no circle"
    found = circle(imported_files())
    assert not found, " <- ".join(found)


def test_loops_never_import_each_other() -> None:
    for name, others in imported_files().items():
        if room(name) == "train":
            wrong = sorted(other for other in others if room(other) == "train")
            assert not wrong, f"{name} imports {wrong}: a helper of two loops belongs on a lower floor"


def test_what_loops_share_knows_no_model() -> None:
    for name, others in imported_files().items():
        if room(name) == "run":
            wrong = sorted(o for o in others if room(o) in ("models", "policy", "engines"))
            assert not wrong, f"{name} imports {wrong}: give it a value or a function instead"


def test_few_files_lie_at_the_root() -> None:
    there = sorted(path.name for path in SRC.glob("*.py"))
    assert len(there) <= MAX_ROOT_FILES, f"{len(there)} files: {', '.join(there)}. Give some a room"


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
