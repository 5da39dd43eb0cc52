#!/usr/bin/env bash
# Checks and times razona on one CUDA device, in under 6 minutes. usage: bash benchmarks/gpu_check.sh [MODEL_FOLDER]
# Needs an environment with razona and pytest installed; MODEL_FOLDER is any decoder that transformers loads (default:
# the bundled one). Nothing is fetched but what the default model needs.
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-python3}"
[ -x .venv/bin/python ] && python="${PYTHON:-.venv/bin/python}"
export PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}"

"$python" -c 'import sys, torch; sys.exit(0 if torch.cuda.is_available() else "no CUDA device: nothing was run")'
"$python" -c 'import torch; print(torch.__version__, torch.cuda.get_device_name(0))'

echo "== tests marked gpu"
timeout 150 "$python" -m pytest -q -m gpu tests

echo "== one step, timed"
timeout 150 "$python" benchmarks/gpu_step.py ${1:+--model "$1"}
