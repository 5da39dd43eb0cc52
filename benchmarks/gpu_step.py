"""GRPO steps on one CUDA device, timed by phase, with the sampler's mismatch. Run by gpu_check.sh."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch

from razona.config import GRPOConfig, ModelConfig, RunConfig
from razona.config.common import BUNDLED_MODEL
from razona.tasks import addition
from razona.train import grpo
from razona.types import Sampling


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default=BUNDLED_MODEL)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            model=ModelConfig(name=options.model),
            rewards=("length",),
            sampling=Sampling(group_size=16, max_completion_length=256),
            run=RunConfig(output_dir=f"{folder}/run", num_steps=options.steps, print_every=0),
            prompts_per_step=16,
        )
        grpo.run(config, rows=addition.rows(addition.split(0, demonstrations=0, held_out=0)[2]))
        lines = {
            name: [
                json.loads(line) for line in (Path(folder) / "run" / f"{name}.jsonl").read_text().splitlines()
            ]
            for name in ("timings", "metrics")
        }
    for timing, metric in zip(lines["timings"], lines["metrics"], strict=True):
        phases = {k: round(v, 3) for k, v in timing.items() if k in ("generate", "train", "optimizer")}
        print(
            f"step {timing['step']}: {phases}, {metric['tokens'] / timing['generate']:.0f} tokens/s sampled, "
            f"mismatch mean {metric['mismatch/mean_abs']:.2e} max {metric['mismatch/max_abs']:.2e}"
        )
    print(f"peak memory {torch.cuda.max_memory_allocated() / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
