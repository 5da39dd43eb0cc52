"""SFTTrainer: its log, evaluation during training, the best model, plain texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import ROWS, lines
from transformers import AutoModelForCausalLM, EarlyStoppingCallback, TrainerCallback, TrainingArguments
from trl_helpers import tiny_folder

from razona.errors import ConfigError, DataError
from razona.trl import GRPOConfig, SFTConfig, SFTTrainer

DEMONSTRATIONS = [{"prompt": row["prompt"], "completion": f" {row['answer']}, done."} for row in ROWS]
EVAL = {"eval_strategy": "steps", "eval_steps": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("models") / "tiny")


def made(folder: Path, out: Path, *, rows: Any = DEMONSTRATIONS, **given: Any) -> SFTTrainer:
    """``given``: fields of the configuration, and ``eval_dataset`` and ``callbacks``."""
    arguments = {name: given.pop(name) for name in ("eval_dataset", "callbacks") if name in given}
    fields = {"max_steps": 3, "learning_rate": 1e-2, "logging_steps": 1, "bf16": False, **given}
    return SFTTrainer(str(folder), SFTConfig(output_dir=str(out), **fields), rows, **arguments)


def test_sft(folder: Path, tmp_path: Path) -> None:
    listener: list[int] = []

    class Hears(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            listener.append(state.global_step)

    trainer = made(folder, tmp_path, eval_dataset=DEMONSTRATIONS, callbacks=[Hears()])
    before = trainer.evaluate()
    assert before.keys() == {"eval_loss", "eval_mean_token_accuracy", "eval_entropy"}
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["step"] for entry in log] == listener == [1, 2, 3]
    assert set(log[0]) == {
        "loss", "grad_norm", "learning_rate", "mean_token_accuracy", "entropy", "num_tokens", "epoch", "step",
    }  # fmt: skip
    for name in ("loss", "mean_token_accuracy", "entropy"):  # the batch is the whole data set
        assert log[0][name] == pytest.approx(before[f"eval_{name}"], rel=1e-4)
    texts = [row["prompt"] + row["completion"] for row in DEMONSTRATIONS]
    tokens = sum(len(trainer.processing_class(text)["input_ids"]) + 1 for text in texts)  # and the end token
    assert [entry["num_tokens"] for entry in log] == [tokens, 2 * tokens, 3 * tokens]
    after = trainer.evaluate()["eval_loss"]
    assert after < before["eval_loss"]
    assert trainer.evaluate(DEMONSTRATIONS * 10)["eval_loss"] == pytest.approx(after, rel=1e-3)
    trainer.save_model()
    assert (tmp_path / "model.safetensors").exists()
    with pytest.raises(ConfigError, match=r"SFTConfig\(completion_only_loss=False\) is not supported"):
        SFTConfig(completion_only_loss=False)


def test_evaluation_during_training(folder: Path, tmp_path: Path) -> None:
    trainer = made(
        folder, tmp_path, eval_dataset=DEMONSTRATIONS[:3], **{**EVAL, "eval_steps": 2}, max_steps=5
    )
    trainer.train()
    evaluated = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    assert [entry["step"] for entry in evaluated] == [2, 4, 5]
    steps = {line["step"]: line for line in lines(tmp_path / "run/metrics.jsonl")}
    for entry in evaluated:
        assert entry["eval_loss"] == steps[entry["step"]]["eval/loss"]
        assert entry["eval_mean_token_accuracy"] == steps[entry["step"]]["eval/token_accuracy"]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(evaluated[-1]["eval_loss"], rel=1e-6)
    assert "test_loss" in trainer.evaluate(DEMONSTRATIONS[3:], metric_key_prefix="test")


def test_no_evaluation_without_a_strategy(folder: Path, tmp_path: Path) -> None:
    trainer = made(folder, tmp_path, eval_dataset=DEMONSTRATIONS[:3])
    trainer.train()
    assert not any("eval_loss" in entry for entry in trainer.state.log_history)
    with pytest.raises(ConfigError, match="eval_strategy = 'steps' without eval_dataset"):
        made(folder, tmp_path, **EVAL)
    with pytest.raises(ConfigError, match="metric_for_best_model = 'eval_loss' with eval_strategy = 'no'"):
        made(folder, tmp_path, load_best_model_at_end=True)
    with pytest.raises(DataError, match="nothing to evaluate on"):
        made(folder, tmp_path).evaluate()


@pytest.mark.parametrize("metric", [None, "mean_token_accuracy"])
def test_the_best_model_is_loaded(folder: Path, tmp_path: Path, metric: str | None) -> None:
    """The lowest loss where nothing else is said; with a rate that does harm not the last step."""
    fields = {**EVAL, "load_best_model_at_end": True, "max_steps": 8, "learning_rate": 3e-2}
    trainer = made(
        folder, tmp_path, rows=DEMONSTRATIONS[:4], eval_dataset=DEMONSTRATIONS[4:],
        metric_for_best_model=metric, lr_scheduler_type="constant", **fields,
    )  # fmt: skip
    name = f"eval_{metric or 'loss'}"
    assert trainer.args.metric_for_best_model == (metric or "eval_loss")
    assert trainer.args.greater_is_better is (metric is not None)
    trainer.train()
    values = {e["step"]: e[name] for e in trainer.state.log_history if name in e}
    best = (min if metric is None else max)(values, key=lambda step: values[step])
    assert trainer.state.best_global_step == best and trainer.state.best_metric == values[best]
    assert best < 8
    kept = AutoModelForCausalLM.from_pretrained(tmp_path / "run/best", dtype=torch.float32)
    assert torch.equal(trainer.model.lm_head.weight, kept.lm_head.weight)
    for changes, error in (
        ({"greater_is_better": True}, "with the lowest value"),
        ({"metric_for_best_model": "eval_reward"}, "none of 'eval_loss', 'eval_mean_token_accuracy'"),
        (
            {"metric_for_best_model": "eval_mean_token_accuracy", "greater_is_better": False},
            "with the highest",
        ),
    ):
        with pytest.raises(ConfigError, match=error):
            SFTConfig(**{"load_best_model_at_end": True, **changes})


def test_early_stopping_hears_the_loss(folder: Path, tmp_path: Path) -> None:
    trainer = made(
        folder, tmp_path, rows=DEMONSTRATIONS[:2], eval_dataset=DEMONSTRATIONS[4:], max_steps=50,
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2)], learning_rate=3e-2,
        load_best_model_at_end=True, **EVAL,
    )  # fmt: skip
    trainer.train()
    best = trainer.state.best_global_step
    assert best is not None and trainer.state.global_step == best + 2 < 50


def test_resume_with_evaluation(folder: Path, tmp_path: Path) -> None:
    fields = {**EVAL, "eval_dataset": DEMONSTRATIONS[:3], "lr_scheduler_type": "constant"}
    whole = made(folder, tmp_path / "whole", max_steps=4, **fields)
    whole.train()
    made(folder, tmp_path / "half", max_steps=2, **fields).train()
    rest = made(folder, tmp_path / "half", max_steps=4, **fields)
    rest.train(resume_from_checkpoint=True)
    assert whole.state.log_history[:-1] == rest.state.log_history[:-1]
    assert torch.equal(whole.model.lm_head.weight, rest.model.lm_head.weight)


def test_plain_texts(folder: Path, tmp_path: Path) -> None:
    """All of a text and its end token; dataset_text_field names the column."""
    texts = [f"{row['prompt']} yes" for row in ROWS]
    losses = []
    for field in ("text", "body"):
        trainer = made(
            folder, tmp_path / field, rows=[{field: text} for text in texts], dataset_text_field=field
        )
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
        step = lines(tmp_path / field / "run/metrics.jsonl")[0]
        assert step["trained_tokens"] == sum(len(trainer.processing_class(t)["input_ids"]) for t in texts)
    assert losses[0] == losses[1]
    with pytest.raises(DataError, match="no column 'prompt'"):
        made(folder, tmp_path / "none", rows=[{"body": "x"}]).train()


def test_several_data_sets_are_evaluated_each_under_its_name(folder: Path, tmp_path: Path) -> None:
    parts = {"a": DEMONSTRATIONS[:3], "b": DEMONSTRATIONS[3:]}
    trainer = made(folder, tmp_path, eval_dataset=parts)
    found = trainer.evaluate()
    assert found["eval_a_loss"] == trainer.evaluate(parts["a"])["eval_loss"] != found["eval_b_loss"]
    assert len(found) == 6 and "eval_a_loss" in trainer.state.log_history[0]
    with pytest.raises(
        ConfigError, match=r"several data sets as eval_dataset \(a, b\): a run is evaluated on one"
    ):
        made(folder, tmp_path, eval_dataset=parts, **EVAL)


def test_another_trainers_configuration_is_refused(folder: Path) -> None:
    """Its defaults would be taken in silence."""
    for args in (GRPOConfig(), TrainingArguments("x"), {"max_steps": 1}):
        with pytest.raises(ConfigError, match=r"args is a .*those of razona.trl.SFTConfig. Import that"):
            SFTTrainer(str(folder), args, DEMONSTRATIONS)  # type: ignore[arg-type]
