"""LoRA on multimodal checkpoints: the language model alone has adapters, and what is saved loads plainly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import is_on_policy
from peft import PeftModel
from safetensors.torch import load_file
from test_multimodal import KINDS, Processor, same
from tiny_models import tiny_tokenizer
from tiny_multimodal import CLASSES, PREPROCESSOR, multimodal_folder, tiny_multimodal
from tiny_runs import grpo_config, lines, run_grpo, run_sft, sft_config

from razona.config import LoRAConfig, OptimizerConfig
from razona.errors import ConfigError
from razona.models import attach, from_model, load
from razona.models.multimodal import language_model, towers
from razona.policy import Policy


def adapted(model: Any) -> set[str]:
    """The layers with an adapter."""
    return {name for name, module in model.named_modules() if hasattr(module, "lora_A")}


@pytest.mark.parametrize("loop", ["grpo", "sft"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_trains_the_language_model_s_adapter(kind: str, loop: str, tmp_path: Path) -> None:
    folder, out = multimodal_folder(tmp_path / "m", kind), tmp_path / "out"
    options: dict[str, Any] = {"lora__r": 4, "optimizer__learning_rate": 1e-2}
    if loop == "grpo":
        _, printed = run_grpo(grpo_config(folder, out, **options))
        assert [is_on_policy(m) for m in lines(out / "metrics.jsonl")] == [True, True]
    else:
        _, printed = run_sft(sft_config(folder, out, **options))
    assert "are frozen, and are saved unchanged" in printed and "LoRA r 4" in printed
    products = [
        t for name, t in load_file(out / "model/adapter_model.safetensors").items() if "lora_B" in name
    ]
    assert products and all(t.any() for t in products)
    assert json.loads((out / "model/preprocessor_config.json").read_text()) == PREPROCESSOR

    base = CLASSES[kind].from_pretrained(folder)
    ids = torch.arange(5, 25)[None]
    before = base(input_ids=ids).logits.detach()
    plain = PeftModel.from_pretrained(base, str(out / "model"))
    inner = plain.get_base_model()
    assert len(adapted(inner)) == len(adapted(language_model(inner))) == len(products)
    assert same(towers(inner), towers(tiny_multimodal(kind)))
    assert (plain(input_ids=ids).logits - before).abs().max() > 1e-2
    again = load(str(out / "model"), dtype=torch.float32)
    torch.testing.assert_close(again.model(input_ids=ids).logits, plain(input_ids=ids).logits)
    assert json.loads(again.processor.files["preprocessor_config.json"]) == PREPROCESSOR


@pytest.mark.parametrize("kind", KINDS)
def test_targets_asked_for_by_name_are_the_language_model_s(kind: str) -> None:
    """Gemma 3's tower has a q_proj too, and an fc1 that the language model has not."""
    wrapped = attach(tiny_multimodal(kind), LoRAConfig(r=2, target_modules=("q_proj",)), base="m", seed=0)
    inner = wrapped.get_base_model()
    assert adapted(inner) and len(adapted(inner)) == len(adapted(language_model(inner)))
    with pytest.raises(ConfigError, match=r"no layer of the \w+ is called 'fc1'"):
        attach(tiny_multimodal(kind), LoRAConfig(r=2, target_modules=("fc1",)), base="m", seed=0)


def test_an_adapter_s_own_tokenizer_comes_with_the_base_s_processor(tmp_path: Path) -> None:
    folder = multimodal_folder(tmp_path / "m")
    wrapped = attach(CLASSES["gemma3"].from_pretrained(folder), LoRAConfig(r=2), base=str(folder), seed=0)
    wrapped.save_pretrained(tmp_path / "a")
    tiny_tokenizer().save_pretrained(tmp_path / "a")
    loaded = load(str(tmp_path / "a"), dtype=torch.float32)
    assert loaded.processor.tokenizer is loaded.tokenizer
    assert json.loads(loaded.processor.files["preprocessor_config.json"]) == PREPROCESSOR


def test_handed_in_with_a_processor_and_given_back(tmp_path: Path) -> None:
    """The processor is saved, and a released model's towers can be trained by others as before."""
    model, processor = tiny_multimodal("gemma3", dtype=torch.bfloat16), Processor()
    loaded = from_model(model, processor)
    assert loaded.tokenizer is processor.tokenizer and loaded.processor is processor
    assert any("are frozen" in note for note in loaded.notices)
    policy = Policy(model, loaded.processor, optimizer=OptimizerConfig())
    assert not any(p.requires_grad for p in towers(model).values())
    assert (policy.save(tmp_path / "s") / "preprocessor_config.json").exists()
    policy.release()
    assert all(p.requires_grad for p in model.parameters())
    assert same(towers(model), towers(tiny_multimodal("gemma3", dtype=torch.bfloat16)))
