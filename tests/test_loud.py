"""What goes wrong in silence elsewhere is said: numbers that are not finite, steps that teach nothing."""

from __future__ import annotations

import io
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import ROWS, contents, grpo_config, lines, model_folder, run_grpo, run_sft, sft_config, varied
from torch import Tensor

from razona.config.commands import DemoConfig
from razona.errors import NotFinite
from razona.objective import grpo
from razona.rollout.notices import NothingLearned
from razona.run.checkpoint import newest_checkpoint
from razona.run.console import KEY_FIGURES, Console
from razona.train import sft


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("models") / "llama")


class Turning:
    """GRPO's loss, which turns bad in its ``at``-th step; the first call is the probe before step 1."""

    __name__ = "turning"

    def __init__(self, at: int, how: str = "loss") -> None:
        self.at, self.how, self.calls = at, how, -1

    def __call__(self, logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        self.calls += 1
        loss = grpo().loss_fn(logprobs, old, advantages, mask)
        if self.calls != self.at:
            return loss
        if self.how == "loss":
            return loss + torch.where(mask, math.nan, 0.0)
        return loss + (logprobs - logprobs.detach()).abs().sqrt()  # 0, and its gradient is not finite


@pytest.mark.parametrize("how", ["loss", "gradient norm"])
def test_a_number_that_is_not_finite_stops_the_run(model: Path, tmp_path: Path, how: str) -> None:
    """At once, with the weights and the checkpoint of the step before; and the run can still be resumed."""
    options = {"run__num_steps": 4, "run__save_every": 1}
    out, whole = tmp_path / "run", tmp_path / "whole"
    objective = grpo()
    run_grpo(grpo_config(model, whole, **options), objective=objective._replace(loss_fn=Turning(99)))
    with pytest.raises(NotFinite, match=rf"step 3: the {how} is nan.*weights before it are in .*step-000002"):
        run_grpo(grpo_config(model, out, **options), objective=objective._replace(loss_fn=Turning(3, how)))
    assert [step["step"] for step in lines(out / "metrics.jsonl")] == [1, 2]
    newest, _ = newest_checkpoint(out / "checkpoints")
    assert newest == out / "checkpoints/step-000002"

    run_grpo(grpo_config(model, tmp_path / "two", run__num_steps=2), objective=objective)
    assert contents(tmp_path / "two")["model/model.safetensors"] == contents(out)["model/model.safetensors"]
    again = grpo_config(model, out, **options, run__resume=True)
    run_grpo(again, objective=objective._replace(loss_fn=Turning(99)))
    assert contents(out) == contents(whole)


@pytest.mark.parametrize("how", ["loss", "gradient norm"])
def test_sft_stops_too(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    original, calls = sft.negative_log_likelihood, []

    def turning(logprobs: Tensor, mask: Tensor) -> Tensor:
        calls.append(1)
        bad = math.nan if how == "loss" else (logprobs - logprobs.detach()).abs().sqrt()
        return original(logprobs, mask) + (torch.where(mask, bad, 0.0) if len(calls) == 2 else 0.0)

    monkeypatch.setattr(sft, "negative_log_likelihood", turning)
    with pytest.raises(NotFinite, match=rf"step 2: the {how} is nan.*there is no checkpoint yet"):
        run_sft(sft_config(model, tmp_path / "run"))
    assert [step["step"] for step in lines(tmp_path / "run/metrics.jsonl")] == [1]


def test_steps_that_teach_nothing_are_said_now_and_then(model: Path, tmp_path: Path) -> None:
    """Once, and again after ten steps."""
    config = grpo_config(model, tmp_path / "run", run__num_steps=3)
    _, printed = run_grpo(config, reward_fns=[lambda **_: [0.5] * 16])
    assert printed.count("in every group all rewards are equal (mean 0.5)") == 1
    assert "note: step 1: in every group" in printed and "reward that cannot see the answer" in printed
    _, printed = run_grpo(grpo_config(model, tmp_path / "fine"))
    assert "all rewards are equal" not in printed

    out = io.StringIO()
    note = NothingLearned(Console(file=out))
    for step in range(1, 25):
        zero_std = 0.9 if step == 1 else 1.0
        note(step, {"frac_zero_std": zero_std, "truncated": 1.0, "reward": 0.0, "trained_tokens": 9.0})
    said = [line.split(":")[1] for line in out.getvalue().splitlines()]
    assert said == [" step 2", " step 12", " step 22"] and "max_completion_length" in out.getvalue()


def test_key_figures_are_measured_and_the_seconds_printed(model: Path, tmp_path: Path) -> None:
    _, printed = run_grpo(grpo_config(model, tmp_path / "run", objective__kl_coef=0.1))
    step = lines(tmp_path / "run/metrics.jsonl")[0]
    assert set(KEY_FIGURES) <= step.keys() and {"frac_zero_std", "truncated"} <= set(KEY_FIGURES)
    line = next(line for line in printed.splitlines() if line.startswith("step 1/2"))
    assert all(f"{name} " in line for name in (*KEY_FIGURES, "seconds"))


def test_held_out_prompts_that_are_trained_on_are_said(model: Path, tmp_path: Path) -> None:
    held_out = [ROWS[1], {"prompt": "And 1?", "answer": "1"}, ROWS[3]]
    config = grpo_config(model, tmp_path / "run")
    _, printed = run_grpo(config, eval_rows=held_out, dry_run=True)
    assert "2 of the 3 held-out prompts are training prompts too" in printed
    _, printed = run_grpo(config, eval_rows=held_out[1:2], dry_run=True)
    assert "training prompts too" not in printed


def stopping(*, completion_ids: list[list[int]]) -> list[float]:
    os.kill(os.getpid(), signal.SIGINT)
    return varied(completion_ids=completion_ids)


def test_how_to_go_on_is_said_by_who_knows(model: Path, tmp_path: Path) -> None:
    _, printed = run_grpo(grpo_config(model, tmp_path / "run"), reward_fns=[stopping])
    assert "Resume with: the same command and --run.resume" in printed
    _, printed = run_grpo(
        grpo_config(model, tmp_path / "own"), reward_fns=[stopping], resume_hint="Rest a while."
    )
    assert "Rest a while." in printed and "--run.resume" not in printed


def test_the_demo_names_no_option_it_lacks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from razona.commands import demo

    given: dict[str, Any] = {}

    def interrupted(config: Any, **parts: Any) -> dict[str, Any]:
        given.update(parts)
        return {"interrupted": True, "signal": None}

    loaded = type("Loaded", (), {"model": None, "tokenizer": None, "release": lambda _: None})()
    for name, value in {
        "load_model": lambda *_: loaded,
        "make_policy": lambda *_, **__: loaded,
        "_say_time": lambda *_: None,
        "save": lambda *_: None,
        "_evaluate": lambda *_: (0.0, 0.0),
        "_demonstrations": lambda *_: (1,),
    }.items():
        monkeypatch.setattr(demo, name, value)
    monkeypatch.setattr(demo.sft, "update", lambda *_, **__: {})
    monkeypatch.setattr(demo.grpo, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        demo.run(DemoConfig(output_dir=str(tmp_path)), console=Console(file=io.StringIO()))
    assert "--run.resume" not in given["resume_hint"] and "razona demo" in given["resume_hint"]
