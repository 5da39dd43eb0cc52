"""What keeps the code readable, as numbers. Raise one only in a diff that says why."""

from __future__ import annotations

import ast
import dataclasses
import re
import sys
from pathlib import Path

import razona.config
from razona.types import Sampling

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_TRAIN_LINES = 80
MAX_CONFIG_FIELDS = 15
MAX_RUNTIME_DEPENDENCIES = 12

ROOT = Path(__file__).parent.parent
FILES = [p for folder in ("src", "tests", "benchmarks") for p in sorted((ROOT / folder).rglob("*.py"))]


def test_files_are_short() -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in FILES
    }
    assert {path: n for path, n in lengths.items() if n > MAX_FILE_LINES} == {}


def test_functions_are_short() -> None:
    too_long = []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                is_loop = node.name == "train" and path.parent.name == "train"
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > (MAX_TRAIN_LINES if is_loop else MAX_FUNCTION_LINES):
                    too_long.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name} ({length} lines)")
    assert too_long == []


def test_configs_are_small() -> None:
    configs = [getattr(razona.config, name) for name in razona.config.__all__] + [Sampling]
    sizes = {c.__name__: len(dataclasses.fields(c)) for c in configs if dataclasses.is_dataclass(c)}
    assert len(sizes) >= 8
    assert {name: n for name, n in sizes.items() if n > MAX_CONFIG_FIELDS} == {}


def runtime_dependencies() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [re.split(r"[^\w.-]", requirement)[0] for requirement in project["dependencies"]]


def test_runtime_dependencies_are_few() -> None:
    assert 0 < len(runtime_dependencies()) <= MAX_RUNTIME_DEPENDENCIES


def test_what_is_imported_is_declared() -> None:
    declared = {name.replace("-", "_") for name in runtime_dependencies()} | {"bitsandbytes"}  # extra quant
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            for top in (
                {name.split(".")[0] for name in names} - sys.stdlib_module_names - {"razona", "tomllib"}
            ):
                assert top in declared, (
                    f"{path.relative_to(ROOT)} imports {top}, which pyproject.toml does not declare"
                )


def test_the_pinned_set_covers_what_is_declared() -> None:
    pinned = {
        re.split(r"[=\s]", line)[0].lower()
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#")
    }
    assert {name.lower() for name in runtime_dependencies()} <= pinned
