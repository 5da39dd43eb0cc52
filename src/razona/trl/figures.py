"""What a step measured, under TRL's metric names. docs/from-trl.md lists them, and where they differ."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]
SAME = {
    "loss": "loss",
    "grad_norm": "grad_norm",
    "lr": "learning_rate",
    "reward": "reward",
    "frac_zero_std": "frac_reward_zero_std",
    "completion_length": "completions/mean_length",
    "completion_length/min": "completions/min_length",
    "completion_length/max": "completions/max_length",
    "truncated": "completions/clipped_ratio",
    "kl": "kl",
    "token_accuracy": "mean_token_accuracy",
    "entropy": "entropy",
    "clip/low": "clip_ratio/low_mean",
    "clip/high": "clip_ratio/high_mean",
}
"""razona's name -> TRL's."""


OF_REWARDS = {
    "eval/reward": "reward",
    "eval/completion_length": "completions/mean_length",
    "eval/truncated": "completions/clipped_ratio",
}
OF_LOSS = {
    "eval/loss": "loss",
    "eval/token_accuracy": "mean_token_accuracy",
    "eval/entropy": "entropy",
}


def training_figures(metrics: Mapping[str, float], records: Sequence[Record]) -> dict[str, float]:
    """The figures of one step; of completions, where there are any."""
    figures = {theirs: metrics[ours] for ours, theirs in SAME.items() if ours in metrics}
    if "clip/low" in metrics:
        figures["clip_ratio/region_mean"] = metrics["clip/low"] + metrics["clip/high"]
    return figures | (_of_completions(records) if records else {})


def eval_figures(metrics: Mapping[str, float], prefix: str = "eval") -> dict[str, float]:
    """``eval/NAME`` figures: ``eval_reward``, ``eval_rewards/NAME/mean`` and lengths; of SFT ``eval_loss``,
    ``eval_mean_token_accuracy`` and ``eval_entropy``; nothing where there was no evaluation.
    """
    named = OF_REWARDS if "eval/reward" in metrics else OF_LOSS
    figures = {}
    for name, value in metrics.items():
        if name.startswith("eval/") and not name.endswith("/error"):
            theirs = named.get(name, f"rewards/{name.removeprefix('eval/')}/mean")
            figures[f"{prefix}_{theirs}"] = value
    return figures


def mean_of(rows: Iterable[Mapping[str, float]]) -> dict[str, float | None]:
    """Mean of each figure over the rows that have it; as in TRL, nan is left out, and None where all are."""
    values: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            values.setdefault(name, []).extend([] if math.isnan(value) else [value])
    return {name: sum(known) / len(known) if known else None for name, known in values.items()}


def _of_completions(records: Sequence[Record]) -> dict[str, float]:
    ended = [record["n_tokens"] for record in records if record["finish_reason"] == "stop"] or [0]
    figures = {
        "reward_std": _std(record["reward"] for record in records),
        "completions/mean_terminated_length": sum(ended) / len(ended),
        "completions/min_terminated_length": min(ended),
        "completions/max_terminated_length": max(ended),
    }
    for name in records[0]["rewards"]:
        values = [record["rewards"][name] for record in records]
        scored = [value for value in values if not math.isnan(value)]
        figures[f"rewards/{name}/mean"] = sum(scored) / len(scored) if scored else math.nan
        figures[f"rewards/{name}/std"] = _std(values)
    return figures


def _std(values: Iterable[float]) -> float:
    """Sample deviation over all completions of the step, as TRL has it, abstentions left out."""
    scored = [value for value in values if not math.isnan(value)]
    return statistics.stdev(scored) if len(scored) > 1 else math.nan
