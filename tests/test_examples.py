"""examples/grpo_loop.py runs with a tiny model, and its loop learns."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_model, tiny_tokenizer
from tiny_runs import ROWS, even, model_folder

from razona.config import DataConfig, OptimizerConfig
from razona.data import PromptSource, build_prompts, load_rows
from razona.engines.native import NativeEngine
from razona.objective import grpo
from razona.policy import Policy
from razona.types import Group

LOOP = str(Path(__file__).parent.parent / "examples/grpo_loop.py")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_loop_of_ones_own(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = model_folder(tmp_path / "tiny")
    flags = ["--model", str(model), "--steps", "2", "--cold-start-steps", "1", "--precision", precision]
    monkeypatch.setattr(sys, "argv", ["grpo_loop.py", *flags])
    runpy.run_path(LOOP, run_name="__main__")
    before, first, second, after = capsys.readouterr().out.splitlines()
    assert first.startswith("step 1: reward ") and second.startswith("step 2: reward ")
    assert before.startswith("held-out sums before") and after.startswith("held-out sums after")


def test_the_loop_of_ones_own_learns(capsys: pytest.CaptureFixture[str]) -> None:
    def evenness(groups: list[Group]) -> torch.Tensor:
        ids = [list(c.token_ids) for group in groups for c in group.completions]
        return torch.tensor(even(completion_ids=ids)).reshape(len(groups), -1, 1)

    train = runpy.run_path(LOOP)["train"]
    train.__globals__["score"] = evenness  # the tiny model cannot add
    policy = Policy(
        tiny_model(), tiny_tokenizer(), optimizer=OptimizerConfig(learning_rate=2e-3), precision="fp32"
    )
    prompts = build_prompts(load_rows(ROWS), policy.tokenizer, DataConfig()).prompts
    engine = NativeEngine(policy, stop_token_ids=(2,))
    train(policy, engine, PromptSource(prompts, seed=0), grpo(weights="per_token"), 10)
    rewards = [float(line.split()[3]) for line in capsys.readouterr().out.splitlines()]
    assert rewards[-1] > rewards[0] + 0.1
