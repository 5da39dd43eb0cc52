"""Held-out loss in the SFT loop: its figures, its error bar, the best step, and that it changes nothing."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_sft_loop import TALKS, _console
from tiny_runs import contents, lines, model_folder, run_sft, sft_config

from razona.build.model import load_model, make_policy
from razona.cli import main
from razona.config import DataConfig, OptimizerConfig
from razona.data import build_demonstrations, load_rows
from razona.rollout.evaluate import LossEvaluator
from razona.rollout.metrics import ratio_and_error

TRAIN, HELD_OUT = TALKS[:4], TALKS[4:]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("models") / "llama")


def fp32(model: Path, out: Path, **changes: Any) -> Any:
    return sft_config(model, out, model__precision="fp32", **changes)


@pytest.mark.parametrize("arch", ["llama", "mamba"])
def test_the_figures_are_those_of_transformers_own_logits(tmp_path: Path, arch: str) -> None:
    """Loss, accuracy and entropy over all trained tokens, whatever the micro-batches; flat rows and full."""
    config = fp32(model_folder(tmp_path / arch, arch), tmp_path / "run")
    loaded = load_model(config.model, _console())
    rows = build_demonstrations(
        load_rows(TALKS), loaded.tokenizer, DataConfig(), max_length=500, stop_token_ids=loaded.stop_token_ids
    ).demonstrations
    losses, hits, entropies = [], [], []
    for row in rows:
        ids, mask = torch.tensor([row.token_ids]), torch.tensor(row.loss_mask[1:])
        with torch.no_grad():
            logits = loaded.model(ids).logits[0, :-1][mask]
        target = ids[0, 1:][mask]
        losses.append(torch.nn.functional.cross_entropy(logits, target, reduction="none"))
        hits.append((logits.argmax(-1) == target).float())
        entropies.append(torch.distributions.Categorical(logits=logits).entropy())
    policy = make_policy(loaded, config.model, OptimizerConfig(), total_updates=1)
    for budget in (4096, 60, 1):
        found = LossEvaluator(rows, budget=budget)(policy)
        assert found["eval/loss"] == pytest.approx(torch.cat(losses).mean().item(), rel=1e-4)
        assert found["eval/token_accuracy"] == pytest.approx(torch.cat(hits).mean().item())
        assert found["eval/entropy"] == pytest.approx(torch.cat(entropies).mean().item(), rel=1e-4)
        assert 0 < found["eval/loss/error"] < found["eval/loss"]


def test_the_error_bar_is_over_rows() -> None:
    values = torch.tensor([1.0, 2.0, 4.0, 9.0], dtype=torch.float64)
    counts = torch.full((4,), 5.0, dtype=torch.float64)
    mean, error = ratio_and_error(values * counts, counts)
    assert mean == 4.0 and error == pytest.approx(
        values.std().item() / 2
    )  # rows of one length: the usual one
    assert math.isnan(ratio_and_error(values[:1], counts[:1])[1])
    # Rows of unequal length, against what the ratio does when the rows are drawn again and again.
    generator = torch.Generator().manual_seed(0)
    counts = torch.randint(1, 40, (400,), generator=generator).double()
    totals = counts * (1 + torch.rand(400, generator=generator, dtype=torch.float64)) + 3
    drawn = torch.randint(400, (2000, 400), generator=generator)
    spread = (totals[drawn].sum(1) / counts[drawn].sum(1)).std().item()
    assert ratio_and_error(totals, counts)[1] == pytest.approx(spread, rel=0.1)


def test_training_is_the_same_with_evaluation(model: Path, tmp_path: Path) -> None:
    run_sft(fp32(model, tmp_path / "without"), rows=TRAIN)
    run_sft(fp32(model, tmp_path / "with", eval__every=1), rows=TRAIN, eval_rows=HELD_OUT)
    names = ("loss", "grad_norm", "token_accuracy", "entropy", "trained_tokens", "lr")
    for a, b in zip(*(lines(tmp_path / n / "metrics.jsonl") for n in ("without", "with")), strict=True):
        assert [a[name] for name in names] == [b[name] for name in names]
        assert "eval/loss" in b and "eval/loss" not in a


def test_before_an_update_loss_and_accuracy_are_those_of_training(model: Path, tmp_path: Path) -> None:
    options = {"run__num_steps": 1, "rows_per_step": 4, "optimizer__learning_rate": 0.0}
    run_sft(fp32(model, tmp_path / "run", **options), rows=TRAIN, eval_rows=TRAIN)
    step = lines(tmp_path / "run/metrics.jsonl")[0]
    for name in ("loss", "token_accuracy", "entropy"):
        assert step[f"eval/{name}"] == pytest.approx(step[name], rel=1e-5)


@pytest.mark.parametrize("metric", ["eval/loss", "eval/token_accuracy"])
def test_the_best_step_is_kept(model: Path, tmp_path: Path, metric: str) -> None:
    """The lowest loss, or the highest accuracy. With a rate that does harm, the last loss is not it."""
    config = fp32(
        model, tmp_path / "run", run__num_steps=12, optimizer__learning_rate=3e-2, eval__every=2,
        eval__best_metric=metric, run__keep_checkpoints=1,
    )  # fmt: skip
    result, printed = run_sft(config, rows=TRAIN, eval_rows=HELD_OUT)
    values = {s["step"]: s[metric] for s in lines(tmp_path / "run/metrics.jsonl") if metric in s}
    assert list(values) == [2, 4, 6, 8, 10, 12]
    best = (min if metric == "eval/loss" else max)(values, key=lambda step: values[step])
    assert result["best_step"] == best and f"of step {best} " in printed
    assert best < 12 or metric != "eval/loss"
    kept = load_file(tmp_path / "run/best/model.safetensors")
    stored = load_file(tmp_path / f"run/checkpoints/step-{best:06d}/policy.safetensors")
    assert any(torch.equal(kept["lm_head.weight"], tensor) for tensor in stored.values())


def test_resume_with_evaluation_is_a_run_never_stopped(model: Path, tmp_path: Path) -> None:
    options = {"eval__every": 1, "optimizer__learning_rate": 3e-2}
    parts = {"rows": TRAIN, "eval_rows": HELD_OUT}
    run_sft(sft_config(model, tmp_path / "whole", run__num_steps=4, **options), **parts)
    run_sft(sft_config(model, tmp_path / "half", run__num_steps=2, **options), **parts)
    run_sft(sft_config(model, tmp_path / "half", run__num_steps=4, run__resume=True, **options), **parts)
    assert contents(tmp_path / "whole") == contents(tmp_path / "half")
    best = Path("best/model.safetensors")
    assert (tmp_path / "whole" / best).read_bytes() == (tmp_path / "half" / best).read_bytes()


def test_from_the_command_line_with_what_is_in_both(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train, held_out = tmp_path / "train.jsonl", tmp_path / "held_out.jsonl"
    train.write_text("\n".join(json.dumps({"text": f"Count to {i}."}) for i in range(4)))
    held_out.write_text("\n".join(json.dumps({"text": f"Count to {i}."}) for i in range(3, 6)))
    out = tmp_path / "run"
    options = ["--steps", "2", "--eval-every", "1", "--output-dir", str(out), "--json"]
    code = main(["sft", "--model", str(model), "--data", str(train), "--eval-data", str(held_out), *options])
    printed = capsys.readouterr()
    result = json.loads(printed.out.splitlines()[-1])
    assert code == 0 and result["eval/loss"] > 0 and result["eval/loss/error"] > 0
    assert "(whole texts and their end tokens)" in printed.err
    assert "held out: 3 rows, their loss measured every 1 steps and after the last step" in printed.err
    assert "1 of the 3 held-out rows are training rows too" in printed.err
    stored = json.loads((out / "config.json").read_text())
    assert stored["header"][0].startswith("SFT on 4 demonstrations") and "+" in stored["data_fingerprint"]
