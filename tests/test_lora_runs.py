"""LoRA in the loops: learning, KL from exactly 0, resume, folders that go round, header, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import is_on_policy
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from test_resume import Stopping
from tiny_models import tiny_model, tiny_tokenizer
from tiny_runs import even, grpo_config, lines, model_folder, run_grpo, run_sft, sft_config

from razona.cli import main
from razona.config import GRPOConfig, LoRAConfig
from razona.config.check import validate
from razona.config.load import load_config
from razona.errors import ConfigError, ModelError
from razona.models import from_model
from razona.policy import Policy


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an SFT run with LoRA left."""
    out = tmp_path_factory.mktemp("sft")
    run_sft(sft_config(model, out, lora__r=4, optimizer__learning_rate=1e-2))
    return out / "model"


def contents(out: Path) -> dict[str, bytes]:
    names = (
        "metrics.jsonl",
        "rollouts.jsonl",
        "model/adapter_model.safetensors",
        "model/adapter_config.json",
    )
    return {name: (out / name).read_bytes() for name in names if (out / name).exists()}


def test_grpo_learns(model: Path, tmp_path: Path) -> None:
    """The share of even tokens rises from a half; sampler and trainer agree at every step."""
    config = grpo_config(
        model, tmp_path / "run", lora__r=8, run__num_steps=40, sampling__group_size=8,
        optimizer__learning_rate=2e-2,
    )  # fmt: skip
    _, printed = run_grpo(config, reward_fns=[even])
    steps = lines(tmp_path / "run/metrics.jsonl")
    rewards = [step["reward"] for step in steps]
    assert 0.35 < rewards[0] < 0.65
    assert sum(rewards[-5:]) / 5 > 0.85, [round(reward, 2) for reward in rewards]
    assert all(is_on_policy(step) for step in steps)
    assert "LoRA r 8, alpha 32 (scaling 4) on down_proj, gate_proj, k_proj, o_proj, q_proj" in printed
    assert "14,848 of 102,208 parameters trained" in printed
    sizes = {f.name: f.stat().st_size for f in (tmp_path / "run/checkpoints/step-000040").iterdir()}
    assert sizes["policy.safetensors"] < 3 * 4 * 14_848 + 20_000, "more than the adapter is in the checkpoint"


def test_sft_learns(model: Path, tmp_path: Path) -> None:
    config = sft_config(model, tmp_path, lora__r=8, run__num_steps=12, optimizer__learning_rate=1e-2)
    _, printed = run_sft(config)
    losses = [step["loss"] for step in lines(tmp_path / "metrics.jsonl")]
    assert losses[-1] < 0.7 * losses[0] and "LoRA r 8" in printed


@pytest.mark.parametrize("start", ["fresh", "existing", "existing on a given base"])
def test_kl_is_to_the_start(model: Path, adapter: Path, tmp_path: Path, start: str) -> None:
    """Exactly 0 at step 1: a fresh adapter's reference is the base, an existing one's is itself."""
    options: dict[str, Any] = {
        "fresh": {"lora__r": 4},
        "existing": {},
        "existing on a given base": {"lora__adapter": str(adapter)},
    }[start]
    name = adapter if start == "existing" else model
    config = grpo_config(
        name, tmp_path, **options, objective__kl_coef=0.1, run__num_steps=3, optimizer__learning_rate=1e-2
    )
    _, printed = run_grpo(config)
    steps = lines(tmp_path / "metrics.jsonl")
    assert steps[0]["kl"] == 0 and steps[1]["kl"] > 0 and steps[2]["kl"] > 0
    assert all(is_on_policy(step) for step in steps)
    assert (tmp_path / "reference.safetensors").exists() == (start != "fresh")
    assert ("the reference is the base, the adapter switched off" in printed) == (start == "fresh")
    if start != "fresh":
        before, after = (load_file(f / "adapter_model.safetensors") for f in (adapter, tmp_path / "model"))
        assert before.keys() == after.keys()
        assert all(before[n].shape == after[n].shape and not torch.equal(before[n], after[n]) for n in before)


@pytest.mark.parametrize("start", ["fresh", "existing"])
def test_grpo_stopped_and_resumed(model: Path, adapter: Path, tmp_path: Path, start: str) -> None:
    options = {"run__num_steps": 4, "prompts_per_step": 3, "objective__kl_coef": 0.1}
    options |= {"lora__r": 4} if start == "fresh" else {}
    name = model if start == "fresh" else adapter
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    run_grpo(grpo_config(name, whole, **options))
    run_grpo(grpo_config(name, halves, **options), reward_fns=[Stopping(2)])
    assert lines(halves / "metrics.jsonl")[-1]["step"] == 2
    run_grpo(grpo_config(name, halves, **options, run__resume=True))
    assert contents(halves) == contents(whole) and len(contents(whole)) == 4


def test_sft_resumed(model: Path, tmp_path: Path) -> None:
    run_sft(sft_config(model, tmp_path / "whole", lora__r=4, run__num_steps=4))
    run_sft(sft_config(model, tmp_path / "halves", lora__r=4, run__num_steps=2))
    run_sft(sft_config(model, tmp_path / "halves", lora__r=4, run__num_steps=4, run__resume=True))
    assert contents(tmp_path / "halves") == contents(tmp_path / "whole")


def test_the_trained_folder_goes_to_every_command(
    adapter: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    given = ["--model", str(adapter), "--max-completion-length", "6"]
    assert main(["generate", *given, "--prompt", "Count:"]) == 0
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": "a", "answer": "b"}\n{"prompt": "c", "answer": "d"}\n')
    assert main(["eval", *given, "--data", str(data), "--reward", "length"]) == 0
    printed = capsys.readouterr()
    assert "a LoRA adapter on" in printed.out + printed.err
    assert PeftModel.from_pretrained(tiny_model(), str(adapter))  # and to plain peft


def test_a_peft_model_handed_in(model: Path, tmp_path: Path) -> None:
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1, task_type="CAUSAL_LM")
    peft_model = get_peft_model(tiny_model(), config, adapter_name="mine")
    given = from_model(peft_model, tiny_tokenizer())
    _, printed = run_grpo(grpo_config(model, tmp_path, objective__kl_coef=0.1), model=given)
    steps = lines(tmp_path / "metrics.jsonl")
    assert steps[0]["kl"] == 0 and steps[1]["kl"] > 0 and is_on_policy(steps[1])
    assert "layers had 0.1" in printed and "on q_proj, v_proj" in printed
    assert (tmp_path / "model/adapter_config.json").is_file()
    assert any(
        p.any() for n, p in peft_model.named_parameters() if "lora_B" in n
    )  # it is the one that learned
    out = tmp_path / "sft"
    run_sft(sft_config(model, out), model=from_model(get_peft_model(tiny_model(), config), tiny_tokenizer()))
    assert (out / "model/adapter_model.safetensors").is_file()


def test_the_best_and_what_is_left_after_nonsense_are_adapters(model: Path, tmp_path: Path) -> None:
    parts = {"eval_rows": [{"prompt": "And?", "answer": "1"}], "eval_reward_fns": [even]}
    run_grpo(grpo_config(model, tmp_path / "run", lora__r=4, eval__every=1), **parts)
    assert (tmp_path / "run/best/adapter_model.safetensors").is_file()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Policy, "update", lambda self: float("nan"))
        with pytest.raises(ModelError, match="The weights before it are in"):
            run_grpo(grpo_config(model, tmp_path / "nan", lora__r=4))
    assert (tmp_path / "nan/model/adapter_model.safetensors").is_file()


def test_options_that_cannot_work_are_refused(model: Path, adapter: Path, tmp_path: Path) -> None:
    assert load_config(GRPOConfig, None, ["--lora.r", "16", "--lora.target-modules", "q_proj"]).lora == (
        LoRAConfig(r=16, target_modules=("q_proj",))
    )
    for lora, text in (
        (LoRAConfig(r=-1), r"lora\.r = -1 cannot work: it must be at least 0"),
        (LoRAConfig(r=4, alpha=0), r"lora\.alpha = 0 cannot work"),
        (LoRAConfig(r=4, adapter="x"), r"lora\.r = 4 and lora\.adapter = 'x'"),
    ):
        with pytest.raises(ConfigError, match=text):
            validate(GRPOConfig(lora=lora))
    with pytest.raises(ConfigError, match=r"lora\.alpha = 64 and lora\.rslora = True: but lora\.r is 0"):
        run_grpo(grpo_config(model, tmp_path, lora__alpha=64, lora__rslora=True))
    with pytest.raises(ConfigError, match=r"lora\.r = 4, but .* has an adapter already"):
        run_grpo(grpo_config(adapter, tmp_path, lora__r=4))
    with pytest.raises(ModelError, match=r"is an adapter already, and .* a second one"):
        run_grpo(grpo_config(adapter, tmp_path, lora__adapter=str(adapter)))
    with pytest.raises(ModelError, match=r"is no adapter: it has no adapter_config\.json"):
        run_grpo(grpo_config(model, tmp_path, lora__adapter=str(model)))
    with pytest.raises(ConfigError, match=r"no layer of the LlamaForCausalLM is called 'query'"):
        run_grpo(grpo_config(model, tmp_path, lora__r=4, lora__target_modules=["query"]))
    assert not list(tmp_path.iterdir())
