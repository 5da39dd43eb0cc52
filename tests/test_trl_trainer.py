"""What people touch on a trainer: log, evaluation, callbacks, saving, resuming, uploading."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model_state_dict
from safetensors.torch import load_file
from tiny_models import tiny_config, tiny_model, tiny_tokenizer
from tiny_runs import CHATS, ROWS, even, lines, varied
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    EarlyStoppingCallback,
    TrainerCallback,
)
from trl_helpers import tiny_folder, trainer

from razona.errors import CheckpointError, ConfigError, RewardError
from razona.run.console import Console
from razona.trl import GRPOConfig, GRPOTrainer, SFTConfig

EVAL = {"eval_strategy": "steps", "eval_steps": 1, "num_generations_eval": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("models") / "tiny")


def state_of(made: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in made.model.parameters()])


def test_the_log_has_trls_names(folder: Path, tmp_path: Path) -> None:
    made = trainer(folder, tmp_path, reward_funcs=[varied, even], fields={"beta": 0.1})
    output = made.train()
    entry = made.state.log_history[0]
    assert set(entry) == {
        "loss", "grad_norm", "learning_rate", "reward", "reward_std", "frac_reward_zero_std",
        "rewards/varied/mean", "rewards/varied/std", "rewards/even/mean", "rewards/even/std",
        "completions/mean_length", "completions/min_length", "completions/max_length",
        "completions/clipped_ratio", "completions/mean_terminated_length",
        "completions/min_terminated_length", "completions/max_terminated_length",
        "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean",
        "entropy", "kl", "num_tokens", "epoch", "step",
    }  # fmt: skip
    first = [record for record in lines(tmp_path / "run/rollouts.jsonl") if record["step"] == 1]
    totals = torch.tensor([record["reward"] for record in first], dtype=torch.float64)
    assert entry["reward"] == pytest.approx(totals.mean().item())
    assert entry["reward_std"] == pytest.approx(totals.std().item())
    ended = [record["n_tokens"] for record in first if record["finish_reason"] == "stop"]
    assert entry["completions/mean_terminated_length"] == pytest.approx(sum(ended) / len(ended))
    assert entry["completions/clipped_ratio"] == pytest.approx(1 - len(ended) / len(first))
    assert entry["learning_rate"] == 1e-3 and made.state.log_history[1]["learning_rate"] == 5e-4
    assert entry["num_tokens"] < made.state.log_history[1]["num_tokens"] == made.state.num_input_tokens_seen
    ids = [made.processing_class(record["prompt"])["input_ids"] for record in first]
    assert entry["num_tokens"] == sum(map(len, ids)) + sum(record["n_tokens"] for record in first)
    assert (output.global_step, output.metrics["train_loss"]) == (2, output.training_loss)
    assert made.state.log_history[-1]["train_loss"] == output.training_loss
    rate = output.metrics["train_samples_per_second"]
    assert rate == pytest.approx(16 / output.metrics["train_runtime"])
    assert output.metrics["train_steps_per_second"] == pytest.approx(rate / 8)


@pytest.mark.parametrize(
    ("fields", "steps"),
    [
        ({"logging_steps": 2}, [2, 4, 5]),
        ({"logging_steps": 2, "logging_first_step": True}, [1, 2, 4, 5]),
        ({"logging_steps": 0.4}, [2, 4, 5]),
        ({"logging_strategy": "no"}, [5]),
        ({"logging_strategy": "epoch"}, [4, 5]),
    ],
)
def test_what_is_logged_and_when(
    folder: Path, tmp_path: Path, fields: dict[str, Any], steps: list[int]
) -> None:
    """Means since the last entry; the last one, of the whole run, comes in any case."""
    made = trainer(folder, tmp_path, fields={"max_steps": 5, **fields})
    made.train()
    log = made.state.log_history
    assert [entry["step"] for entry in log] == steps
    if fields == {"logging_steps": 2}:
        rewards = [step["reward"] for step in lines(tmp_path / "run/metrics.jsonl")]
        assert log[1]["reward"] == pytest.approx((rewards[2] + rewards[3]) / 2)


def test_several_updates_per_generation_are_as_many_steps(folder: Path, tmp_path: Path) -> None:
    made = trainer(folder, tmp_path, fields={"steps_per_generation": 2, "num_iterations": 2, "max_steps": 8})
    made.train()
    assert made.state.global_step == made.state.max_steps == 8
    assert [entry["step"] for entry in made.state.log_history] == [4, 8, 8]
    assert len(lines(tmp_path / "run/rollouts.jsonl")) == 2 * 16


def test_evaluation_during_training_and_by_itself(folder: Path, tmp_path: Path) -> None:
    made = trainer(folder, tmp_path, eval_dataset=ROWS[:3], fields=EVAL)
    before = state_of(made)
    alone = made.evaluate()
    assert torch.equal(state_of(made), before)
    assert set(alone) == {
        "eval_reward", "eval_rewards/varied/mean", "eval_completions/mean_length",
        "eval_completions/clipped_ratio",
    }  # fmt: skip
    made.train()
    evaluated = [entry for entry in made.state.log_history if "eval_reward" in entry]
    assert [entry["step"] for entry in evaluated] == [1, 2]
    assert made.evaluate()["eval_reward"] == evaluated[1]["eval_reward"] != alone["eval_reward"]
    assert "test_reward" in made.evaluate(ROWS[3:], metric_key_prefix="test")


def test_no_evaluation_without_a_strategy(folder: Path, tmp_path: Path) -> None:
    made = trainer(folder, tmp_path, eval_dataset=ROWS[:3])
    made.train()
    assert not any("eval_reward" in entry for entry in made.state.log_history)
    with pytest.raises(ConfigError, match="eval_strategy = 'steps' without eval_dataset"):
        trainer(folder, tmp_path, fields=EVAL)
    with pytest.raises(ConfigError, match="metric_for_best_model = 'eval_reward' with eval_strategy = 'no'"):
        trainer(folder, tmp_path, fields={"metric_for_best_model": "eval_reward"})


def test_the_best_model_is_loaded(folder: Path, tmp_path: Path) -> None:
    fields = {**EVAL, "load_best_model_at_end": True, "greater_is_better": True, "max_steps": 4}
    made = trainer(
        folder, tmp_path, eval_dataset=ROWS, fields={**fields, "learning_rate": 5e-2, "bf16": False}
    )
    assert made.args.metric_for_best_model == "eval_reward"
    made.train()
    values = {e["step"]: e["eval_reward"] for e in made.state.log_history if "eval_reward" in e}
    assert made.state.best_global_step == max(values, key=lambda step: values[step]) < 4
    assert made.state.best_metric == max(values.values())
    best = AutoModelForCausalLM.from_pretrained(tmp_path / "run/best", dtype=torch.float32)
    last = AutoModelForCausalLM.from_pretrained(tmp_path / "run/model", dtype=torch.float32)
    assert torch.equal(made.model.lm_head.weight, best.lm_head.weight)
    assert not torch.equal(made.model.lm_head.weight, last.lm_head.weight)
    with pytest.raises(ConfigError, match=r"greater_is_better=False.*with the highest value"):
        GRPOConfig(metric_for_best_model="eval_reward", greater_is_better=False)


def test_the_best_adapter_is_loaded(folder: Path, tmp_path: Path) -> None:
    fields = {**EVAL, "load_best_model_at_end": True, "max_steps": 4, "learning_rate": 0.3}
    lora = LoraConfig(r=4, target_modules="all-linear")
    made = trainer(folder, tmp_path, eval_dataset=ROWS, fields=fields, peft_config=lora)
    made.train()
    assert made.state.best_global_step < 4
    found = get_peft_model_state_dict(made.model)
    best, last = (load_file(tmp_path / f"run/{name}/adapter_model.safetensors") for name in ("best", "model"))
    assert found.keys() == best.keys()
    assert all(torch.equal(found[name], best[name]) for name in best)
    assert not all(torch.equal(last[name], best[name]) for name in best)


class Listener(TrainerCallback):
    def __init__(self) -> None:
        self.events: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_"):
            return super().__getattribute__(name)

        def note(args: Any, state: Any, control: Any, **more: Any) -> None:
            assert {"model", "processing_class"} <= more.keys() and isinstance(args, GRPOConfig)
            self.events.append(f"{name.removeprefix('on_')} {state.global_step}")

        return note


def test_callbacks_hear_the_common_events(folder: Path, tmp_path: Path) -> None:
    listener = Listener()
    made = trainer(
        folder, tmp_path, callbacks=[listener], train_dataset=ROWS[:2], eval_dataset=ROWS[:2],
        fields={**EVAL, "save_steps": 1},
    )  # fmt: skip
    made.train()
    assert listener.events == [
        "init_end 0", "train_begin 0", "epoch_begin 0", "step_begin 0",
        "step_end 1", "log 1", "log 1", "evaluate 1", "epoch_end 1", "epoch_begin 1", "step_begin 1",
        "save 1", "step_end 2", "log 2", "log 2", "evaluate 2", "epoch_end 2",
        "save 2", "log 2", "train_end 2",
    ]  # fmt: skip


def test_what_scripts_for_trl_touch(folder: Path, tmp_path: Path) -> None:
    listener = Listener()
    made = trainer(folder, tmp_path, callbacks=[listener, EarlyStoppingCallback])
    made.log({"mine": 1.0})
    assert made.state.log_history[0]["mine"] == 1.0 and made.state.log_history[0]["step"] == 0
    assert listener.events == ["init_end 0", "log 0"] and made.is_world_process_zero()
    made.remove_callback(EarlyStoppingCallback)
    made.remove_callback(listener)
    assert made.callbacks == []
    with pytest.raises(ConfigError, match="there is no callback"):
        made.remove_callback(listener)
    with pytest.raises(AttributeError, match="GRPOTrainer has no 'accelerator': there is one process"):
        _ = made.accelerator
    with pytest.raises(AttributeError, match=r"has no 'foo'. docs/from-trl.md lists"):
        _ = made.foo
    with pytest.raises(ConfigError, match=r"args is a .*those of razona.trl.GRPOConfig"):
        GRPOTrainer(str(folder), varied, SFTConfig(), ROWS)  # type: ignore[arg-type]


def test_early_stopping_stops_and_what_stops_is_saved(folder: Path, tmp_path: Path) -> None:
    made = trainer(
        folder, tmp_path, eval_dataset=ROWS[:2], callbacks=[EarlyStoppingCallback(early_stopping_patience=1)],
        reward_funcs=lambda completions: [0.0] * len(completions),
        fields={**EVAL, "load_best_model_at_end": True, "max_steps": 9},
    )  # fmt: skip
    made.train()
    assert made.state.global_step == 2  # the second evaluation is no better than the first
    assert (tmp_path / "run/checkpoints/step-000002/COMPLETE").exists()


def test_a_callback_that_asks_for_more_is_an_error(folder: Path, tmp_path: Path) -> None:
    class Saves(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_save = True

    made = trainer(folder, tmp_path, callbacks=[Saves])
    with pytest.raises(ConfigError, match=r"Saves set control.should_save in on_step_end.*save_steps"):
        made.train()


def test_rewards_get_state_and_log_figures_and_columns(folder: Path, tmp_path: Path) -> None:
    seen: list[int] = []

    def noted(
        completions: list[str], answer: list[str], trainer_state: Any, log_metric: Any, log_extra: Any
    ) -> Any:
        seen.append(trainer_state.global_step)
        log_metric("seen/completions", len(completions))
        log_extra("gold", answer)
        return [float(len(c)) for c in completions]

    def with_everything(completions: list[str], **kwargs: Any) -> list[float]:
        kwargs["log_metric"]("everything", 3.0)
        assert "answer" in kwargs and kwargs["trainer_state"] is made.state
        return [0.0] * len(completions)

    async def waiting(completions: list[str], log_metric: Any) -> list[float]:
        log_metric("waited", 1.0)
        return [1.0] * len(completions)

    made = trainer(
        folder, tmp_path, reward_funcs=[noted, with_everything, waiting], eval_dataset=ROWS[:1], fields=EVAL
    )
    made.train()
    assert seen == [0, 0, 1, 1]  # training and evaluation of each step
    entry = made.state.log_history[0]
    assert entry["seen/completions"] == 8.0 and entry["everything"] == 3.0 and entry["waited"] == 1.0
    assert set(entry) >= {"rewards/noted/mean", "rewards/with_everything/mean", "rewards/waiting/mean"}
    extra = lines(tmp_path / "run/extra.jsonl")
    assert [line["step"] for line in extra] == [1, 2] and len(extra[0]["gold"]) == 8


def test_a_model_scores(folder: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    scorer = AutoModelForSequenceClassification.from_config(tiny_config("llama", num_labels=1))
    scorer.save_pretrained(tmp_path / "scorer")
    tiny_tokenizer().save_pretrained(tmp_path / "scorer")
    for reward, rows in ((str(tmp_path / "scorer"), ROWS), (scorer, CHATS)):
        made = trainer(
            folder, tmp_path / "out", reward_funcs=reward, train_dataset=rows,
            reward_processing_classes=None if isinstance(reward, str) else tiny_tokenizer(),
        )  # fmt: skip
        made.train()
        name = "scorer" if isinstance(reward, str) else "model"
        assert made.state.log_history[0][f"rewards/{name}/mean"] == made.state.log_history[0]["reward"]
    prompts, texts = ["a prompt: ", "b"], ["an answer", "another one"]
    both = made.reward_funcs[0](prompts=prompts, completions=texts)
    one = made.reward_funcs[0](prompts=prompts[:1], completions=texts[:1])
    assert both[0] == pytest.approx(one[0], abs=1e-5) and both[0] != both[1]
    with pytest.raises(RewardError, match="the reward model 'no/such' cannot be loaded"):
        trainer(folder, tmp_path, reward_funcs="no/such")


def test_resume_equals_a_run_never_stopped(folder: Path, tmp_path: Path) -> None:
    fields = {"lr_scheduler_type": "constant", "save_steps": 1, "max_steps": 4}
    whole = trainer(folder, tmp_path / "whole", fields=fields)
    whole.train()
    half = trainer(folder, tmp_path / "half", fields={**fields, "max_steps": 2})
    half.train()
    newest = tmp_path / "half/run/checkpoints/step-000002"
    with pytest.raises(CheckpointError, match="is not the newest checkpoint"):
        half.train(resume_from_checkpoint=str(newest.with_name("step-000001")))
    rest = trainer(folder, tmp_path / "half", fields={**fields, "resume_from_checkpoint": str(newest)})
    rest.train()
    assert torch.equal(state_of(whole), state_of(rest))
    for name in ("metrics.jsonl", "rollouts.jsonl", "model/model.safetensors"):
        assert (tmp_path / "whole/run" / name).read_bytes() == (tmp_path / "half/run" / name).read_bytes()
    assert whole.state.log_history[:-1] == rest.state.log_history[:-1]
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        trainer(folder, tmp_path / "new").train(resume_from_checkpoint=True)


def test_a_second_run_begins_anew_on_the_trained_model(folder: Path, tmp_path: Path) -> None:
    made = trainer(folder, tmp_path)
    start = state_of(made)
    made.train()
    once = state_of(made)
    assert all(p.dtype == torch.float32 for p in made.model.parameters())
    made.train()
    assert not torch.equal(start, once) and not torch.equal(once, state_of(made))
    assert (tmp_path / "run.old-1/metrics.jsonl").exists()
    assert len(lines(tmp_path / "run/metrics.jsonl")) == 2 and made.state.global_step == 2


def test_a_failed_run_leaves_a_model_that_can_be_trained(folder: Path, tmp_path: Path) -> None:
    fails = [True, False, False]

    def once(completions: list[str]) -> list[float]:
        if fails.pop(0):
            raise ValueError("no")
        return [float(len(c)) for c in completions]

    made = trainer(folder, tmp_path, reward_funcs=once)
    fails.insert(0, True)  # the culprit is searched for with a second call
    with pytest.raises(RewardError, match="raised ValueError: no"):
        made.train()
    made.train()
    assert made.state.global_step == 2


def test_save_model(folder: Path, tmp_path: Path) -> None:
    made = trainer(folder, tmp_path)
    made.train()
    made.save_model()
    made.save_model(str(tmp_path))  # as every TRL script has it; again, over the first
    saved = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert torch.equal(saved.lm_head.weight, made.model.lm_head.weight)
    assert saved.dtype == torch.float32 and (tmp_path / "run/metrics.jsonl").exists()
    with pytest.raises(ConfigError, match="is the folder of a run"):
        made.save_model(str(tmp_path / "run"))


def test_what_there_is_to_say_of_a_model_is_said_once(tmp_path: Path) -> None:
    printed = io.StringIO()
    model = tiny_model("gpt2", attn_pdrop=0.1)
    args = GRPOConfig(str(tmp_path), max_steps=1, max_completion_length=4)
    made = GRPOTrainer(
        model, varied, args, ROWS, processing_class=tiny_tokenizer(), console=Console(file=printed)
    )
    made.train()
    assert printed.getvalue().count("Dropout is off in every pass (2 layers") == 1


def test_save_model_of_several_dtypes(tmp_path: Path) -> None:
    """Loaded as its config says, no weight is rounded."""
    model = tiny_model(dtype=torch.bfloat16)
    model.lm_head.float().weight.data.mul_(1.01)
    made = GRPOTrainer(model, varied, GRPOConfig(str(tmp_path)), ROWS, processing_class=tiny_tokenizer())
    made.save_model()
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float32"
    saved = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert torch.equal(saved.lm_head.weight, model.lm_head.weight)


def test_the_model_generates_after_training(folder: Path, tmp_path: Path) -> None:
    made = trainer(folder, tmp_path)
    made.train()
    tokens = made.model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3, do_sample=False)
    assert tokens.shape[1] > 3


def test_a_model_object_is_trained_in_place(tmp_path: Path) -> None:
    model = tiny_model("llama", max_position_embeddings=512)
    before = model.lm_head.weight.detach().clone()
    fields: dict[str, Any] = {
        "max_completion_length": 8,
        "max_steps": 1,
        "num_generations": 4,
        "learning_rate": 1e-3,
    }
    args = GRPOConfig(output_dir=str(tmp_path), per_device_train_batch_size=4, **fields)
    made = GRPOTrainer(model, varied, args, ROWS, processing_class=tiny_tokenizer())
    made.train()
    assert made.model is model and not torch.equal(model.lm_head.weight, before)
