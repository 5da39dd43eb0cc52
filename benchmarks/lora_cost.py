"""What a GRPO step costs with LoRA on a 4-bit base, with LoRA on a bf16 base, and with full training.

Each in a process of its own, from the same safetensors; the same prompts of the addition task, and a reward
that differs in every group, so that no row can be skipped. Memory is the peak of the resident set (Linux):
until the first step has ended, and of the measured steps after it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

MODES: dict[str, dict[str, Any]] = {
    "LoRA, 4-bit base": {"model": {"load_in_4bit": True}, "lora": {"r": 16}},
    "LoRA, bf16 base": {"lora": {"r": 16}},
    "full training": {},
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="", help="a folder or a name; empty: the bundled model")
    parser.add_argument("--steps", type=int, default=3, help="measured steps, after one to warm up")
    parser.add_argument("--prompts", type=int, default=4, help="per step")
    parser.add_argument("--group-size", type=int, default=4)
    parser.add_argument("--length", type=int, default=32, help="tokens that a completion may have")
    parser.add_argument("--json", action="store_true", help="the figures as one JSON object, and no table")
    parser.add_argument("--mode", choices=sorted(MODES), help="measure this one, here")
    return parser.parse_args()


def peak_rss(*, reset: bool = False) -> int:
    """Bytes, since the process began or since the last reset."""
    status = Path("/proc/self/status").read_text()
    peak = int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) * 1024
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    return peak


def varied(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Different in every group."""
    return [sum(ids) % 97 / 97 for ids in completion_ids]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """One mode, in this process."""
    from razona.config import GRPOConfig
    from razona.config.load import merge
    from razona.run.console import Console
    from razona.tasks import addition
    from razona.train import grpo

    table = {
        "sampling": {"group_size": options.group_size, "max_completion_length": options.length},
        "optimizer": {"learning_rate": 1e-6},
        "prompts_per_step": options.prompts,
        **MODES[options.mode],
    }
    table["model"] = {"name": options.model, "device": "cpu", **table.get("model", {})}
    (*_, pairs) = addition.split(0, demonstrations=0, held_out=0)
    peaks: list[int] = []
    clocks: list[tuple[float, float]] = []

    def on_step(step: int, *_: Any) -> bool:
        peaks.append(peak_rss(reset=step == 1))
        clocks.append((time.perf_counter(), time.process_time()))
        return False

    with tempfile.TemporaryDirectory() as folder:
        table["run"] = {"output_dir": folder + "/run", "num_steps": options.steps + 1, "print_every": 0}
        grpo.run(
            merge(GRPOConfig(), table),
            console=Console(True),
            rows=addition.rows(pairs[: options.prompts * (options.steps + 1)]),
            reward_fns=[varied],
            on_step=on_step,
        )
        last = json.loads((Path(folder) / "run/metrics.jsonl").read_text().splitlines()[-1])
    return {
        "seconds": statistics.median(end[0] - start[0] for start, end in pairwise(clocks)),
        "cpu_seconds": statistics.median(end[1] - start[1] for start, end in pairwise(clocks)),
        "exact_share": last["mismatch/exact_share"],
        "peak_until_first_step": peaks[0],
        "peak_of_steps": max(peaks[1:]),
    }


def main() -> None:
    options = arguments()
    if options.mode:
        print(json.dumps(measure(options)))
        return
    with tempfile.TemporaryDirectory() as folder:
        import torch

        from razona.config import BUNDLED_MODEL
        from razona.models import load, save

        loaded = load(options.model or BUNDLED_MODEL, dtype=torch.bfloat16)
        save(loaded.model, loaded.tokenizer, Path(folder) / "model")
        del loaded
        given = [f"--{name}={getattr(options, name.replace('-', '_'))}" for name in SIZES]
        figures = {}
        for mode in MODES:
            command = [sys.executable, __file__, f"--model={folder}/model", f"--mode={mode}", *given]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                sys.exit(done.stderr)
            figures[mode] = json.loads(done.stdout.splitlines()[-1])
    if options.json:
        print(json.dumps(figures))
        return
    columns = ("seconds per step", "of the processors", "peak of the steps", "peak until the first step")
    print(f"| | {' | '.join(columns)} | identical log-probs |\n|{'---|' * (len(columns) + 2)}")
    for mode, found in figures.items():
        memory = [f"{found[name] / 1e6:.0f} MB" for name in ("peak_of_steps", "peak_until_first_step")]
        seconds = [f"{found[name]:.2f}" for name in ("seconds", "cpu_seconds")]
        print(f"| {mode} | {' | '.join([*seconds, *memory])} | {found['exact_share']:.0%} |")


SIZES = ("steps", "prompts", "group-size", "length")

if __name__ == "__main__":
    main()
