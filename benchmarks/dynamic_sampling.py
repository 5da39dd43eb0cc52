"""Does dynamic sampling pay? The same run with and without it, for the same number of generated tokens.

    python benchmarks/dynamic_sampling.py --seeds 0 1 2

The task is the demo's after its cold start, with so many of the sums whose groups of four completions were
dead that 60 % of the groups are dead at the start, counted on other completions. Each seed then trains twice
from there: with dynamic sampling for ``--steps`` steps, and without it until as many tokens are
generated. Both are evaluated on the same held-out sums, at temperature 1. The last line of stdout is one JSON
object.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

from razona.build.model import load_model, make_engine, make_policy
from razona.config import (
    DataConfig,
    DynamicSamplingConfig,
    EvalConfig,
    GRPOConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimizerConfig,
    RunConfig,
)
from razona.data import PromptSource, build_demonstrations, build_prompts, load_rows
from razona.models import LoadedModel, save
from razona.policy import Policy
from razona.rewards.library import exact_answer
from razona.run.console import Console
from razona.tasks import addition
from razona.train import grpo, sft
from razona.types import Engine, Sampling

DEAD = 0.6  # share of dead groups at the start
PROBED = 256  # sums that rows are taken from
COLD_STEPS = 28
GROUP = 4
SAMPLING = Sampling(group_size=GROUP, max_completion_length=48)
EVAL_EVERY = 5
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


def dead(policy: Policy, engine: Engine, rows: list[dict[str, Any]], seed: int) -> list[bool]:
    """Whether the completions of each prompt are all right or all wrong."""
    prompts = build_prompts(load_rows(rows), policy.tokenizer, DataConfig()).prompts
    engine.load_weights(policy, version=0)
    seeds = [[seed * 10**6 + p * GROUP + g for g in range(GROUP)] for p in range(len(prompts))]
    found, judge = [], exact_answer()
    for group, row in zip(engine.generate(prompts, SAMPLING, seeds=seeds), rows, strict=True):
        texts = [[{"role": "assistant", "content": c.text}] for c in group.completions]
        found.append(len({*judge(completions=texts, answer=[row["answer"]] * GROUP)}) == 1)
    return found


def mixture(
    policy: Policy, engine: Engine, rows: list[dict[str, Any]], seed: int
) -> tuple[list[dict[str, Any]], float]:
    """Rows of which the share `DEAD` has dead groups, and that share as expected. What was dead once need not
    be so again: one sample sorts the rows, another says how often each kind is dead."""
    kind, again = (dead(policy, engine, rows, 2 * seed + sample) for sample in range(2))
    lively, lifeless = (
        [row for row, is_dead in zip(rows, kind, strict=True) if is_dead == k] for k in (0, 1)
    )
    low, high = (mean(a for a, is_dead in zip(again, kind, strict=True) if is_dead == k) for k in (0, 1))
    part = min(1.0, max(0.0, (DEAD - low) / (high - low)))  # of lifeless rows
    taken = lively + lifeless[: round(len(lively) * part / (1 - part))]
    random.Random(seed).shuffle(taken)
    return taken, part * high + (1 - part) * low


def cold_start(seed: int, folder: Path, console: Console) -> tuple[Path, Any, Any, dict[str, float]]:
    """A model, rows to train on, held-out rows, and how the start is: the share of dead groups to expect."""
    demonstrated, held_out, practice = addition.split(seed, demonstrations=32, held_out=HELD_OUT)
    loaded = load_model(ModelConfig(), console)
    policy = make_policy(loaded, ModelConfig(), OptimizerConfig(learning_rate=5e-5), total_updates=1)
    source = demonstrations(loaded, demonstrated, seed)
    for _ in range(COLD_STEPS):
        sft.update(policy, source.take(8), budget=0)
    save(policy.model, policy.tokenizer, folder)
    engine = make_engine(policy, loaded, console)
    rows, share = mixture(policy, engine, addition.rows(practice)[:PROBED], seed)
    return folder, rows, addition.rows(held_out), {"dead_at_start": share, "rows": len(rows)}


def tokens_of(step: dict[str, float]) -> int:
    """Generated in a step."""
    return round(step.get("dynamic_sampling/sampled_tokens", step["completion_length"] * 8 * GROUP))


def train(
    start: Path, out: Path, rows: Any, held_out: Any, *, mode: Any, steps: int, tokens: int, seed: int
) -> list[dict[str, float]]:
    """The metrics of ``steps`` steps, or of as many as generate ``tokens`` tokens."""
    config = GRPOConfig(
        model=ModelConfig(name=str(start)),
        rewards=("exact_answer",),
        sampling=SAMPLING,
        objective=ObjectiveConfig(name="dapo", dynamic_sampling=DynamicSamplingConfig(mode=mode)),
        optimizer=OptimizerConfig(learning_rate=1.5e-5),
        eval=EvalConfig(every=EVAL_EVERY),
        run=RunConfig(output_dir=str(out), num_steps=steps, seed=seed, print_every=0, keep_checkpoints=1),
        prompts_per_step=8,
    )
    generated = 0

    def enough(step: int, metrics: Any, records: Any) -> bool:
        nonlocal generated
        generated += tokens_of(metrics)
        return generated >= tokens

    grpo.run(config, console=Console(json_mode=True), rows=rows, eval_rows=held_out, on_step=enough)
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def curve(steps: list[dict[str, float]]) -> list[tuple[int, float]]:
    """(tokens generated so far, held-out accuracy) at every evaluation."""
    points, generated = [], 0
    for step in steps:
        generated += tokens_of(step)
        if "eval/exact_answer" in step:
            points.append((generated, step["eval/exact_answer"]))
    return points


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=15, help="steps of the run with dynamic sampling")
    options = parser.parse_args()
    results = []
    for seed in options.seeds:
        with tempfile.TemporaryDirectory() as folder:
            base = Path(folder)
            start, rows, held_out, how = cold_start(seed, base / "start", Console(json_mode=True))
            print(f"seed {seed}: {how}", flush=True)
            same = {"rows": rows, "held_out": held_out, "seed": seed}
            filled = train(start, base / "on", mode="on", steps=options.steps, tokens=10**9, **same)
            tokens = sum(map(tokens_of, filled))
            plain = train(start, base / "off", mode="off", steps=10**3, tokens=tokens, **same)
        found = {
            "seed": seed,
            **how,
            "full_batches": all(step["frac_zero_std"] == 0 for step in filled),
            "extra_completions": sum(step["dynamic_sampling/extra_completions"] for step in filled),
            "dead_without": sum(step["frac_zero_std"] for step in plain) / len(plain),
            "steps": (len(filled), len(plain)),
            "dynamic_sampling": curve(filled),
            "without": curve(plain),
        }
        results.append(found)
        print(json.dumps(found), flush=True)
    print(json.dumps({"seeds": results}))


if __name__ == "__main__":
    main()
