"""The fast path against plain modules, what is undone afterwards, and what the probe of a model finds out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_flat import plain_logprobs, rollout
from test_lora import adapted
from test_policy import learn
from tiny_models import VOCAB_SIZE, sharpen, tiny_model, tiny_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from razona.config import OptimizerConfig
from razona.engines.native import NativeEngine
from razona.errors import ModelError
from razona.models import probe
from razona.models.choose_scorer import choose_scorer
from razona.models.scorer import FlatScorer, FullRowScorer
from razona.policy import Policy
from razona.types import Prompt, Sampling

IDS = torch.arange(5, 25)[None]


def policy_of(model: Any, kernels: str = "auto", precision: str = "fp32") -> Policy:
    options = OptimizerConfig(learning_rate=1e-2)
    return Policy(model, tiny_tokenizer(), optimizer=options, precision=precision, kernels=kernels)


def model_of(kind: str) -> Any:
    return adapted() if kind == "lora" else tiny_model(kind)


def other(kind: str, **changes: Any) -> Any:
    shape = {
        "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(shape | changes)))
        sharpen(model, kind)
    return model.eval()


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2", "gpt2", "lora"])
def test_auto_and_plain_are_equal(kind: str) -> None:
    batch, prompts = rollout(), [Prompt(i, "", tuple(range(5, 5 + n)), {}) for i, n in enumerate((4, 9))]
    found = []
    for kernels in ("auto", "plain"):
        policy = policy_of(model_of(kind), kernels)
        assert (policy.scorer.fast_path is None) is (kernels == "plain")
        engine = NativeEngine(policy, stop_token_ids=(2,))
        groups = engine.generate(
            prompts, Sampling(group_size=3, max_completion_length=12), seeds=[(1, 2, 3), (4, 5, 6)]
        )
        logprobs = policy.logprobs(batch, temperature=1.0)
        slopes = torch.autograd.grad(logprobs.sum(), policy.compute)
        tokens = [c.token_ids for group in groups for c in group.completions]
        found.append((tokens, logprobs, torch.cat([slope.flatten() for slope in slopes])))
        policy.release()
    (tokens, logprobs, slopes), (plain_tokens, plain_logprobs, plain_slopes) = found
    assert tokens == plain_tokens
    torch.testing.assert_close(logprobs, plain_logprobs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(slopes, plain_slopes, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "lora"])
def test_in_bf16_they_differ_by_rounding(kind: str) -> None:
    batch = rollout()
    one, two = (
        policy_of(model_of(kind), kernels, "bf16").logprobs(batch, temperature=1.0).detach()
        for kernels in ("auto", "plain")
    )
    assert (one - two).abs().mean() < 0.1


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "lora"])
def test_release_leaves_nothing_behind(kind: str, precision: str) -> None:
    model = model_of(kind)
    inner = model.get_base_model() if kind == "lora" else model
    before = inner.config._attn_implementation
    policy = policy_of(model, precision=precision)
    assert any("forward" in vars(module) for module in inner.modules())
    learn(policy, rollout())
    policy.release()
    assert not any("forward" in vars(module) for module in inner.modules())
    assert inner.config._attn_implementation == before and not inner.training
    weights = {name: p.clone() for name, p in inner.named_parameters()}
    policy.release()
    assert all(torch.equal(p, weights[name]) for name, p in inner.named_parameters())


def test_what_fails_half_way_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Policy, "_split", fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        policy_of(model, precision="bf16")
    assert not any("forward" in vars(module) for module in model.modules())
    assert model.config._attn_implementation == "sdpa" and not model.training


def test_other_adapters_can_be_chosen_during_and_after_training() -> None:
    model = adapted()
    model.add_adapter("other", model.peft_config["default"])
    for name, parameter in model.named_parameters():
        if "lora_B.other" in name:
            parameter.data.normal_(0.0, 0.5)
    policy = policy_of(model)
    learn(policy, rollout())

    def outputs() -> list[torch.Tensor]:
        with torch.no_grad():
            trained = policy.logprobs(rollout(), temperature=1.0) if is_training else model(IDS).logits
            model.set_adapter("other")
            chosen = policy.logprobs(rollout(), temperature=1.0) if is_training else model(IDS).logits
            with model.disable_adapter():
                bare = policy.logprobs(rollout(), temperature=1.0) if is_training else model(IDS).logits
            model.set_adapter("default")
        return [trained, chosen, bare]

    is_training = True
    for found in (outputs(), None):
        if found is None:
            is_training = False
            policy.release()
            found = outputs()
        assert len({round(x.double().abs().sum().item(), 3) for x in found}) == 3
        bare = plain_logprobs(tiny_model(), rollout(), 1.0) if is_training else tiny_model()(IDS).logits
        torch.testing.assert_close(found[2], bare, atol=1e-4, rtol=1e-4)


def test_a_tested_family_that_fails_is_an_error_with_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise TypeError("no such argument")

    monkeypatch.setattr(FlatScorer, "states", fails)
    model = tiny_model()
    with pytest.raises(ModelError, match=r"fails in the shared-prefix row.*no such") as caught:
        choose_scorer(model)
    assert isinstance(caught.value.__cause__, TypeError)
    assert model.config._attn_implementation == "sdpa"
    unknown = choose_scorer(other("mixtral", num_local_experts=4))
    assert isinstance(unknown, FullRowScorer)
    assert unknown.why == "the shared-prefix row was tried and failed with TypeError: no such argument"


def test_windows_that_only_the_mask_knows_run_full_rows() -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    windows = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 2}
    model = other("qwen2_moe", shared_expert_intermediate_size=32, **experts, **windows)
    batch = rollout([(40, (8, 3))])
    expected = plain_logprobs(model, batch, 1.0)
    scorer = choose_scorer(model)
    torch.testing.assert_close(scorer(batch), expected, atol=1e-4, rtol=1e-4)
    assert isinstance(scorer, FullRowScorer) and model.config.sliding_window == 24


def test_two_attention_calls_in_a_layer_run_full_rows() -> None:
    scorer = choose_scorer(other("diffllama"))
    assert isinstance(scorer, FullRowScorer) and "tried and" in scorer.why


def test_windows_are_small_only_while_the_probe_runs() -> None:
    model = tiny_model("gemma2", sliding_window=4096)
    with probe.small_windows(model):
        assert model.config.sliding_window == model.model.layers[0].self_attn.sliding_window == probe.WINDOW
    assert model.config.sliding_window == model.model.layers[0].self_attn.sliding_window == 4096


def test_noise_of_routers_is_switched_off_and_said() -> None:
    model = other("mixtral", num_local_experts=4, router_jitter_noise=0.1)
    policy, batch = policy_of(model), rollout()
    assert torch.equal(*(policy.logprobs(batch, temperature=1.0) for _ in range(2)))
    assert "2 routers add noise" in policy.scorer.notices[0]
    policy.release()
    assert [m.jitter_noise for m in model.modules() if hasattr(m, "jitter_noise")] == [0.1, 0.1]


def test_other_noise_is_an_error() -> None:
    with pytest.raises(ModelError, match=r"it draws random numbers\. Set dropout"):
        choose_scorer(tiny_model("gpt2", resid_pdrop=0.2))


def test_positions_that_turn_the_whole_row_are_refused() -> None:
    limit: dict[str, Any] = {"original_max_position_embeddings": 32}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    model = other("phi3", rope_parameters=rope | limit, resid_pdrop=0.0, **limit)
    short = rollout([(7, (5, 3)), (20, (12,))])
    expected, scorer = plain_logprobs(model, short, 1.0), choose_scorer(model)
    torch.testing.assert_close(scorer(short), expected, atol=1e-4, rtol=1e-4)
    with pytest.raises(ModelError, match="a sequence of 33 tokens, and beyond 32 this model"):
        scorer(rollout([(7, (5, 3)), (20, (13,))]))
