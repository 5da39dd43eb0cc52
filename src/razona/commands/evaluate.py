"""`razona eval`: the rewards of a model's completions on a data set, with standard errors."""

from __future__ import annotations

from typing import Any

from razona.build.data import fitting_prompts, load_table
from razona.build.model import load_model, make_engine, make_policy
from razona.config import OptimizerConfig
from razona.config.check import validate
from razona.config.commands import EvaluateConfig
from razona.data import first_of, output_file
from razona.rewards import bind
from razona.rollout.evaluate import Evaluator
from razona.run.console import Console
from razona.run.folder import json_line
from razona.tasks import with_task


def run(config: EvaluateConfig, *, console: Console, rows: Any = None) -> dict[str, Any]:
    """`razona eval`: score a model on a data set. ``rows`` stands in for ``config.data.path`` (see
    `load_rows`). Raises ConfigError before the model is loaded where the output cannot be written.
    """
    config = with_task(config)
    validate(config)
    output = output_file(config.output)
    table = load_table(config.data.path if rows is None else rows, config.data, console)
    rewards = bind(config.rewards, columns=table.renamed(config.data.rename).columns)
    loaded = load_model(config.model, console)
    fitting = fitting_prompts(table, loaded, config.data, config.sampling, console)
    prompts = first_of(fitting, config.num_prompts, seed=config.seed, shuffle=config.data.shuffle)
    for notice in (line for b in rewards for line in b.notices):
        console.note(notice)
    policy = make_policy(loaded, config.model, OptimizerConfig(), total_updates=1)
    engine = make_engine(policy, loaded, console, config.sampling.engine)
    evaluator = Evaluator(
        prompts, rewards, sampling=config.sampling, seed=config.seed, reward_timeout=config.reward_timeout
    )
    console.print(
        f"evaluating {config.model.name} on {len(prompts)} prompts x {config.sampling.group_size} "
        f"completions, temperature {config.sampling.temperature:g}, with {engine.description}"
    )
    metrics = evaluator(engine)
    console.samples("some completions", evaluator.records[:3])
    for name, value in metrics.items():
        if not name.endswith("/error"):
            error = metrics.get(f"{name}/error")
            console.print(f"{name:<28} {value:.4f}" + (f" +- {error:.4f}" if error is not None else ""))
    if output is not None:
        training_only = {"step", "advantage"}
        lines = [
            json_line({k: v for k, v in record.items() if k not in training_only})
            for record in evaluator.records
        ]
        output.write_bytes(b"".join(lines))
        console.print(f"completions and scores are in {output}")
    return {"model": config.model.name, "prompts": len(prompts), **metrics}
