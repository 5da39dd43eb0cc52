"""Names of other libraries and of older versions are answered with ours."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from razona.config import EvaluateConfig, GenerateConfig, GRPOConfig, SelectConfig, SFTConfig
from razona.config.load import load_config
from razona.config.names import OTHERS, RENAMED, other_version
from razona.config.options import options
from razona.errors import ConfigError

COMMANDS = (GRPOConfig, SFTConfig, GenerateConfig, EvaluateConfig, SelectConfig)


def refused(toml: str, tmp_path: Path, cls: type) -> str:
    file = tmp_path / "run.toml"
    file.write_text(toml)
    with pytest.raises(ConfigError) as error:
        load_config(cls, file)
    return str(error.value)


@pytest.mark.parametrize(
    ("cls", "name", "value", "words"),
    [
        (GRPOConfig, "num_generations", 8, "It is sampling.group_size (--group-size) here."),
        (GRPOConfig, "beta", 0.1, "It is objective.kl_coef (--objective.kl-coef) here: the weight of the KL"),
        (
            GRPOConfig,
            "epsilon",
            0.2,
            "objective.clip_low (--objective.clip-low) here: the lower side only; the",
        ),
        (GRPOConfig, "epsilon_high", 0.28, "It is objective.clip_high (--objective.clip-high) here"),
        (
            GRPOConfig,
            "loss_type",
            "dapo",
            "objective.name (--objective) here: dapo is --objective dapo, which",
        ),
        (GRPOConfig, "scale_rewards", "group", "It is objective.std (--objective.std) here: group is sample"),
        (
            GRPOConfig,
            "per_device_train_batch_size",
            8,
            "prompts_per_step (--prompts-per-step) here: prompts_per",
        ),
        (
            SFTConfig,
            "per_device_train_batch_size",
            8,
            "rows_per_step (--rows-per-step) here: rows_per_step per",
        ),
        (
            SFTConfig,
            "num_train_epochs",
            1,
            "run.num_steps (--steps) here: in steps: epochs * rows / rows_per_s",
        ),
        (
            GRPOConfig,
            "max_prompt_length",
            9,
            "data.max_prompt_length (--data.max-prompt-length) here: a longer",
        ),
        (
            GRPOConfig,
            "use_vllm",
            True,
            "The model that is trained samples for itself, without a server: leave",
        ),
        (GRPOConfig, "report_to", "wandb", "Every step is in metrics.jsonl of run.output_dir"),
        (SFTConfig, "lora_alpha", 8, "It is lora.alpha (--lora.alpha) here."),
    ],
)
def test_names_of_other_libraries_are_answered_with_ours(
    cls: type, name: str, value: Any, words: str, tmp_path: Path
) -> None:
    table = "objective" if cls is GRPOConfig else "run"
    for toml in (f"{name} = {json.dumps(value)}", f"[{table}]\n{name} = {json.dumps(value)}"):
        assert words in refused(toml, tmp_path, cls)
    flag = f"--{name.replace('_', '-')}"
    for args in ([flag, str(value)], [f"{flag}={value}"], [f"--{name}", str(value)]):
        with pytest.raises(ConfigError, match=f"unknown option {args[0].split('=')[0]}") as error:
            load_config(cls, None, args)
        assert words in str(error.value)


def test_the_last_word_of_an_option_is_not_enough() -> None:
    with pytest.raises(ConfigError, match=r"It is optimizer.learning_rate \(--lr\) here"):
        load_config(GRPOConfig, None, ["--learning-rate", "1"])
    with pytest.raises(
        ConfigError, match=r"It is objective.dynamic_sampling.pass_above .* or objective.diff"
    ):
        load_config(GRPOConfig, None, ["--pass-above", "1"])


def test_old_names_say_the_new_one(tmp_path: Path) -> None:
    for old, new in RENAMED.items():
        cls = SelectConfig if old == "reward" else GRPOConfig
        *tables, name = old.split(".")
        toml = (f"[{'.'.join(tables)}]\n" if tables else "") + f"{name} = 1"
        said = refused(toml, tmp_path, cls)
        assert "objective.dynamic_sampling now" in said or f"It is {new} now." in said
        if old not in ("reward", "objective.refill"):  # razona select --reward stays, as the short spelling
            with pytest.raises(ConfigError, match=f"It is {new} now"):
                load_config(cls, None, [f"--{old.replace('_', '-')}", "1"])
    with pytest.raises(ConfigError, match=r"It is objective.dynamic_sampling.mode now"):
        load_config(GRPOConfig, None, ["--objective.refill.mode", "on"])


def test_other_names_are_no_options_and_lead_to_ones() -> None:
    known = {option.name for cls in COMMANDS for option in options(cls())}
    for name, (ours, note) in OTHERS.items():
        assert set(ours.split()) <= known and (ours or note.endswith(".")), name
        assert name not in known, name


def test_a_configuration_of_another_version_is_known() -> None:
    stored = json.loads(json.dumps(dataclasses.asdict(GRPOConfig())))
    assert other_version(stored, GRPOConfig()) == ""
    del stored["run"]["save_every"]  # may change on a resume
    assert other_version(stored, GRPOConfig()) == ""
    stored["objective"]["refill"] = stored["objective"].pop("dynamic_sampling")
    del stored["objective"]["kl_coef"]
    said = other_version(stored, GRPOConfig())
    assert "it has objective.refill, which is objective.dynamic_sampling now" in said
    assert "it lacks objective.kl_coef" in said and "it lacks objective.dynamic_sampling" in said


def test_a_class_variable_is_no_key(tmp_path: Path) -> None:
    assert "unknown key 'SHORT_FLAGS'" in refused("SHORT_FLAGS = 1", tmp_path, SelectConfig)
