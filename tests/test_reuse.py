"""The training pass that takes what the sampler computed: the same log-probs and gradients, and only while
they are the present weights'."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import is_on_policy
from test_exact import completions_of, policy_of, prompts_of, sample, usual_tokens
from tiny_models import tiny_model, tiny_tokenizer
from tiny_multimodal import tiny_multimodal
from tiny_runs import distance, grpo_config, lines, model_folder, run_grpo
from torch import Tensor

from razona.batch import Batch, collate
from razona.config import OptimizerConfig
from razona.config.common import LoRAConfig
from razona.models.cpu import reuse
from razona.models.cpu.memory import reserved
from razona.models.lora import attach
from razona.objective import grpo
from razona.policy import Policy
from razona.rollout.metrics import UpdateMeter
from razona.types import Group, Sampling

ARCHITECTURES = ["llama", "qwen2", "qwen3", "mistral"]


def make_policy(arch: str = "llama", *, precision: str = "fp32", lora: LoRAConfig | None = None) -> Policy:
    """fp32 by default: there the two passes can be compared sharply."""
    model = tiny_model(arch, max_position_embeddings=2048)
    if lora is not None:
        model = attach(model, lora, base="tiny", seed=0)
        torch.manual_seed(1)
        for name, parameter in model.named_parameters():
            if "lora_B" in name or "lora_embedding_" in name:
                torch.nn.init.normal_(parameter, 0.0, 0.05)
    return Policy(model, tiny_tokenizer(), optimizer=OptimizerConfig(), precision=precision)


def sampled(policy: Policy, *lengths: int, keep: bool = True, **options: Any) -> list[Group]:
    prompts = prompts_of(*lengths)
    stops = usual_tokens(policy, prompts, 2)  # lengths become unequal, rows leave
    sampling = Sampling(**{"group_size": 6, "max_completion_length": 40} | options)
    with policy.scorer.fast_path.activations.saving(keep):
        return sample(policy, prompts, sampling, stops=stops)


def trained(
    policy: Policy, batch: Batch, *, budget: int = 4096, temperature: float = 1.0
) -> tuple[Tensor, list[Tensor]]:
    """Log-probs and gradients of a weighted sum of them."""
    weights = torch.randn(batch.token_ids.shape, generator=torch.Generator().manual_seed(0))
    logprobs, start = [], 0
    for micro in batch.split(budget):
        found = policy.logprobs(micro, temperature=temperature)
        rows = slice(start, start + len(micro))
        (found * weights[rows, : found.shape[1]] * micro.loss_mask).sum().backward()
        logprobs.append(found.detach()[micro.loss_mask])
        start = rows.stop
    gradients = []
    for master in policy.masters:
        gradients.append(torch.zeros_like(master) if master.grad is None else master.grad.clone())
        master.grad = None
    return torch.cat(logprobs), gradients


def unaided(batch: Batch) -> Batch:
    assert batch.sampled is not None
    return replace(batch, sampled=replace(batch.sampled, activations=(None,) * len(batch.prompts)))


def furthest(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    return max(
        ((a - b).norm() / b.norm().clamp(min=1e-9)).item() for a, b in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("budget", [4096, 90])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_gradients_are_those_of_the_usual_pass(arch: str, budget: int) -> None:
    """Prompts of different lengths, completions of unequal length; groups alone, together and cut."""
    policy = make_policy(arch)
    batch = collate(sampled(policy, 5, 70, 1, 23))
    assert len({*batch.lengths}) > 5
    logprobs, gradients = trained(policy, batch, budget=budget)
    assert batch.reuses_activations
    expected = trained(policy, unaided(batch), budget=budget)
    assert torch.allclose(logprobs, expected[0], atol=1e-4)
    assert furthest(gradients, expected[1]) < 1e-5


def test_the_language_model_of_a_multimodal_checkpoint() -> None:
    model = tiny_multimodal("smolvlm")
    policy = Policy(model, tiny_tokenizer(), optimizer=OptimizerConfig(), precision="fp32")
    batch = collate(sampled(policy, 5, 70))
    logprobs, gradients = trained(policy, batch)
    assert batch.reuses_activations
    expected = trained(policy, unaided(batch))
    assert torch.allclose(logprobs, expected[0], atol=1e-4)
    assert furthest(gradients, expected[1]) < 1e-5


@pytest.mark.parametrize(
    "targets",
    [(), ("q_proj", "v_proj", "down_proj"), ("embed_tokens", "k_proj")],
    ids=["all", "some", "embedding"],
)
@pytest.mark.parametrize("chunk", [256, 50, 3])
def test_gradients_of_an_adapter(
    targets: tuple[str, ...], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head's derivatives go through its frozen weight so many rows at a time, or a step's."""
    monkeypatch.setattr(reuse, "CHUNK", chunk)
    policy = make_policy("qwen3", lora=LoRAConfig(r=4, target_modules=targets))
    batch = collate(sampled(policy, 5, 70))
    gradients = trained(policy, batch)[1]
    assert batch.reuses_activations and all(gradient.any() for gradient in gradients)
    assert furthest(gradients, trained(policy, unaided(batch))[1]) < 1e-5


def test_frozen_parts_get_no_gradient() -> None:
    """One of three matrices that are multiplied as one is frozen, and a norm."""
    model = tiny_model("llama")
    layer = model.model.layers[0]
    frozen = [layer.self_attn.k_proj.weight, layer.input_layernorm.weight]
    for parameter in frozen:
        parameter.requires_grad_(False)
    policy = Policy(model, tiny_tokenizer(), optimizer=OptimizerConfig(), precision="fp32")
    batch = collate(sampled(policy, 5, 30))
    gradients = trained(policy, batch)[1]
    assert batch.reuses_activations and all(parameter.grad is None for parameter in frozen)
    assert furthest(gradients, trained(policy, unaided(batch))[1]) < 1e-5


def test_temperature_and_a_mask() -> None:
    """The derivatives kept are those at the sampling temperature; untrained tokens have none."""
    policy = make_policy()
    groups = sampled(policy, 5, 30, temperature=0.7)
    batch = collate(groups, overlong_filter=True)
    assert 0 < batch.num_tokens < sum(batch.lengths)
    gradients = trained(policy, batch, temperature=0.7)[1]
    assert batch.reuses_activations
    assert furthest(gradients, trained(policy, unaided(batch), temperature=0.7)[1]) < 1e-5


@pytest.mark.parametrize("group_size, length", [(1, 40), (1, 1), (3, 2)])
def test_a_lone_row_and_few_tokens(group_size: int, length: int) -> None:
    policy = make_policy()
    batch = collate(sampled(policy, 1, 9, group_size=group_size, max_completion_length=length))
    gradients = trained(policy, batch)[1]
    assert batch.reuses_activations
    assert furthest(gradients, trained(policy, unaided(batch))[1]) < 1e-5


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_bf16(arch: str) -> None:
    """The same log-probs to the bit, and gradients as near to the true ones as those of the usual pass."""
    policy = make_policy(arch, precision="bf16")
    batch = collate(sampled(policy, 5, 70, 23))
    logprobs, gradients = trained(policy, batch)
    assert batch.reuses_activations
    usual_logprobs, usual = trained(policy, unaided(batch))
    assert torch.equal(logprobs, usual_logprobs)
    for parameter, master in zip(policy.compute, policy.masters, strict=True):
        master.data.copy_(parameter)  # rounded, as the model computes
    policy.release()
    exact = Policy(policy.model, tiny_tokenizer(), optimizer=OptimizerConfig(), precision="fp32")
    true = trained(exact, unaided(batch))[1]
    for found, other, right in zip(gradients, usual, true, strict=True):
        assert (found - right).norm() < 1.2 * (other - right).norm() + 1e-3 * right.norm()


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="says how Linux holds memory")
def test_memory_that_is_set_aside_lies_in_small_pages() -> None:
    """Huge pages would take all that is set aside as soon as it is written to here and there."""
    room = reserved(3, 2**20, dtype=torch.bfloat16)
    assert not room.any() and room.shape == (3, 2**20)
    lines = Path("/proc/self/smaps").read_text().splitlines()
    inside = False
    for line in lines:
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(match[1], 16) <= room.data_ptr() < int(match[2], 16)
        if inside and line.startswith("VmFlags:"):
            assert " nh" in line
            return
    raise AssertionError("its mapping was not found")


def test_memory_that_was_used_before_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last token of a completion is never fed: what lies at its place is not looked at."""
    monkeypatch.setattr(reuse, "reserved", lambda *shape, dtype: torch.full(shape, torch.nan, dtype=dtype))
    policy = make_policy()
    batch = collate(sampled(policy, 5, 30))
    monkeypatch.undo()
    gradients = trained(policy, batch)[1]
    assert batch.reuses_activations
    assert furthest(gradients, trained(policy, unaided(batch))[1]) < 1e-5


def test_it_is_taken_once_and_under_the_weights_it_was_sampled_with() -> None:
    policy = make_policy("llama")
    batch = collate(sampled(policy, 5, 30))
    with torch.no_grad():
        policy.logprobs(batch, temperature=1.0)
    assert not batch.reuses_activations, "a pass without gradient has other uses"
    policy.logprobs(batch, temperature=0.5)
    assert not batch.reuses_activations, "at another temperature the log-probs are others"
    policy.logprobs(batch.select([0, 1]), temperature=1.0)
    assert batch.select([1]).reuses_activations and not batch.reuses_activations
    first = trained(policy, batch)[1]  # two of its rows have had theirs: all is computed
    assert furthest(first, trained(policy, unaided(batch))[1]) < 1e-7

    batch = collate(sampled(policy, 5, 30))
    for master in policy.masters:
        master.grad = torch.randn(master.shape) * 1e-2
    policy.update()
    found = trained(policy, batch)[0]
    assert not batch.reuses_activations
    assert torch.equal(found, trained(policy, unaided(batch))[0]), "the weights are others now"


@pytest.mark.parametrize(
    "options", [{"keep": False}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"temperature": 0.0}], ids=str
)
def test_what_is_not_kept(options: dict[str, Any]) -> None:
    """Outside of training, and where the log-probs are not those of the whole distribution."""
    assert all(group.activations is None for group in sampled(make_policy(), 5, 30, **options))


@pytest.mark.parametrize("lora", [None, LoRAConfig(r=4)], ids=["full", "LoRA"])
def test_groups_beyond_the_memory_are_computed(
    lora: LoRAConfig | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Completions that turn out longer than the memory is are given up, the last block first."""
    policy = make_policy(lora=lora)
    monkeypatch.setattr(reuse, "CPU_TOKENS", 300)  # a block for each group
    token = reuse._Shape.of(policy.model, policy.scorer.head).token_bytes  # type: ignore[union-attr]
    whole = sampled(policy, 5, 70, 23)
    needs = [sum(len(c.token_ids) for c in group.completions) for group in whole]
    monkeypatch.setattr(reuse, "ACTIVATION_BYTES", token * (needs[0] + needs[1] + 90))
    groups = sampled(policy, 5, 70, 23)
    assert [c.token_ids for c in completions_of(groups)] == [c.token_ids for c in completions_of(whole)]
    batch = collate(groups)
    kept = [
        isinstance(group.activations, reuse.GroupActivations) and group.activations.block is not None
        for group in groups
    ]
    assert kept == [True, True, False]
    gradients = trained(policy, batch, budget=300)[1]
    assert batch.select([0]).reuses_activations and not batch.select([17]).reuses_activations
    assert furthest(gradients, trained(policy, unaided(batch), budget=300)[1]) < 1e-5


def test_groups_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks may come in any order, but not in turns: then all is computed."""
    policy = make_policy()
    monkeypatch.setattr(reuse, "CPU_TOKENS", 600)  # two groups in the first block, one in the second
    for order, recalled in ((2, 1, 0), True), ((0, 2, 1), False):
        batch = collate(sampled(policy, 5, 30, 23))
        batch = batch.select([6 * group + member for group in order for member in (3, 0, 5)])
        gradients = trained(policy, batch)[1]
        assert batch.reuses_activations is recalled
        assert furthest(gradients, trained(policy, unaided(batch))[1]) < 1e-5


def test_memory_is_used_again_and_freed_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, memory = make_policy(), []
    for _ in range(2):
        with policy.scorer.fast_path.activations.saving(True):
            groups = sample(policy, prompts_of(5, 30), Sampling(group_size=4, max_completion_length=40))
        memory.append(policy.scorer.fast_path.activations.blocks[0].memory)
        trained(policy, collate(groups))
        policy.scorer.fast_path.activations.forget()
    assert policy.scorer.fast_path.activations.spare == memory[1:] and memory[1] is memory[0]
    sampled(policy, 5, keep=False)
    assert not policy.scorer.fast_path.activations.spare
    sampled(policy, 5, group_size=50, max_completion_length=400)  # room for more tokens than there is memory
    assert policy.scorer.fast_path.activations.blocks[0].memory is not None
    held = policy.scorer.fast_path.activations.blocks[0].memory.bytes
    monkeypatch.setattr(reuse, "ACTIVATION_BYTES", held - 1)
    policy.scorer.fast_path.activations.forget()
    assert not policy.scorer.fast_path.activations.spare


def test_a_model_whose_layers_it_does_not_know() -> None:
    """A linear layer of somebody's own is left to autograd."""

    class Doubled(torch.nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    model = tiny_model("llama")
    former = model.model.layers[1].mlp.up_proj
    model.model.layers[1].mlp.up_proj = Doubled(former.in_features, former.out_features, bias=False)
    policy = Policy(model, tiny_tokenizer(), optimizer=OptimizerConfig())
    assert all(group.activations is None for group in sampled(policy, 5, 30))


def test_a_run_learns_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probs, loss and rewards of the first step are equal to the last digit with and without."""
    model = model_folder(tmp_path / "model")
    run_grpo(grpo_config(model, tmp_path / "with"))
    monkeypatch.setattr(reuse, "ACTIVATION_BYTES", 0)
    run_grpo(grpo_config(model, tmp_path / "without"))
    ours, theirs = (lines(tmp_path / name / "metrics.jsonl")[0] for name in ("with", "without"))
    assert ours["loss"] == theirs["loss"] and ours["reward"] == theirs["reward"]
    assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=2e-2)
    assert is_on_policy(ours) and is_on_policy(theirs)


def test_gradient_checkpointing_changes_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_folder(tmp_path / "model")
    monkeypatch.setattr(
        reuse, "ACTIVATION_BYTES", 0
    )  # which has other bits, and is off where memory is short
    run_grpo(grpo_config(model, tmp_path / "plain"))
    run_grpo(grpo_config(model, tmp_path / "recomputed", model__gradient_checkpointing=True))
    assert distance(tmp_path / "plain", tmp_path / "recomputed") == 0


def test_one_completion_a_step_is_computed_anew() -> None:
    """What the training pass takes says nothing about the mismatch of the two passes."""
    policy = policy_of()
    groups = sampled(policy, 5, 30)
    for wrong in (0.0, 0.5):
        batch = collate(groups)
        assert batch.sampled is not None
        moved = replace(batch.sampled, logprobs=batch.sampled.logprobs + wrong)
        batch = replace(batch, sampled=moved)
        meter = UpdateMeter(grpo())
        meter.watch(policy, batch, step=3, temperature=1.0)
        metrics = meter.metrics()
        assert is_on_policy(metrics) == (wrong == 0.0)
        assert metrics["mismatch/mean_abs"] == pytest.approx(wrong, abs=1e-6)
