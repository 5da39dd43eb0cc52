"""The benchmark's own side runs, on a tiny model: what it builds by hand is what the loop takes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import tiny_model, tiny_tokenizer

from razona.models import save

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "razona_step.py"


@pytest.mark.parametrize("rank", ["0", "4"])
def test_a_measured_step(tmp_path: Path, rank: str) -> None:
    if not SCRIPT.exists():
        pytest.skip("benchmarks/ is not beside tests/")
    model = save(tiny_model("llama", max_position_embeddings=1024), tiny_tokenizer(), tmp_path / "model")
    command = [sys.executable, str(SCRIPT), "--model", str(model), "--case", "G=4x48", "--steps", "2"]
    command += ["--lora", rank]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert len(result["steps"]) == 2 and set(result["completion_tokens"]) == {48}
    assert all(step["generate"] > 0 and step["train"] > 0 for step in result["steps"])
