"""Does a LoRA on a 4-bit base learn? The demo's task: a cold start on its 32 demonstrations, then GRPO.

    python benchmarks/quant_learning.py --seeds 0

All of it trains one adapter on the bundled model in 4 bits. Judged on the demo's held-out sums, at
temperature 1: the base, the adapter after the cold start, the adapter after GRPO. The last line of stdout is
one JSON object.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from dynamic_sampling import demonstrations

from razona.build.data import fitting_prompts
from razona.build.model import load_model, make_engine, make_policy
from razona.config import (
    DataConfig,
    EvalConfig,
    GRPOConfig,
    LoRAConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimizerConfig,
    RunConfig,
)
from razona.data import load_rows
from razona.models import LoadedModel
from razona.policy import Policy
from razona.rewards import bind
from razona.rollout.evaluate import Evaluator
from razona.run.console import Console
from razona.tasks import addition
from razona.train import grpo, sft
from razona.types import Sampling

HELD_OUT = 200
SAMPLING = Sampling(group_size=4, max_completion_length=48)
FOUR_BITS = ModelConfig(load_in_4bit=True)


def judge(policy: Policy, loaded: LoadedModel, rows: Any, seed: int, console: Console) -> float:
    """Share of exact answers."""
    sampling = replace(SAMPLING, group_size=1)
    prompts = fitting_prompts(load_rows(rows), loaded, DataConfig(), sampling, console)
    rewards = bind(["exact_answer"], columns=["prompt", "answer"])
    evaluator = Evaluator(prompts, rewards, sampling=sampling, seed=seed, reward_timeout=60.0)
    return evaluator(make_engine(policy, loaded, console))["eval/exact_answer"]


def measure(seed: int, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    console = Console(json_mode=True)
    demonstrated, held_out, practice = addition.split(seed, demonstrations=32, held_out=HELD_OUT)
    rows = addition.rows(held_out)
    loaded = load_model(FOUR_BITS, console, lora=LoRAConfig(r=16), seed=seed)
    policy = make_policy(loaded, FOUR_BITS, OptimizerConfig(learning_rate=1e-3), total_updates=1)
    found: dict[str, Any] = {"seed": seed, "base": judge(policy, loaded, rows, seed, console)}
    source = demonstrations(loaded, demonstrated, seed)
    for _ in range(options.cold_start_steps):
        sft.update(policy, source.take(8), budget=0)
    found["cold_start"] = judge(policy, loaded, rows, seed, console)
    adapter = policy.save(folder / "cold-start")
    del policy, loaded
    start = time.perf_counter()
    trained = grpo.run(
        GRPOConfig(
            model=ModelConfig(name=str(adapter), load_in_4bit=True),
            rewards=("exact_answer",),
            sampling=SAMPLING,
            objective=ObjectiveConfig(weights="per_token"),
            optimizer=OptimizerConfig(learning_rate=options.learning_rate),
            eval=EvalConfig(),
            run=RunConfig(output_dir=str(folder / "grpo"), num_steps=options.steps, seed=seed, print_every=0),
            prompts_per_step=16,
        ),
        console=console,
        rows=addition.rows(practice),
        eval_rows=rows,
    )
    found["grpo"], found["error"] = trained["eval/exact_answer"], trained["eval/exact_answer/error"]
    return {**found, "grpo_seconds": time.perf_counter() - start}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--cold-start-steps", type=int, default=12)
    parser.add_argument("--steps", type=int, default=20, help="of GRPO")
    parser.add_argument("--learning-rate", type=float, default=2e-4, help="of GRPO")
    options = parser.parse_args()
    results = []
    for seed in options.seeds:
        with tempfile.TemporaryDirectory() as folder:
            results.append(measure(seed, options, Path(folder)))
        scores = "  ".join(f"{name} {results[-1][name]:.1%}" for name in ("base", "cold_start", "grpo"))
        print(f"seed {seed}: {scores}  (+- {results[-1]['error']:.1%})", flush=True)
    print(json.dumps({"seeds": results}))


if __name__ == "__main__":
    main()
