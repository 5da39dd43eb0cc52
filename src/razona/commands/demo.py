"""`razona demo`: a cold start on 32 demonstrations, then GRPO from prompts and a verifier alone, beside a
control.

The question it answers: does reinforcement learning add anything that going on with the demonstrations would
not?
"""

from __future__ import annotations

import json
import resource
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from razona.build.data import fitting_prompts
from razona.build.model import load_model, make_engine, make_policy
from razona.config import (
    DataConfig,
    EvalConfig,
    GRPOConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimizerConfig,
    RunConfig,
)
from razona.config.check import validate
from razona.config.commands import DemoConfig
from razona.data import Demonstration, PromptSource, build_demonstrations, load_rows
from razona.models import LoadedModel, save
from razona.policy import Policy
from razona.rewards import bind
from razona.rollout.evaluate import Evaluator
from razona.run.console import Console
from razona.run.signals import Signalled
from razona.tasks import addition
from razona.train import grpo, sft
from razona.types import Sampling

MODEL = ModelConfig()
DEMONSTRATIONS = 32
SFT_OPTIMIZER = OptimizerConfig(learning_rate=5e-5)
SFT_ROWS = 8
SAMPLING = Sampling(group_size=4, max_completion_length=48)
PROMPTS_PER_STEP = 16

Score = tuple[float, float | None]


def run(config: DemoConfig, *, console: Console) -> dict[str, Any]:
    """Start, cold start, GRPO and control, each evaluated on the same held-out prompts at temperature 1."""
    validate(config)
    started = time.perf_counter()
    demonstrated, held_out, practice = addition.split(
        config.seed, demonstrations=DEMONSTRATIONS, held_out=config.eval_prompts
    )
    console.print(
        "This trains SmolLM2-135M-Instruct on two-digit addition, in four parts: the model as it is, a cold "
        f"start (SFT) on {DEMONSTRATIONS} demonstrations, GRPO on {len(practice)} other sums with a verifier "
        "alone, and a control: SFT going on for as long as GRPO took.\n"
        "No demonstration carries a ten (34 + 52 is shown, 34 + 58 is not): what GRPO gains, it finds "
        "itself.\n"
        f"Each is evaluated on {len(held_out)} sums of both kinds that none of them saw."
    )
    folder = Path(config.output_dir) / f"seed-{config.seed}"
    held_out_rows, scores = addition.rows(held_out), {}

    loaded = load_model(MODEL, console)
    policy = make_policy(loaded, MODEL, SFT_OPTIMIZER, total_updates=1)
    _say_time(policy, loaded, held_out_rows, config, console)
    scores["start"] = _evaluate("the model as it is", policy, loaded, held_out_rows, config, console)

    source = PromptSource(_demonstrations(loaded, demonstrated), seed=config.seed)
    with console.progress("cold start", config.cold_start_steps) as advance:
        for _ in range(config.cold_start_steps):
            sft.update(policy, source.take(SFT_ROWS), budget=0)
            advance()
    scores["cold_start"] = _evaluate("after the cold start", policy, loaded, held_out_rows, config, console)
    save(policy.model, policy.tokenizer, folder / "cold-start")
    policy.release()  # or the memory of both would be held until the next garbage collection
    del policy, loaded

    trained = grpo.run(
        _grpo_config(config, folder),
        console=console,
        rows=addition.rows(practice),
        eval_rows=held_out_rows,
        resume_hint="the demo cannot be resumed: razona demo begins it again.",
    )
    if trained["interrupted"]:  # there is nothing to compare: the demo ends as one is used to
        raise Signalled(trained["signal"] or "SIGINT")
    scores["grpo"] = (trained["eval/exact_answer"], trained["eval/exact_answer/error"])
    _say_score("after GRPO", scores["grpo"], console)

    seconds = _training_seconds(folder / "grpo")
    scores["control"] = _control(folder / "cold-start", source, seconds, held_out_rows, config, console)
    scores["constant_answer"] = (addition.constant_accuracy(held_out), None)
    result = {
        **{name: value for name, (value, _) in scores.items()},
        "errors": {name: error for name, (_, error) in scores.items()},
        "seed": config.seed,
        "seconds": time.perf_counter() - started,
        "peak_rss_gb": _peak_rss_gb(),
        "run": trained["run"],
        "interrupted": trained["interrupted"],
    }
    _summary(result, seconds, folder, console)
    return result


def _say_time(policy: Policy, loaded: LoadedModel, rows: Any, config: DemoConfig, console: Console) -> None:
    """How long all of it will take, estimated from the first tokens of one step's completions."""
    sampling = replace(SAMPLING, max_completion_length=SAMPLING.max_completion_length // 4)
    engine = make_engine(policy, loaded, console)
    prompts = fitting_prompts(load_rows(rows), loaded, DataConfig(), sampling, console)[:PROMPTS_PER_STEP]
    seeds = [list(range(sampling.group_size)) for _ in prompts]
    start = time.perf_counter()
    engine.generate(prompts, sampling, seeds=seeds)
    rollout = 2 * (time.perf_counter() - start)  # of 48 tokens an answer takes about 24
    held_out = len(rows) / (len(prompts) * sampling.group_size)
    # A step trains for about a third of the time that it samples; the control takes as long as GRPO.
    seconds = rollout * (4 * held_out + 2.6 * config.grpo_steps + 0.5 * config.cold_start_steps)
    minutes = max(1, round(seconds / 60))
    console.print(f"On this machine, in {policy.precision}, it will take about {minutes} minutes.")


def _demonstrations(loaded: LoadedModel, pairs: list[tuple[int, int]]) -> tuple[Demonstration, ...]:
    rows = load_rows(addition.rows(pairs, demonstrated=True))
    found = build_demonstrations(
        rows, loaded.tokenizer, DataConfig(), max_length=512, stop_token_ids=loaded.stop_token_ids
    )
    return found.demonstrations


def _grpo_config(config: DemoConfig, folder: Path) -> GRPOConfig:
    return GRPOConfig(
        model=replace(MODEL, name=str(folder / "cold-start")),
        rewards=("exact_answer",),
        sampling=SAMPLING,
        objective=ObjectiveConfig(weights="per_token"),
        optimizer=OptimizerConfig(learning_rate=1.5e-5),
        eval=EvalConfig(),
        run=RunConfig(
            output_dir=str(folder / "grpo"), num_steps=config.grpo_steps, seed=config.seed, overwrite=True
        ),
        prompts_per_step=PROMPTS_PER_STEP,
    )


def _evaluate(
    title: str, policy: Policy, loaded: LoadedModel, rows: Any, config: DemoConfig, console: Console
) -> Score:
    """Accuracy on the held-out sums at temperature 1, with its standard error; prints it beside
    completions.
    """
    sampling = replace(SAMPLING, group_size=1)
    prompts = fitting_prompts(load_rows(rows), loaded, DataConfig(), sampling, console)
    rewards = bind(["exact_answer"], columns=["prompt", "answer"])
    evaluator = Evaluator(prompts, rewards, sampling=sampling, seed=config.seed, reward_timeout=60.0)
    metrics = evaluator(make_engine(policy, loaded, console))
    console.samples(f"{title}: held-out completions", evaluator.records[:3])
    score = (metrics["eval/exact_answer"], metrics["eval/exact_answer/error"])
    _say_score(title, score, console)
    return score


def _control(
    cold_start: Path,
    source: PromptSource[Demonstration],
    seconds: float,
    rows: Any,
    config: DemoConfig,
    console: Console,
) -> Score:
    """From the same cold start, SFT on the same demonstrations for ``seconds``."""
    loaded = load_model(replace(MODEL, name=str(cold_start)), console)
    policy = make_policy(loaded, MODEL, SFT_OPTIMIZER, total_updates=1)
    end = time.perf_counter() + seconds
    with console.progress("control (SFT), seconds", round(seconds)) as advance:
        while (now := time.perf_counter()) < end:
            sft.update(policy, source.take(SFT_ROWS), budget=0)
            advance(time.perf_counter() - now)
    return _evaluate("the control: SFT for as long as GRPO", policy, loaded, rows, config, console)


def _training_seconds(run_folder: Path) -> float:
    """Seconds of a run that went into learning: all phases but evaluation and checkpoints."""
    lines = (run_folder / "timings.jsonl").read_text(encoding="utf-8").splitlines()
    apart = ("step", "time", "eval", "checkpoint")
    return sum(value for line in lines for name, value in json.loads(line).items() if name not in apart)


def _say_score(title: str, score: Score, console: Console) -> None:
    value, error = score
    console.print(f"{title}: {value:.1%}" + (f" +- {error:.1%}" if error is not None else ""), style="bold")


def _summary(result: dict[str, Any], seconds: float, folder: Path, console: Console) -> None:
    titles = {
        "constant_answer": "the best constant answer",
        "start": "the model as it is",
        "cold_start": f"cold start, SFT on {DEMONSTRATIONS} demonstrations",
        "control": f"control, SFT for {seconds:.0f} s more",
        "grpo": f"GRPO for {seconds:.0f} s",
    }
    console.print("\nexact answers on held-out sums, at temperature 1")
    for name, title in titles.items():
        error = result["errors"][name]
        bar = "#" * round(40 * result[name])
        spread = "" if error is None else f" +- {error:.1%}"
        console.print(f"  {title:<42}{result[name]:>6.1%}{spread:<9} {bar}")
    console.print(
        f"\nIt took {result['seconds'] / 60:.1f} minutes and at most {result['peak_rss_gb']:.1f} GB of "
        f"memory. Everything is in {folder}: the run folder grpo (metrics.jsonl, rollouts.jsonl with every "
        "completion, checkpoints), the trained model grpo/model and what it started from, cold-start.\n"
        "To try next:\n"
        f"  razona generate --model {folder}/grpo/model \\\n"
        f'    --system "{addition.SYSTEM}" --prompt "What is 27 + 58?"\n'
        "  razona demo --seed 1            another draw of the sums\n"
        "  razona grpo --help              your own data and rewards\n"
        "  src/razona/train/grpo.py        the loop that ran, in one page"
    )


def _peak_rss_gb() -> float:
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9
