"""Unsloth's names: what is loaded, adapted, trained, saved and uploaded, and what is refused."""

from __future__ import annotations

import inspect
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_server import Hub
from peft import PeftModel
from safetensors.torch import load_file
from test_push import front_matter, of_folder
from tiny_multimodal import multimodal_folder
from tiny_runs import ROWS, varied
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl_helpers import SMALL, no_hub, tiny_folder

from razona.cli import COMMANDS
from razona.commands.merge import run as merge
from razona.config import MergeConfig
from razona.config.load import load_config
from razona.errors import ConfigError, HubError, ModelError
from razona.models import load
from razona.models.quant import dequantized, quantized_layers
from razona.run.console import Console
from razona.trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
from razona.unsloth import FastLanguageModel, FastModel, arguments, is_bfloat16_supported

IDS = torch.arange(3, 40)[None]
PAGE = Path(__file__).parent.parent / "docs/one-gpu.md"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def trained(folder: Path, **options: Any) -> tuple[Any, Any]:
    model, tokenizer = FastLanguageModel.from_pretrained(str(folder), **options)
    model = FastLanguageModel.get_peft_model(model, r=4, target_modules=["q_proj", "v_proj", "up_proj"])
    args = GRPOConfig("out", **{**SMALL, "learning_rate": 3e-2})
    trainer = GRPOTrainer(
        model=model, reward_funcs=varied, args=args, train_dataset=ROWS, processing_class=tokenizer
    )
    trainer.train()
    assert trainer.model is model
    return model, tokenizer


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits.float()


def test_loading(folder: Path) -> None:
    model, tokenizer = FastLanguageModel.from_pretrained(str(folder), max_seq_length=64)
    assert len(quantized_layers(model)) == 14 and model.dtype == torch.bfloat16  # 4 bits, as Unsloth
    assert model.max_seq_length == 64 and tokenizer.pad_token is not None
    for options in ({"load_in_4bit": False}, {"load_in_16bit": True}, {"full_finetuning": True}):
        plain, _ = FastModel.from_pretrained(str(folder), **options)
        assert not quantized_layers(plain)
        assert plain.dtype == (torch.float32 if "full_finetuning" in options else torch.bfloat16)
    wide, _ = FastLanguageModel.from_pretrained(str(folder), dtype=torch.float32, device_map="cpu")
    assert wide.dtype == torch.float32 and wide.device.type == "cpu"
    assert is_bfloat16_supported()


@pytest.mark.parametrize("four_bit", [True, False], ids=["4 bits", "bf16"])
def test_merged_is_what_was_trained(four_bit: bool, folder: Path, tmp_path: Path) -> None:
    model, tokenizer = trained(folder, load_in_4bit=four_bit)
    model.save_pretrained_merged("merged", tokenizer)
    merged = AutoModelForCausalLM.from_pretrained("merged", dtype="auto")
    assert merged.dtype == torch.bfloat16 and AutoTokenizer.from_pretrained("merged")("a").input_ids
    adapter = {n: p for n, p in model.named_parameters() if "lora_" in n}
    assert all(p.dtype == torch.float32 for p in adapter.values())
    layer = model.get_submodule("base_model.model.model.layers.1.mlp.up_proj")
    base = dequantized(layer.base_layer, torch.float32) if four_bit else layer.base_layer.weight.float()
    delta = layer.lora_B["default"].weight @ layer.lora_A["default"].weight * 4
    assert delta.abs().max() > 1e-3
    assert torch.equal(merged.model.layers[1].mlp.up_proj.weight, (base + delta).bfloat16())
    model.save_pretrained_merged("lora", tokenizer, save_method="lora")
    model.save_pretrained("peft")
    for name in ("lora", "peft"):
        assert (Path(name) / "base_quantization.json").exists() == four_bit
        found = load_file(Path(name) / "adapter_model.safetensors")
        assert all(torch.equal(found[n.replace(".default", "")], p) for n, p in adapter.items())
    if not four_bit:
        return  # razona merge starts from the base in fp32, and this one was read in bf16
    merge(MergeConfig(adapter="lora", output="again", dtype="bf16"), console=Console())
    one, other = (load_file(Path(name) / "model.safetensors") for name in ("merged", "again"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_generate_after_training(folder: Path) -> None:
    model, _ = trained(folder)
    FastLanguageModel.for_inference(model)
    assert model.generate(input_ids=IDS, max_new_tokens=3, do_sample=False).shape[1] <= 40
    assert FastLanguageModel.for_training(model).training


def test_an_adapter_s_folder_goes_on(folder: Path, tmp_path: Path) -> None:
    model, tokenizer = trained(folder)
    model.save_pretrained_merged("lora", tokenizer, save_method="lora")
    again, tokenizer = FastLanguageModel.from_pretrained("lora")
    assert isinstance(again, PeftModel) and len(quantized_layers(again)) == 14
    rows = [{"prompt": "Count:", "completion": " 1, 2."}]
    args = SFTConfig("sft", max_steps=2, learning_rate=1e-2, per_device_train_batch_size=1)
    SFTTrainer(model=again, args=args, train_dataset=rows, processing_class=tokenizer).train()
    assert again.save_pretrained_merged("two", tokenizer).name == "two"


def test_full_finetuning_is_saved_whole(folder: Path) -> None:
    model, tokenizer = FastLanguageModel.from_pretrained(str(folder), full_finetuning=True)
    before = model.model.layers[0].mlp.up_proj.weight.clone()
    args = GRPOConfig("out", **SMALL)
    GRPOTrainer(
        model=model, reward_funcs=varied, args=args, train_dataset=ROWS, processing_class=tokenizer
    ).train()
    model.save_pretrained_merged("merged", tokenizer)
    after = load_file("merged/model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    assert torch.equal(after, model.model.layers[0].mlp.up_proj.weight.bfloat16())
    assert not torch.equal(model.model.layers[0].mlp.up_proj.weight, before)


def test_max_seq_length_bounds_prompt_and_completion(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, tokenizer = FastLanguageModel.from_pretrained(str(folder), max_seq_length=24)
    model = FastLanguageModel.get_peft_model(model, r=4)
    rows = [*ROWS[:1], {"prompt": "far too long " * 2, "answer": "0"}]
    args = GRPOConfig("out", **SMALL)
    GRPOTrainer(
        model=model, reward_funcs=varied, args=args, train_dataset=rows, processing_class=tokenizer
    ).train()
    assert "data: 1 prompts" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"max_seq_length=4096 is more than the 1024 positions"):
        FastLanguageModel.from_pretrained(str(folder), max_seq_length=4096)


def test_upload(folder: Path, hub: Hub) -> None:
    model, tokenizer = FastLanguageModel.from_pretrained(str(folder))
    model = FastLanguageModel.get_peft_model(model, r=4)
    options = {
        "private": True,
        "token": "hf_writes",
        "commit_message": "m",
        "revision": "v1",
        "tags": "maths",
    }
    commit = model.push_to_hub_merged("me/mine", tokenizer, **options)
    assert commit.oid == "c" * 40
    assert hub.repos["me/mine"]["private"] and hub.repos["me/mine"]["commits"] == [("v1", "m")]
    arrived = hub.files("me/mine")
    assert front_matter(arrived.pop("README.md").decode())["tags"] == ["razona", "maths"]
    model.save_pretrained_merged("saved", tokenizer)
    assert arrived == of_folder(Path("saved")) and "model.safetensors" in arrived
    model.push_to_hub_merged("me/adapter", save_method="lora")
    assert {"adapter_model.safetensors", "tokenizer.json"} < hub.files("me/adapter").keys()
    with pytest.raises(HubError, match="nothing was uploaded"):
        model.push_to_hub_merged("me/mine", token="hf_reads")


def test_get_peft_model(folder: Path) -> None:
    def fresh(**options: Any) -> Any:
        return FastLanguageModel.get_peft_model(
            FastLanguageModel.from_pretrained(str(folder), load_in_4bit=False)[0], **options
        )

    def targets(model: Any) -> set[str]:
        return set(model.peft_config["default"].target_modules)

    both = {"q_proj", "k_proj", "v_proj", "o_proj"}, {"gate_proj", "up_proj", "down_proj"}
    assert targets(fresh()) == targets(fresh(target_modules="all-linear")) == both[0] | both[1]
    assert targets(fresh(finetune_mlp_modules=False)) == both[0]
    assert targets(fresh(finetune_attention_modules=False)) == both[1]
    config = fresh(r=8, lora_alpha=4, use_rslora=True, use_gradient_checkpointing="unsloth").peft_config[
        "default"
    ]
    assert (config.r, config.lora_alpha, config.use_rslora) == (8, 4, True)
    assert config.base_model_name_or_path == str(folder)
    a, b, c = (
        next(p for n, p in fresh(random_state=seed).named_parameters() if "lora_A" in n) for seed in (1, 1, 2)
    )
    assert torch.equal(a, b) and not torch.equal(a, c)
    for options, text in (
        ({"target_modules": ".*q_proj"}, "is a pattern"),
        ({"target_modules": ["q_proj"], "finetune_mlp_modules": False}, "both say which layers"),
        ({"finetune_attention_modules": False, "finetune_mlp_modules": False}, "no layer is left"),
        ({"target_modules": ["query"]}, "no layer of the LlamaForCausalLM is called 'query'"),
    ):
        with pytest.raises(ConfigError, match=text):
            fresh(**options)
    with pytest.raises(ConfigError, match="has an adapter already"):
        FastLanguageModel.get_peft_model(fresh())


def test_multimodal_models_train_on_text(tmp_path: Path) -> None:
    model, _ = FastModel.from_pretrained(str(multimodal_folder(tmp_path / "m", "gemma3")))
    with pytest.raises(ConfigError, match="finetune_vision_layers=True is not supported"):
        FastModel.get_peft_model(model, finetune_vision_layers=True)
    model = FastModel.get_peft_model(model, r=4, finetune_vision_layers=False)
    assert not any("lora_" in n and "vision" in n for n, _ in model.named_parameters())
    model.save_pretrained_merged("merged")
    assert Path("merged/preprocessor_config.json").is_file()
    assert load("merged", dtype=torch.bfloat16).processor is not None


OTHER_VALUES: dict[str, Any] = {"safe_serialization": False, "finetune_language_layers": False, "bias": "all"}


@pytest.mark.parametrize("table", ["LOADING", "ADAPTING", "SAVING"])
def test_every_other_argument_is_not_needed_or_refused(table: str, folder: Path) -> None:
    def loaded(**given: Any) -> Any:
        return FastLanguageModel.from_pretrained(str(folder), load_in_4bit=False, **given)[0]

    call: Any = {
        "LOADING": loaded,
        "ADAPTING": lambda **given: FastLanguageModel.get_peft_model(loaded(), r=4, **given),
        "SAVING": lambda **given: loaded().save_pretrained_merged("merged", **given),
    }[table]
    known = getattr(arguments, table)
    not_needed = {name: "anything" for name, argument in known.items() if not argument.refused}
    defaults = {name: argument.default for name, argument in known.items() if argument.refused}
    call(**not_needed, **defaults)
    for name in defaults:
        with pytest.raises(ConfigError, match=rf"\({name}=.*\) is not supported: \w"):
            call(**{name: OTHER_VALUES.get(name, True if defaults[name] is not True else "no")})
    with pytest.raises(TypeError, match="has no argument 'fast_inferenze'"):
        call(fast_inferenze=True)


def test_what_is_refused(folder: Path) -> None:
    model, tokenizer = FastLanguageModel.from_pretrained(str(folder))
    for options, text in (
        ({"fast_inference": True}, "there is no vLLM engine yet: leave it out"),
        ({"dtype": torch.float16}, r"dtype=torch.float16 is not supported: take torch.bfloat16"),
        ({"device_map": "balanced"}, "names no device"),
    ):
        with pytest.raises(ConfigError, match=text):
            FastLanguageModel.from_pretrained(str(folder), **options)
    with pytest.raises(ConfigError, match="Rounding the sum to 4 bits again would lose what was learned"):
        model.save_pretrained_merged("x", tokenizer, save_method="merged_4bit_forced")
    with pytest.raises(ConfigError, match="the model has no adapter"):
        model.save_pretrained_merged("x", tokenizer, save_method="lora")
    trainer = GRPOTrainer(
        model=model, reward_funcs=varied, args=GRPOConfig("out", **SMALL), train_dataset=ROWS,
        processing_class=tokenizer,
    )  # fmt: skip
    with pytest.raises(ModelError, match="in 4 bits and has no adapter"):
        trainer.train()


def test_a_name_that_needs_the_hub(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    no_hub(folder, monkeypatch)
    FastLanguageModel.from_pretrained("unsloth/gemma-3-1b-it", load_in_4bit=False)
    assert "This is not the model you named" in capsys.readouterr().out


def test_the_page_has_every_argument() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for table in (arguments.LOADING, arguments.ADAPTING, arguments.SAVING):
        for name, (is_refused, text, _) in table.items():
            assert f"| `{name}` | {'not supported' if is_refused else 'not needed'} | {text} |" in page
    for call in (FastLanguageModel.from_pretrained, FastLanguageModel.get_peft_model):
        for name in inspect.signature(call).parameters:
            assert re.search(rf"\b{name}\b", page) or name in ("others", "console"), name


def test_the_page_runs(folder: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its Python block, as printed, on the tiny model; and its command lines are ones the command takes."""
    page = PAGE.read_text(encoding="utf-8")
    no_hub(folder, monkeypatch)
    (block,) = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    names = {"my_reward": varied, "my_rows": ROWS[:1]}
    exec(block.replace("num_generations=8", "num_generations=8, max_completion_length=8"), names)
    assert load("thinker", dtype=torch.bfloat16).stop_token_ids and [*hub.repos] == ["me/thinker"]
    commands = [shlex.split(line)[1:] for line in re.findall(r"^razona .*$", page, re.MULTILINE)]
    assert [command for command, *_ in commands] == ["grpo", "eval", "merge"]
    for command, *flags in commands:
        flags = ["--adapter", *flags] if command == "merge" else flags
        assert load_config(COMMANDS[command][1], None, flags)
