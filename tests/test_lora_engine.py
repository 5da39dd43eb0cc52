"""Sampling with an adapter beside its base: the engine contract, and the trainer's bits in bf16 on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import in_bf16
from test_engines import likely_token, scores_of
from test_exact import (
    check_after_updates,
    check_rows_alone,
    completions_of,
    exact_share,
    prompts_of,
    sample,
    usual_tokens,
)
from test_lora import adapted, policy_of, with_random_b
from tiny_models import ARCHITECTURES, tiny_model

import razona.models.cpu.fast_path as fast_path
from razona.config import LoRAConfig
from razona.engines.hf import HFEngine
from razona.engines.native import NativeEngine
from razona.engines.testing import check_engine
from razona.models import attach
from razona.models.cpu.linear import GATE_UP, QKV, LoraForward
from razona.models.cpu.prepacked import prepacked_linears
from razona.models.cpu.processor import can_block
from razona.policy import Policy
from razona.types import Sampling

TARGETS: dict[str, dict[str, Any]] = {
    "all": {},
    "q, v": {"target_modules": ("q_proj", "v_proj")},
    "up, down, rank 1": {"target_modules": ("up_proj", "down_proj"), "r": 1},
    "embedding": {"target_modules": ("embed_tokens", "k_proj")},
    "rslora, rank 32": {"r": 32, "rslora": True},
}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_contract(arch: str) -> None:
    policy, prompts = policy_of(adapted(arch), "fp32"), prompts_of(5, 17, 9)
    stop = likely_token(policy, prompts)
    engine = NativeEngine(policy, stop_token_ids=[stop])
    check_engine(engine, prompts, stop_token_id=stop, policy=policy, logprobs=scores_of(policy))


@pytest.mark.parametrize("arch", ["llama", "qwen2", "gpt2"])
def test_the_contract_bit_for_bit(arch: str) -> None:
    policy, prompts = policy_of(adapted(arch)), prompts_of(5, 17, 9)
    stop = likely_token(policy, prompts)
    engine = NativeEngine(policy, stop_token_ids=[stop])
    check_engine(engine, prompts, stop_token_id=stop, policy=policy, logprobs=scores_of(policy), **in_bf16())


def test_the_reference_engine_keeps_it_too() -> None:
    policy, prompts = policy_of(adapted(), "fp32"), prompts_of(5, 9)
    stop = likely_token(policy, prompts)
    engine = HFEngine(policy, stop_token_ids=[stop])
    check_engine(engine, prompts, stop_token_id=stop, policy=policy, logprobs=scores_of(policy))


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "plain"])
@pytest.mark.parametrize("targets", TARGETS)
def test_a_thousand_tokens(targets: str, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of different padded lengths, completions of unequal length, rows that leave: share 1.0."""
    monkeypatch.setattr(fast_path, "PREPACK_FROM", 1 if packed else 10**9)
    policy, prompts = policy_of(adapted(**TARGETS[targets])), prompts_of(5, 70, 130, 23)
    stops = usual_tokens(policy, prompts, 2)
    groups = sample(policy, prompts, Sampling(group_size=16, max_completion_length=48), stops=stops)
    lengths = [len(c.token_ids) for c in completions_of(groups)]
    assert len(set(lengths)) > 8 and min(lengths) < 8 and max(lengths) == 48
    for budget in (10_000, 300, 1):
        share, count = exact_share(policy, groups, budget=budget)
        assert (share, count >= 500) == (1.0, True), f"{share} of {count} tokens, budget {budget}"
    with policy.adapter.off():  # type: ignore[union-attr]
        assert exact_share(policy, groups)[0] < 0.2, "the adapter changes too little to be tested"


@pytest.mark.parametrize("arch", ["qwen2", "qwen3", "gemma2", "mistral"])
@pytest.mark.parametrize("threads", [1, 2])
def test_other_decoders(arch: str, threads: int) -> None:
    """qwen2 has biases, qwen3 norms of queries and keys, gemma2 runs the plain decode step."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        policy, prompts = policy_of(adapted(arch)), prompts_of(5, 70, 23)
        groups = sample(policy, prompts, Sampling(group_size=6, max_completion_length=40))
        assert exact_share(policy, groups)[0] == 1.0
    finally:
        torch.set_num_threads(before)


def wide_policy() -> Policy:
    """Matrices as wide as real ones: kernels choose by size."""
    shape = {"hidden_size": 576, "head_dim": 64, "num_attention_heads": 9, "num_key_value_heads": 3}
    model = tiny_model("llama", intermediate_size=1536, dtype=torch.bfloat16, **shape)
    return policy_of(with_random_b(attach(model, LoRAConfig(r=16), base="tiny", seed=0)))


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "plain"])
def test_wide_layers_and_the_last_row_alone(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_path, "PREPACK_FROM", 1 if packed else 10**9)
    policy = wide_policy()
    check_rows_alone(policy, groups=6, max_length=48, at_least=20)
    groups = sample(policy, prompts_of(1), Sampling(group_size=1, max_completion_length=9))
    assert exact_share(policy, groups) == (1.0, 9)


def test_joined_layers_with_scalings_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_path, "PREPACK_FROM", 1)
    policy = policy_of(adapted())
    for layer in policy.model.model.layers:
        layer.self_attn.k_proj.forward.scaling = 1.7
        layer.mlp.up_proj.forward.scaling = 0.3
    groups = sample(policy, prompts_of(5, 70), Sampling(group_size=8, max_completion_length=40))
    assert exact_share(policy, groups)[0] == 1.0


def test_after_updates_too() -> None:
    check_after_updates(policy_of(adapted(trained=False)))


@pytest.mark.skipif(not can_block(), reason="this processor blocks no weights")
def test_base_layers_are_packed_together_and_all_is_as_it_was_afterwards() -> None:
    policy = policy_of(adapted())
    layers = [m for m in policy.model.modules() if isinstance(m.__dict__.get("forward"), LoraForward)]
    attention, mlp = policy.model.model.layers[0].self_attn, policy.model.model.layers[0].mlp
    with prepacked_linears(policy.model, 8, join=True):
        assert "packed_" + "_".join(QKV) in vars(attention) and "packed_" + "_".join(GATE_UP) in vars(mlp)
        inner = [m for m in policy.model.modules() if type(m) is torch.nn.Linear]
        patched = [m for m in inner if "forward" in vars(m)]
        assert patched == [policy.model.lm_head]  # base layers and adapters run inside their LoRA layer's
        with torch.inference_mode():
            x = torch.randn(5, 64).bfloat16()
            found = attention.o_proj.forward(x)
    x = x.clone()
    assert all(isinstance(m.__dict__["forward"], LoraForward) for m in layers)
    assert not any(name.startswith("packed_") for m in policy.model.modules() for name in vars(m))
    assert torch.equal(found, attention.o_proj(x))


def test_switched_off_the_base_alone_samples() -> None:
    policy, base, prompts = policy_of(adapted()), policy_of(tiny_model()), prompts_of(9, 20)
    sampling = Sampling(group_size=4, max_completion_length=40)
    with policy.adapter.off():  # type: ignore[union-attr]
        assert sample(policy, prompts, sampling) == sample(base, prompts, sampling)
    assert sample(policy, prompts, sampling) != sample(base, prompts, sampling)
