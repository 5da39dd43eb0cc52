"""A two-step `razona grpo` on a tiny model made on the spot: ``two_steps.py path/to/razona``."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from tiny_models import tiny_model, tiny_tokenizer


def main(command: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model, data, out = (Path(folder) / name for name in ("model", "rows.jsonl", "run"))
        tiny_model().save_pretrained(model)
        tiny_tokenizer().save_pretrained(model)
        data.write_text(
            "".join(json.dumps({"prompt": f"{n} + 1 =", "answer": n + 1}) + "\n" for n in range(8))
        )
        options = {
            "model.name": model, "data.path": data, "rewards": "exact_answer", "run.output-dir": out,
            "run.num-steps": 2, "prompts-per-step": 2, "sampling.group-size": 4,
            "sampling.max-completion-length": 8,
        }  # fmt: skip
        flags = [part for name, value in options.items() for part in (f"--{name}", str(value))]
        subprocess.run([command, "grpo", *flags], check=True)
        assert len((out / "metrics.jsonl").read_text().splitlines()) == 2


main(sys.argv[1])
