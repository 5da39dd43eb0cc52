"""LoRA adapters: what is trained and kept, plain peft's gradients, the reference, folders, refusals."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from test_flat import plain_logprobs, rollout
from test_policy import learn, same_bits, snapshot
from tiny_models import ARCHITECTURES, tiny_model, tiny_tokenizer

from razona.config import LoRAConfig, OptimizerConfig
from razona.errors import CheckpointError, ConfigError, ModelError
from razona.losses.weights import masked_sum, per_token
from razona.models import attach, from_model, load, save
from razona.models.attention import plain_attention
from razona.models.cpu.linear import LoraForward
from razona.models.scorer import FlatScorer
from razona.policy import Policy

LLAMA = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]


def adapted(arch: str = "llama", *, trained: bool = True, dtype: Any = torch.float32, **lora: Any) -> Any:
    """A `PeftModel`; ``trained``: its B is drawn at random, as large as matters."""
    config = LoRAConfig(**({"r": 4, "alpha": 8} | lora))
    model = attach(tiny_model(arch, dtype=dtype), config, base="tiny", seed=0)
    return with_random_b(model) if trained else model


def with_random_b(model: Any) -> Any:
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator)
    return model


def policy_of(model: Any, precision: str = "bf16", **optimizer: Any) -> Policy:
    options = OptimizerConfig(**({"learning_rate": 1e-2} | optimizer))
    return Policy(model, tiny_tokenizer(), optimizer=options, precision=precision)


def test_every_linear_layer_of_the_decoder_but_the_head() -> None:
    for arch in ARCHITECTURES:
        model = adapted(arch, trained=False)
        inner = model.get_base_model()
        bare = [
            name
            for name, module in inner.named_modules()
            if isinstance(module, torch.nn.Linear) and "lora_" not in name and "base_layer" not in name
        ]
        head = [name for name, module in inner.named_modules() if module is inner.get_output_embeddings()]
        assert bare == head, arch
        assert policy_of(model).names and all("lora_" in name for name in policy_of(model).names)
    assert sorted(adapted().peft_config["default"].target_modules) == LLAMA


def test_layers_of_another_tower_get_none() -> None:
    """Where the names alone would match them too, whole names are given to peft."""
    model = tiny_model()
    model.vision = torch.nn.ModuleDict({"q_proj": torch.nn.Linear(4, 4), "patch": torch.nn.Linear(4, 4)})
    wrapped = attach(model, LoRAConfig(r=2), base="tiny", seed=0)
    assert type(model.vision["q_proj"]) is torch.nn.Linear
    assert len([n for n, p in wrapped.named_parameters() if p.requires_grad]) == 2 * 2 * len(LLAMA)


def test_targets_that_match_nothing_name_what_there_is() -> None:
    with pytest.raises(ConfigError) as caught:
        adapted(target_modules=("q_proj", "value_proj"))
    text = str(caught.value)
    assert "no layer of the LlamaForCausalLM is called 'value_proj'" in text and "Did you mean" in text
    assert ", ".join(LLAMA) in text and "lm_head" not in text
    assert {n.split(".")[-4] for n in policy_of(adapted(target_modules=("q_proj", "v_proj"))).names} == {
        "q_proj", "v_proj"
    }  # fmt: skip


def test_a_fresh_adapter_changes_nothing_and_is_drawn_from_the_seed() -> None:
    batch, one = rollout(), adapted(trained=False)
    fresh = policy_of(one, "fp32").logprobs(batch, temperature=1.0)
    torch.testing.assert_close(fresh, plain_logprobs(tiny_model(), batch, 1.0), atol=1e-5, rtol=1e-5)
    torch.manual_seed(99)
    two = adapted(trained=False)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    other = attach(tiny_model(), LoRAConfig(r=4, alpha=8), base="tiny", seed=1)
    assert not torch.equal(
        next(p for n, p in one.named_parameters() if "lora_A" in n),
        next(p for n, p in other.named_parameters() if "lora_A" in n),
    )


def test_scaling() -> None:
    scaling = [
        {m.scaling["default"] for m in adapted(rslora=rslora).modules() if hasattr(m, "lora_A")}
        for rslora in (False, True)
    ]
    assert scaling == [{8 / 4}, {8 / 2}]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("arch", ["llama", "qwen3", "gemma3", "gpt2", "gpt_neox"])
def test_gradients_are_those_of_plain_peft_on_full_rows(arch: str, checkpointing: bool) -> None:
    batch = rollout().weighted(per_token)
    plain = adapted(arch)
    masked_sum(-plain_logprobs(plain, batch, 1.0), batch.weights).backward()  # type: ignore[arg-type]
    expected = {n: p.grad for n, p in plain.named_parameters() if p.requires_grad}
    policy = Policy(
        adapted(arch),
        None,
        optimizer=OptimizerConfig(),
        precision="fp32",
        gradient_checkpointing=checkpointing,
    )
    assert isinstance(policy.scorer, FlatScorer)
    masked_sum(-policy.logprobs(batch, temperature=1.0), batch.weights).backward()  # type: ignore[arg-type]
    assert {f"base_model.model.{name}" for name in policy.names} == set(expected)
    for name, parameter in zip(policy.names, policy.compute, strict=True):
        found, wanted = parameter.grad, expected[f"base_model.model.{name}"]
        assert found is not None and wanted is not None and wanted.abs().max() > 1e-3
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    assert all(p.grad is None for p in policy.model.parameters() if not p.requires_grad)


def test_the_light_forward_is_peft_s() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        policy = policy_of(adapted(dtype=dtype), "bf16" if dtype == torch.bfloat16 else "fp32")
        layers = [m for m in policy.model.modules() if isinstance(m.__dict__.get("forward"), LoraForward)]
        assert len(layers) == 2 * len(LLAMA)
        for layer in layers:
            x = torch.randn(1, 9, layer.in_features).to(dtype)
            found, theirs = layer(x), type(layer).forward(layer, x)
            assert torch.equal(found, theirs) or dtype == torch.bfloat16
            with torch.no_grad():
                exact = copy.deepcopy(layer).double()
                del exact.__dict__["forward"]
                truth = exact(x.double())
            assert (found - truth).norm() <= (theirs - truth).norm()  # it rounds less often
            assert (found - truth).norm() < 4e-3 * truth.norm()
            with policy.adapter.off():  # type: ignore[union-attr]
                assert torch.equal(layer(x), layer.base_layer(x))


def test_only_the_adapter_has_masters_moments_and_state() -> None:
    policy = policy_of(adapted(dtype=torch.float32))
    learn(policy, rollout())
    params = dict(policy.model.named_parameters())
    assert all(p.dtype == torch.bfloat16 for p in params.values())
    assert all(m.dtype == torch.float32 for m in policy.masters)
    own = sum(m.numel() for m in policy.masters)
    frozen = sum(p.numel() for n, p in params.items() if n not in policy.names)
    assert own < 0.2 * frozen
    moments = [t for s in policy.optimizer.state.values() for t in s.values() if t.ndim]
    assert sum(t.numel() for t in moments) == 2 * own
    state = policy.state_dict()
    assert all("lora_" in name for part in ("weights", "adam") for name in state[part])
    assert sum(t.numel() for t in state["weights"].values()) == own


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_training_moves_the_adapter_alone(precision: str) -> None:
    policy, batch = policy_of(adapted(), precision), rollout()
    before = {n: p.detach().clone() for n, p in policy.model.named_parameters()}
    losses = [learn(policy, batch) for _ in range(6)]
    assert losses[-1] < 0.8 * losses[0]
    for name, parameter in policy.model.named_parameters():
        assert torch.equal(parameter, before[name]) == (name not in policy.names), name


def test_state_makes_the_round_trip() -> None:
    original, batch = policy_of(adapted()), rollout()
    learn(original, batch)
    resumed = policy_of(adapted(trained=False))
    resumed.load_state_dict(snapshot(original))
    assert learn(resumed, batch) == learn(original, batch)
    assert same_bits(resumed.state_dict(), original.state_dict())
    with pytest.raises(CheckpointError, match="are not this model's"):
        policy_of(tiny_model()).load_state_dict(snapshot(original))


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("trained", [False, True], ids=["fresh", "existing"])
def test_reference(trained: bool, precision: str, tmp_path: Path) -> None:
    """A fresh adapter's is the base, an existing one's is the adapter as it was; both exact at the start."""
    policy, batch = policy_of(adapted(trained=trained), precision), rollout()
    assert policy.starts_at_its_base == (not trained)
    reference = policy.reference(tmp_path)
    assert (tmp_path / "reference.safetensors").exists() == trained
    start = policy.logprobs(batch, temperature=0.7).detach()
    found = reference.logprobs(batch, temperature=0.7)
    assert torch.equal(found, start) and not found.requires_grad
    base = policy_of(tiny_model(), precision).logprobs(batch, temperature=0.7).detach()
    assert torch.equal(found, base) == (not trained)
    for _ in range(2):
        learn(policy, batch)
    moved = policy.logprobs(batch, temperature=0.7)
    assert not torch.equal(moved, start)
    assert torch.equal(reference.logprobs(batch, temperature=0.7), start)
    assert torch.equal(policy.logprobs(batch, temperature=0.7), moved)
    learn(policy, batch)
    assert all(p.requires_grad for p in policy.compute)  # switching off and on froze nothing
    assert policy.update() == 0.0 and not torch.equal(policy.logprobs(batch, temperature=0.7), moved)


def test_the_folder_is_what_plain_peft_loads(tmp_path: Path) -> None:
    base = save(tiny_model(), tiny_tokenizer(), tmp_path / "base")
    policy, batch = policy_of(attach(tiny_model(), LoRAConfig(r=4), base=str(base), seed=0)), rollout()
    learn(policy, batch)
    folder = policy.save(tmp_path / "adapter")
    names = {file.name for file in folder.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer_config.json"} <= names
    assert not any(name.startswith("model") for name in names)
    stored = load_file(folder / "adapter_model.safetensors")
    assert len(stored) == len(policy.names) and all(t.dtype == torch.float32 for t in stored.values())

    loaded = PeftModel.from_pretrained(tiny_model(), str(folder))
    with torch.no_grad():
        for name, master in zip(policy.names, policy.masters, strict=True):
            assert torch.equal(loaded.get_parameter(f"base_model.model.{name}"), master)
        found = plain_logprobs(loaded, batch, 1.0)
        assert (found - policy.logprobs(batch, temperature=1.0)).abs().mean() < 0.05

    again = load(str(folder), dtype=torch.bfloat16)  # on the base that the folder names
    resumed = policy_of(again.model)
    assert same_bits(snapshot(resumed)["weights"], snapshot(policy)["weights"])
    with torch.no_grad():
        assert torch.equal(resumed.logprobs(batch, temperature=1.0), policy.logprobs(batch, temperature=1.0))
    assert not resumed.starts_at_its_base and policy.starts_at_its_base
    policy.save(tmp_path / "adapter")  # an adapter may be replaced


def test_the_users_own_model_can_be_merged_by_peft_afterwards() -> None:
    model, batch = adapted(), rollout()
    policy = policy_of(model, "fp32")
    with torch.no_grad():
        expected = policy.logprobs(batch, temperature=1.0)
        merged = model.merge_and_unload()
        with plain_attention(merged):
            found = plain_logprobs(merged, batch, 1.0)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("options", [{"use_dora": True}, {"lora_bias": True}, {"modules_to_save": ["norm"]}])
def test_peft_models_of_other_makes_run(options: dict[str, Any], tmp_path: Path) -> None:
    """What is no plain LoRA keeps peft's own forward pass, and is saved and loaded whole."""
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM", **options)
    model = with_random_b(get_peft_model(tiny_model(), config))
    expected = copy.deepcopy(model)
    policy, batch = policy_of(model, "fp32"), rollout()
    with torch.no_grad():
        torch.testing.assert_close(
            policy.logprobs(batch, temperature=1.0),
            plain_logprobs(expected, batch, 1.0),
            atol=1e-5,
            rtol=1e-5,
        )
    start = policy.reference(tmp_path)
    before = policy.logprobs(batch, temperature=1.0).detach()
    learn(policy, batch)
    assert torch.equal(start.logprobs(batch, temperature=1.0), before)
    after = policy.logprobs(batch, temperature=1.0).detach()
    folder = policy.save(tmp_path / "adapter")
    loaded = policy_of(PeftModel.from_pretrained(tiny_model(), str(folder), is_trainable=True), "fp32")
    assert torch.equal(loaded.logprobs(batch, temperature=1.0), after)


def test_dropout_is_off_and_said() -> None:
    config = LoraConfig(r=4, lora_dropout=0.5, target_modules=["q_proj"], task_type="CAUSAL_LM")
    loaded = from_model(get_peft_model(tiny_model(), config), tiny_tokenizer())
    assert loaded.notices[0] == "Dropout is off in every pass (2 layers had 0.5)."
    policy, batch = policy_of(with_random_b(get_peft_model(tiny_model(), config))), rollout()
    assert policy.model.training
    assert torch.equal(policy.logprobs(batch, temperature=1.0), policy.logprobs(batch, temperature=1.0))


def test_what_cannot_be_trained_is_refused(tmp_path: Path) -> None:
    save(tiny_model(), tiny_tokenizer(), tmp_path / "base")
    policy = policy_of(attach(tiny_model(), LoRAConfig(r=2), base=str(tmp_path / "base"), seed=0))
    folder = policy.save(tmp_path / "adapter")
    frozen = PeftModel.from_pretrained(tiny_model(), str(folder))
    with pytest.raises(ModelError, match=r"adapter 'default' is frozen.*is_trainable=True"):
        policy_of(frozen)
    with pytest.raises(ModelError, match=r"every requires_grad is False\. Unfreeze"):
        policy_of(tiny_model().requires_grad_(False))
    head = LoraConfig(r=2, target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM")
    with pytest.raises(ModelError, match=r"sits on the output head.*Leave the head out"):
        policy_of(get_peft_model(tiny_model(), head))
    with pytest.raises(ModelError, match=r"sits on the output head"):
        policy_of(get_peft_model(tiny_model(), LoraConfig(r=2, modules_to_save=["lm_head"])))
    with pytest.raises(ModelError, match=r"the adapter is IA3, and only LoRA"):
        policy_of(
            get_peft_model(
                tiny_model(),
                peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[], task_type="CAUSAL_LM"),
            )
        )
    inside = tiny_model()
    inside.load_adapter(str(folder))
    with pytest.raises(ModelError, match=r"adapter from transformers .*peft.PeftModel.from_pretrained"):
        policy_of(inside)


def test_folders_that_are_no_use_are_refused(tmp_path: Path) -> None:
    def refusal(old: str = "", new: str = "") -> str:
        config = folder / "adapter_config.json"
        text = config.read_text()
        config.write_text(text.replace(old, new) if old else text)
        with pytest.raises(ModelError) as caught:
            load(str(folder), dtype=torch.float32)
        config.write_text(text)
        return str(caught.value)

    base = save(tiny_model(), tiny_tokenizer(), tmp_path / "base")
    policy = policy_of(attach(tiny_model(), LoRAConfig(r=2), base=str(base), seed=0))
    folder = policy.save(tmp_path / "adapter")
    assert "which cannot be loaded: There is no folder" in refusal(str(base), "elsewhere/b/c")
    assert "does not say what its base model is. Give --model BASE" in refusal(f'"{base}"', "null")
    assert "of the kind IA3, and" in refusal("LORA", "IA3")
    save(tiny_model(intermediate_size=64), tiny_tokenizer(), base)
    assert "does not fit a LlamaForCausalLM" in refusal()
    save(tiny_model(num_hidden_layers=1), tiny_tokenizer(), base)
    assert "layers.1." in refusal() and "stands in only one" in refusal()
    (folder / "adapter_model.safetensors").unlink()
    assert "holds no adapter_model.safetensors, and pickled weights are not loaded" in refusal()
