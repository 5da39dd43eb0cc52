"""Held-out evaluation during training: its own rewards, error bars, the best checkpoint."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import ROWS, distance, even, grpo_config, lines, model_folder, run_grpo, varied

from razona.build.model import load_model
from razona.engines.native import NativeEngine
from razona.errors import ConfigError, RewardError
from razona.run.checkpoint import what_is_wrong
from razona.run.console import Console

HELD_OUT = [{"prompt": f"And {i}?", "answer": str(i)} for i in range(6)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("models") / "llama")


class Scripted:
    """An evaluation reward that gives one value after the other, whatever was sampled."""

    __name__ = "scripted"

    def __init__(self, *values: float | None) -> None:
        self.values: Iterator[float | None] = iter(values)

    def __call__(self, *, completions: list[str]) -> list[float | None]:
        return [next(self.values)] * len(completions)


def training_figures(out: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in s.items() if not k.startswith("eval/")} for s in lines(out / "metrics.jsonl")]


def test_evaluation_leaves_training_alone(model: Path, tmp_path: Path) -> None:
    """With and without it, the same training figures and weights: its rewards are summed into nothing."""
    run_grpo(grpo_config(model, tmp_path / "without", run__num_steps=4))
    config = grpo_config(model, tmp_path / "with", run__num_steps=4, eval__every=3, eval__samples=2)
    result, _ = run_grpo(config, eval_rows=HELD_OUT, eval_reward_fns=[lambda **k: [100.0] * 12, even])
    assert training_figures(tmp_path / "with") == training_figures(tmp_path / "without")
    assert distance(tmp_path / "with", tmp_path / "without") == 0
    steps = lines(tmp_path / "with/metrics.jsonl")
    assert ["eval/even" in step for step in steps] == [False, False, True, True]  # and after the last step
    last = steps[-1]
    assert last["eval/lambda"] == 100 and last["eval/lambda/error"] == 0
    assert last["eval/reward"] == pytest.approx(100 + last["eval/even"])
    assert 0 < last["eval/even/error"] < 0.3 and result["eval/even"] == last["eval/even"]
    assert {"eval/completion_length", "eval/truncated"} <= last.keys()
    assert all(set(r["rewards"]) == {"varied"} for r in lines(tmp_path / "with/rollouts.jsonl"))


def test_every_evaluation_draws_the_same(model: Path, tmp_path: Path) -> None:
    """Without learning, figures do not move: what moves later is the policy and not the draw."""
    config = grpo_config(
        model, tmp_path / "run", run__num_steps=3, eval__every=1, optimizer__learning_rate=0.0
    )
    run_grpo(config, eval_rows=HELD_OUT, reward_fns=[varied, even])
    figures = [
        {k: v for k, v in step.items() if k.startswith("eval/")}
        for step in lines(tmp_path / "run/metrics.jsonl")
    ]
    assert figures[0] == figures[1] == figures[2] and figures[0]["eval/varied/error"] > 0


def test_greedy_evaluation(model: Path, tmp_path: Path) -> None:
    config = grpo_config(model, tmp_path / "run", run__num_steps=1, eval__temperature=0.0)
    run_grpo(config, eval_rows=[HELD_OUT[0]] * 3)
    assert lines(tmp_path / "run/metrics.jsonl")[0]["eval/varied/error"] == 0


def whole_checkpoints(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "checkpoints").iterdir() if what_is_wrong(path) is None)


def test_the_best_checkpoint_is_kept(model: Path, tmp_path: Path) -> None:
    config = grpo_config(
        model, tmp_path / "run", run__num_steps=5, run__save_every=1, run__keep_checkpoints=1, eval__every=1,
        eval__best_metric="eval/scripted",
    )  # fmt: skip
    result, printed = run_grpo(
        config, eval_rows=HELD_OUT, eval_reward_fns=[even, Scripted(0.1, 0.9, 0.3, 0.9, 0.2)]
    )
    assert result["best_step"] == 2 and whole_checkpoints(tmp_path / "run") == ["step-000002", "step-000005"]
    assert f"best         {tmp_path / 'run/best'}, of step 2 (0.9)" in printed


def test_the_best_model_is_a_folder_that_loads(model: Path, tmp_path: Path) -> None:
    """The weights of the best step, and those of the last one beside it."""
    parts: dict[str, Any] = {"eval_rows": HELD_OUT}
    config = grpo_config(model, tmp_path / "run", run__num_steps=3, eval__every=1)
    run_grpo(config, eval_reward_fns=[Scripted(0.1, 0.9, 0.3)], **parts)
    run_grpo(grpo_config(model, tmp_path / "two"), eval_reward_fns=[Scripted(0.1)], **parts)
    best, last, two = (
        load_file(tmp_path / name / "model.safetensors") for name in ("run/best", "run/model", "two/model")
    )
    assert all(torch.equal(best[name], two[name]) for name in two)
    assert any(not torch.equal(best[name], last[name]) for name in last)
    assert load_model(grpo_config(tmp_path / "run/best", tmp_path).model, Console(file=io.StringIO())).model


def test_a_best_step_is_saved_though_no_save_is_due(model: Path, tmp_path: Path) -> None:
    config = grpo_config(model, tmp_path / "run", run__num_steps=4, run__keep_checkpoints=9, eval__every=1)
    run_grpo(config, eval_rows=HELD_OUT, eval_reward_fns=[Scripted(0.1, 0.9, 0.3, 0.2)])
    assert whole_checkpoints(tmp_path / "run") == ["step-000001", "step-000002", "step-000004"]


def test_an_evaluation_that_abstains_is_never_the_best(model: Path, tmp_path: Path) -> None:
    config = grpo_config(model, tmp_path / "run", run__num_steps=3, eval__every=1)
    result, _ = run_grpo(config, eval_rows=HELD_OUT, eval_reward_fns=[Scripted(None, 0.5, None)])
    assert result["best_step"] == 2
    first, second, _ = lines(tmp_path / "run/metrics.jsonl")
    assert first["eval/scripted"] is None and second["eval/scripted"] == 0.5
    result, _ = run_grpo(
        grpo_config(model, tmp_path / "none"), eval_rows=HELD_OUT, eval_reward_fns=[Scripted(None)]
    )
    assert result["best_step"] is None and math.isnan(result["eval/reward"])


@pytest.mark.parametrize(
    ("metric", "rows", "text"),
    [
        (
            "eval/evn",
            HELD_OUT,
            r"'eval/evn', which is not measured\. Did you mean 'eval/even'\? Measured are",
        ),
        ("eval/varied", HELD_OUT, r"'eval/varied', which is not measured"),
        ("eval/even", None, r"eval\.data is empty"),
        (
            "eval/truncated",
            HELD_OUT,
            r"'eval/truncated': the step with the highest value .* eval/even, eval/",
        ),
        ("eval/completion_length", HELD_OUT, r"'eval/completion_length': the step with the highest value"),
    ],
)
def test_an_unknown_best_metric_is_refused_before_training(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, metric: str, rows: Any, text: str
) -> None:
    monkeypatch.setattr(NativeEngine, "generate", None)
    config = grpo_config(model, tmp_path / "run", eval__best_metric=metric)
    with pytest.raises(ConfigError, match=text):
        run_grpo(config, eval_rows=rows, eval_reward_fns=[even])
    assert not list(tmp_path.iterdir())


def test_a_reward_that_fails_in_evaluation_is_named(model: Path, tmp_path: Path) -> None:
    with pytest.raises(RewardError, match="'scripted' returned nan"):
        run_grpo(
            grpo_config(model, tmp_path / "run"), eval_rows=HELD_OUT, eval_reward_fns=[Scripted(math.nan)]
        )


def test_held_out_rows_from_a_file(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "held-out.csv"
    path.write_text("prompt,answer\nOne?,1\nTwo?,2\n", encoding="utf-8")
    run_grpo(grpo_config(model, tmp_path / "run", eval__data=str(path)), rows=ROWS)
    assert "eval/varied" in lines(tmp_path / "run/metrics.jsonl")[-1]


def test_options_of_an_evaluation_that_has_no_rows(model: Path, tmp_path: Path) -> None:
    config = grpo_config(model, tmp_path / "run", eval__every=5)
    with pytest.raises(ConfigError, match=r"eval\.every = 5: but eval\.data is empty"):
        run_grpo(config)
