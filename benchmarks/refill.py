"""Does dynamic sampling pay? The same run with and without it, for the same number of generated completions.

    python benchmarks/refill.py --seeds 0 1 2

The task is the demo's: after a cold start on sums that do not carry, the groups of four completions are
mostly all right or all wrong. Each seed trains twice from one cold start: with refill for ``--steps`` steps,
and without for as many steps as generate as many completions. Both are judged on the same held-out sums, at
temperature 1. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from razona.config import (
    DataConfig,
    EvalConfig,
    GRPOConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimizerConfig,
    RefillConfig,
    RunConfig,
)
from razona.console import Console
from razona.data import PromptSource, build_demonstrations, load_rows
from razona.models import LoadedModel, save
from razona.setup import load_model, make_policy
from razona.tasks import addition
from razona.train import grpo, sft
from razona.types import Sampling

POINTS = 5  # of the learning curve
HELD_OUT = 200


def demonstrations(loaded: LoadedModel, pairs: list[tuple[int, int]], seed: int) -> PromptSource[Any]:
    """Sums with their worked answers, for SFT."""
    shown = build_demonstrations(
        load_rows(addition.rows(pairs, demonstrated=True)),
        loaded.tokenizer,
        DataConfig(),
        max_length=512,
        stop_token_ids=loaded.stop_token_ids,
    )
    return PromptSource(shown.demonstrations, seed=seed)


def cold_start(seed: int, folder: Path, console: Console) -> tuple[Path, list[Any], list[Any]]:
    """A model after 16 SFT steps, rows to train on, held-out rows: as `razona demo` makes them."""
    demonstrated, held_out, practice = addition.split(seed, demonstrations=32, held_out=HELD_OUT)
    loaded = load_model(ModelConfig(), console)
    policy = make_policy(loaded, ModelConfig(), OptimizerConfig(learning_rate=5e-5), total_updates=1)
    source = demonstrations(loaded, demonstrated, seed)
    for _ in range(16):
        sft.update(policy, source.take(8), budget=0)
    return (
        save(policy.model, policy.tokenizer, folder),
        addition.rows(practice),
        addition.rows(held_out),
    )


def curve(out: Path, prompts_per_step: int) -> list[tuple[int, float]]:
    """(completions generated so far in groups of 4, held-out accuracy) at every evaluation."""
    points, generated = [], 0
    for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        step = json.loads(line)
        generated += 4 * int(step.get("refill/sampled_groups", prompts_per_step))
        if "eval/exact_answer" in step:
            points.append((generated, step["eval/exact_answer"]))
    return points


def train(start: Path, out: Path, rows: Any, held_out: Any, *, mode: Any, steps: int, seed: int) -> Any:
    config = GRPOConfig(
        model=ModelConfig(name=str(start)),
        rewards=("exact_answer",),
        sampling=Sampling(group_size=4, max_completion_length=48),
        objective=ObjectiveConfig(name="dapo", refill=RefillConfig(mode=mode)),
        optimizer=OptimizerConfig(learning_rate=1.5e-5),
        eval=EvalConfig(every=max(1, steps // POINTS)),
        run=RunConfig(output_dir=str(out), num_steps=steps, seed=seed, print_every=0, keep_checkpoints=1),
        prompts_per_step=8,
    )
    grpo.run(config, console=Console(json_mode=True), rows=rows, eval_rows=held_out)
    found = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return curve(out, 8), found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=15, help="steps of the run with refill")
    options = parser.parse_args()
    results = []
    for seed in options.seeds:
        with tempfile.TemporaryDirectory() as folder:
            base = Path(folder)
            start, rows, held_out = cold_start(seed, base / "start", Console(json_mode=True))
            same = {"rows": rows, "held_out": held_out, "seed": seed}
            filled, steps = train(start, base / "on", mode="on", steps=options.steps, **same)
            groups = sum(step["refill/sampled_groups"] for step in steps)
            plain, without = train(start, base / "off", mode="off", steps=round(groups / 8), **same)
        dead = without[0]["frac_zero_std"]
        results.append(
            {
                "seed": seed,
                "dead_at_start": dead,
                "full_batches": all(step["frac_zero_std"] == 0 for step in steps),
                "extra_completions": sum(step["refill/extra_completions"] for step in steps),
                "refill": filled,
                "without": plain,
            }
        )
        print(
            f"seed {seed}: {dead:.0%} of the groups dead at the start; after {filled[-1][0]} completions "
            f"{filled[-1][1]:.1%} with refill, after {plain[-1][0]} {plain[-1][1]:.1%} without",
            flush=True,
        )
    print(json.dumps({"seeds": results}))


if __name__ == "__main__":
    main()
