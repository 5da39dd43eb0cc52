"""The same code on CUDA. Elsewhere these are printed as not run."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from tiny_models import ARCHITECTURES, tiny_model, tiny_tokenizer
from tiny_runs import grpo_config, lines, model_folder, run_grpo

from razona.batch import Batch, collate
from razona.config import OptimizerConfig
from razona.engines.native import NativeEngine
from razona.models.attention import plain_attention
from razona.models.scorer import FullRowScorer
from razona.policy import Policy
from razona.types import Prompt, Sampling

pytestmark = pytest.mark.gpu


def policy_on_cuda(arch: str, precision: str) -> Policy:
    return Policy(tiny_model(arch).cuda(), tiny_tokenizer(), optimizer=OptimizerConfig(), precision=precision)


def sampled(policy: Policy) -> Batch:
    chance = random.Random(0)
    prompts = [
        Prompt(i, "?", tuple(chance.randrange(5, 195) for _ in range(5 + 7 * i)), {}) for i in range(3)
    ]
    engine = NativeEngine(policy, stop_token_ids=[4, 9])
    sampling = Sampling(group_size=4, max_completion_length=24)
    groups = engine.generate(prompts, sampling, seeds=[[10 * p + g for g in range(4)] for p in range(3)])
    return collate(groups).to(policy.device)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_flat_pass_equals_full_rows_and_what_was_recorded(arch: str) -> None:
    policy = policy_on_cuda(arch, "fp32")
    batch = sampled(policy)
    flat = policy.logprobs(batch, temperature=1.0)
    with plain_attention(policy.model):
        full = FullRowScorer(policy.model)(batch)
    torch.testing.assert_close(flat, full, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(flat, batch.sampler_logprobs, atol=1e-3, rtol=1e-3)
    flat.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in policy.compute)


def test_bf16_mismatch_is_small() -> None:
    policy = policy_on_cuda("llama", "bf16")
    batch = sampled(policy)
    with torch.no_grad():
        difference = (policy.logprobs(batch, temperature=1.0) - batch.sampler_logprobs)[batch.loss_mask]
    assert difference.abs().mean() < 0.05


def test_a_run_trains_on_cuda(tmp_path: Path) -> None:
    config = grpo_config(
        model_folder(tmp_path / "model"), tmp_path / "run", model__device="cuda", measure_kl_every=1
    )
    result, _ = run_grpo(config)
    assert result["grad_norm"] > 0
    assert [line["step"] for line in lines(tmp_path / "run" / "metrics.jsonl")] == [1, 2]


def test_a_base_in_4_bits_trains_on_cuda(tmp_path: Path) -> None:
    options = {"model__device": "cuda", "model__load_in_4bit": True, "lora__r": 4}
    result, _ = run_grpo(grpo_config(model_folder(tmp_path / "model"), tmp_path / "run", **options))
    assert result["grad_norm"] > 0
