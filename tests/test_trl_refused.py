"""What razona.trl refuses, and what stands in for what: models, tokenizers, adapters."""

from __future__ import annotations

import json
import types
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, PeftModel
from tiny_models import tiny_model, tiny_tokenizer
from tiny_runs import ROWS, varied
from transformers import AutoModelForCausalLM
from trl_helpers import tiny_folder, trainer

from razona.config import LoRAConfig
from razona.errors import ConfigError, DataError, ModelError
from razona.models import HubSilent
from razona.models.resolve import resolve
from razona.trl import GRPOConfig, GRPOTrainer
from razona.trl.model import _lora


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("models") / "tiny")


def test_peft_config(folder: Path) -> None:
    """Its options as those of razona's own table."""
    lora = LoraConfig(r=8, lora_alpha=16, target_modules=["v_proj", "q_proj"])
    assert _lora(lora, GRPOConfig(seed=3)) == {
        "lora": LoRAConfig(r=8, alpha=16, target_modules=("q_proj", "v_proj")),
        "seed": 3,
    }
    assert _lora(LoraConfig(), GRPOConfig())["lora"].target_modules == ("q_proj", "v_proj")
    assert _lora(LoraConfig(target_modules="all-linear"), GRPOConfig())["lora"].target_modules == ()
    with pytest.raises(ConfigError, match="is a pattern"):
        _lora(LoraConfig(target_modules=".*q_proj"), GRPOConfig())
    with pytest.raises(ConfigError, match=r"peft_config.modules_to_save = \['score'\] is not supported"):
        _lora(LoraConfig(modules_to_save=["score"]), GRPOConfig())


def test_lora_trains_and_is_saved_as_peft_does(folder: Path, tmp_path: Path) -> None:
    made = trainer(folder, tmp_path / "run", peft_config=LoraConfig(r=4, target_modules="all-linear"))
    made.train()
    made.save_model(str(tmp_path / "adapter"))
    base = AutoModelForCausalLM.from_pretrained(folder)
    found = PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    moved = [p.abs().max().item() for name, p in found.named_parameters() if "lora_B" in name]
    assert moved and max(moved) > 0


def test_processing_class_stands_in_for_the_models_own(folder: Path, tmp_path: Path) -> None:
    mine = tiny_tokenizer()
    mine.eos_token = "<|im_start|>"
    made = trainer(folder, tmp_path, processing_class=types.SimpleNamespace(tokenizer=mine))
    assert made.processing_class is mine
    assert mine.eos_token_id in made._loaded.stop_token_ids
    with pytest.raises(ModelError, match="Pass processing_class=tokenizer"):
        GRPOTrainer(tiny_model(), varied, GRPOConfig(str(tmp_path)), ROWS)


def test_the_bundled_model_stands_in_only_where_there_is_no_hub(tmp_path: Path) -> None:
    with pytest.raises(HubSilent, match="'owner/name' is not in the local hub cache"):
        resolve("owner/name")
    with pytest.raises(ModelError, match="There is no folder no-such-folder"):
        trainer(Path("no-such-folder"), tmp_path)


def test_what_a_trainer_refuses(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="write processing_class=tokenizer"):
        trainer(folder, tmp_path, tokenizer=tiny_tokenizer())
    with pytest.raises(ConfigError, match=r"GRPOTrainer\(tools=...\) is not supported"):
        trainer(folder, tmp_path, tools=[len])
    with pytest.raises(TypeError, match="has no argument 'reward_func'"):
        trainer(folder, tmp_path, reward_func=varied)
    with pytest.raises(ConfigError, match="without reward_funcs"):
        trainer(folder, tmp_path, reward_funcs=None)
    with pytest.raises(DataError, match="without train_dataset"):
        trainer(folder, tmp_path, train_dataset=None)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"num_generations": 1}, "at least 2"),
        ({"per_device_train_batch_size": 6, "num_generations": 4}, "Give 4 or 8"),
        ({"per_device_train_batch_size": 0}, "at least 1"),
        ({"generation_batch_size": 8, "steps_per_generation": 1}, "Give one of them"),
        ({"generation_batch_size": 12}, "must be a multiple of"),
        (
            {"steps_per_generation": 3, "gradient_accumulation_steps": 2},
            "one must be a multiple of the other",
        ),
        ({"steps_per_generation": 8, "per_device_train_batch_size": 4}, "cannot serve 8 updates"),
        ({"max_steps": 3, "num_iterations": 2}, "Give a multiple of 2"),
        ({"temperature": 0}, "identical"),
        ({"temperature": -1.0}, "at least 0"),
        ({"loss_type": "sapo"}, "'sapo' is none of 'grpo', 'dr_grpo', 'dapo', 'bnpo', 'cispo'"),
        ({"loss_type": "cispo"}, "Set epsilon_high=5.0"),
        ({"loss_type": "bnpo", "gradient_accumulation_steps": 2}, "Take 'dapo'"),
        ({"importance_sampling_level": "sequence"}, "Set loss_type='grpo'"),
        ({"loss_type": "cispo", "epsilon_high": 5.0, "delta": 2.0}, "delta = 2.0"),
        ({"sync_ref_model": True}, "Set beta above 0 and ref_model_mixup_alpha=1.0"),
        ({"ref_model_mixup_alpha": 1.0}, "does nothing without sync_ref_model"),
        ({"ref_model_sync_steps": 3}, "does nothing without sync_ref_model"),
        ({"lr_scheduler_type": "polynomial"}, "none of 'linear', 'cosine'"),
        ({"optim": "sgd"}, "none of 'adamw_torch_fused'"),
        ({"save_strategy": "best"}, "none of 'steps', 'epoch', 'no'"),
    ],
)
def test_what_a_configuration_refuses(fields: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        GRPOConfig(**fields)


def test_a_configuration_needs_nothing() -> None:
    args = GRPOConfig()
    assert args.output_dir == "trainer_output" and args.bf16 is True and args.learning_rate == 1e-6
    assert repr(GRPOConfig("there", beta=0.1)) == "GRPOConfig(output_dir='there', beta=0.1)"
    assert "secret" not in repr(GRPOConfig(hub_token="secret")) + str(
        GRPOConfig(hub_token="secret").to_dict()
    )
    assert json.dumps(args.to_dict()) and args.to_dict()["loss_type"] == "dapo"
