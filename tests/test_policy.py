"""The owner of parameters and optimizer: masters, accumulation, schedule, state, reference."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_flat import plain_logprobs, rollout
from tiny_models import ARCHITECTURES, tiny_model
from torch import Tensor

from razona.batch import Batch, needed
from razona.config.common import OptimizerConfig
from razona.errors import CheckpointError, ModelError
from razona.losses.kl import kl_k3
from razona.losses.weights import masked_sum, per_token
from razona.models.flat import padded_length
from razona.policy import Policy

PRECISIONS = ("bf16", "fp32", "pure_bf16")


def make(precision: str = "bf16", arch: str = "llama", *, total_updates: int = 1, **optimizer: Any) -> Policy:
    model = tiny_model(arch, dtype=torch.bfloat16 if precision == "pure_bf16" else torch.float32)
    options = OptimizerConfig(**({"learning_rate": 1e-2} | optimizer))
    return Policy(model, None, optimizer=options, precision=precision, total_updates=total_updates)


def learn(policy: Policy, batch: Batch, *, update: bool = True) -> float:
    batch = batch.weighted(per_token)
    loss = masked_sum(-policy.logprobs(batch, temperature=1.0), batch.weights)  # type: ignore[arg-type]
    loss.backward()
    if update:
        policy.update()
    return loss.item()


def snapshot(policy: Policy) -> dict[str, Any]:
    return copy.deepcopy(policy.state_dict())


def tensors(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from tensors(value, f"{path}/{key}")
    else:
        yield path, tree


def same_bits(left: Any, right: Any) -> bool:
    left, right = dict(tensors(left)), dict(tensors(right))
    return left.keys() == right.keys() and all(
        torch.equal(left[k], right[k]) if isinstance(left[k], Tensor) else left[k] == right[k] for k in left
    )


@pytest.mark.parametrize("precision", PRECISIONS)
def test_training_lowers_the_loss(precision: str) -> None:
    policy, batch = make(precision), rollout()
    losses = [learn(policy, batch) for _ in range(4)]
    assert losses[-1] < 0.7 * losses[0]
    assert policy.updates == 4


def test_masters_are_fp32_and_the_copy_is_their_rounding() -> None:
    before = dict(tiny_model().named_parameters())
    policy = make()
    for name, master, compute in zip(policy.names, policy.masters, policy.compute, strict=True):
        assert master.dtype == torch.float32 and compute.dtype == torch.bfloat16
        assert torch.equal(master, before[name])
    module = dict(policy.model.named_parameters())
    learn(policy, rollout())
    for name, master, compute in zip(policy.names, policy.masters, policy.compute, strict=True):
        assert module[name] is compute  # refreshed in place: an engine that holds the module sees it
        assert torch.equal(compute, master.bfloat16())
        assert not torch.equal(master, before[name])


def test_updates_that_bf16_would_round_away_still_count() -> None:
    """The projections' weights are of about 0.25, where bf16 numbers lie 1e-3 apart: 1e-5 is lost."""
    batch = rollout()
    moved = {}
    for precision in ("bf16", "pure_bf16"):
        policy = make(precision, learning_rate=1e-5)
        layers = [m for name, m in zip(policy.names, policy.masters, strict=True) if "proj" in name]
        before = torch.cat([m.detach().flatten() for m in layers])
        learn(policy, batch)
        moved[precision] = (torch.cat([m.detach().flatten() for m in layers]) - before).abs()
    assert (moved["bf16"] > 0).float().mean() > 0.9 and moved["bf16"].max() < 2e-5
    assert (moved["pure_bf16"] == 0).float().mean() > 0.9

    masters = make("bf16", learning_rate=1e-5)
    before = torch.cat([c.detach().flatten() for c in masters.compute])
    for _ in range(150):  # what is too small for one step of bf16 adds up in the masters
        for master in masters.masters:
            master.grad = torch.ones_like(master)
        masters.update()
    after = torch.cat([c.detach().flatten() for c in masters.compute])
    assert (after != before).float().mean() > 0.5


def test_gradients_add_up_in_fp32() -> None:
    policy = make()
    slopes = [torch.full_like(policy.masters[0], value).bfloat16() for value in (1.0, 2**-9, 2**-9)]
    leaf = policy.compute[0]
    for slope in slopes:
        (leaf * slope).sum().backward()
        assert leaf.grad is None
    found = policy.masters[0].grad
    assert found is not None and found.dtype == torch.float32
    assert (found == 1.0 + 2 * 2**-9).all()  # in bf16, 1 + 2**-9 is 1
    for other in policy.masters[1:]:
        assert other.grad is None


@pytest.mark.parametrize("precision", PRECISIONS)
def test_micro_batches_accumulate(precision: str) -> None:
    batch = rollout().weighted(per_token)
    slopes = []
    for budget in (10**6, 16):
        policy = make(precision)
        for part in batch.split(budget):
            masked_sum(policy.logprobs(part, temperature=1.0), part.weights).backward()  # type: ignore[arg-type]
        slopes.append(torch.cat([m.grad.float().flatten() for m in policy.masters if m.grad is not None]))
    deviation = ((slopes[0] - slopes[1]).norm() / slopes[0].norm()).item()
    assert deviation < {"fp32": 3e-6, "bf16": 1e-2, "pure_bf16": 2e-2}[precision]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0, None])
def test_a_gradient_of_nothing_or_nonsense_changes_nothing(precision: str, bad: float | None) -> None:
    policy, batch = make(precision, max_grad_norm=1.0, weight_decay=0.1), rollout()
    learn(policy, batch)  # Adam has momentum now, which would go on by itself
    before = snapshot(policy)
    compute = [c.detach().clone() for c in policy.compute]
    if bad is not None:
        learn(policy, batch, update=False)
        for master in policy.masters:
            if bad == 0:
                master.grad.zero_()  # type: ignore[union-attr]
        if bad != 0:
            policy.masters[2].grad.view(-1)[0] = bad  # type: ignore[union-attr]
    norm = policy.update()
    assert math.isnan(norm) if bad is not None and math.isnan(bad) else norm == (bad or 0.0)
    after = snapshot(policy)
    assert after.pop("updates") == before.pop("updates") + 1 == 2  # the schedule goes on
    assert same_bits(after, before)
    assert all(torch.equal(c, b) for c, b in zip(policy.compute, compute, strict=True))
    assert all(m.grad is None for m in policy.masters)
    learn(policy, batch)
    assert not same_bits(snapshot(policy)["weights"], before["weights"])


def test_the_norm_is_the_one_before_clipping() -> None:
    batch = rollout()
    free, tight = make("fp32", max_grad_norm=0.0), make("fp32", max_grad_norm=1e-3)
    for policy in (free, tight):
        learn(policy, batch, update=False)
    wanted = torch.cat([m.grad.flatten() for m in free.masters if m.grad is not None]).norm().item()
    seen = []
    step = tight.optimizer.step
    tight.optimizer.step = lambda: (seen.extend(m.grad.clone() for m in tight.masters), step())  # type: ignore
    assert free.update() == pytest.approx(wanted, rel=1e-5)
    assert tight.update() == pytest.approx(wanted, rel=1e-5)
    assert torch.cat([g.flatten() for g in seen]).norm().item() == pytest.approx(1e-3, rel=1e-2)


@pytest.mark.parametrize(
    ("schedule", "warmup", "expected"),
    [
        ("constant", 0, [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]),
        ("constant", 4, [0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1, 1]),
        ("linear", 0, [1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0, 0]),
        ("linear", 2, [0.5, 1, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8, 0]),
        ("cosine", 0, [(1 + math.cos(math.pi * n / 10)) / 2 for n in range(11)]),
        ("cosine", 5, [0.2, 0.4, 0.6, 0.8, 1, *[(1 + math.cos(math.pi * n / 5)) / 2 for n in range(6)]]),
    ],
)
def test_schedule(schedule: str, warmup: int, expected: list[float]) -> None:
    policy = make("fp32", total_updates=10, learning_rate=2.0, schedule=schedule, warmup_steps=warmup)
    assert [policy.learning_rate(n) / 2 for n in range(len(expected))] == pytest.approx(expected)


def test_the_schedule_reaches_the_optimizer() -> None:
    policy = make("fp32", total_updates=10, learning_rate=1e-3, schedule="linear", warmup_steps=2)
    rates = []
    for _ in range(4):
        learn(policy, rollout())
        rates.append(policy.optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.5e-3, 1e-3, 1e-3, 0.875e-3])


@pytest.mark.parametrize("precision", PRECISIONS)
def test_state_makes_the_round_trip_and_the_next_update_is_the_same(precision: str) -> None:
    options = {"schedule": "linear", "total_updates": 6, "weight_decay": 0.01}
    original, batch = make(precision, **options), rollout()
    for _ in range(2):
        learn(original, batch)
    state = snapshot(original)
    resumed = make(precision, **options)
    learn(resumed, rollout(seed=1))  # another past, which must be forgotten
    resumed.load_state_dict(copy.deepcopy(state))
    assert same_bits(resumed.state_dict(), state)
    assert all(torch.equal(a, b) for a, b in zip(resumed.compute, original.compute, strict=True))
    for _ in range(2):
        assert learn(resumed, batch) == learn(original, batch)
        assert same_bits(resumed.state_dict(), original.state_dict())


def test_state_before_the_first_update() -> None:
    fresh, used = make(), make()
    learn(used, rollout())
    used.load_state_dict(snapshot(fresh))
    assert same_bits(used.state_dict(), fresh.state_dict())
    assert used.state_dict()["adam"] == {}
    assert learn(used, rollout()) == learn(fresh, rollout())
    assert same_bits(used.state_dict(), fresh.state_dict())


def test_only_what_is_trained_is_state() -> None:
    model = tiny_model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.1" in name)
    policy = Policy(model, None, optimizer=OptimizerConfig(learning_rate=1e-2))
    assert policy.names and all("layers.1" in name for name in policy.names)
    frozen = {n: p.detach().clone() for n, p in model.named_parameters() if "layers.1" not in n}
    learn(policy, rollout())
    state = snapshot(policy)
    assert list(state["weights"]) == list(state["adam"]) == policy.names
    assert all(torch.equal(dict(model.named_parameters())[n], p) for n, p in frozen.items())
    with pytest.raises(CheckpointError, match=r"are not this model's.*embed_tokens.*Resume with the model"):
        policy.load_state_dict(make().state_dict())


def test_a_model_with_nothing_to_train_is_refused() -> None:
    model = tiny_model().requires_grad_(False)
    with pytest.raises(
        ModelError, match=r"no trainable parameter: every requires_grad is False. Unfreeze some"
    ):
        Policy(model, None, optimizer=OptimizerConfig())


@pytest.mark.parametrize("precision", ["bf16", "pure_bf16"])
@pytest.mark.parametrize("arch", [arch for arch in ARCHITECTURES if arch not in ("gpt2", "opt")])
def test_rotary_frequencies_are_not_rounded(arch: str, precision: str) -> None:
    """transformers keeps them in fp32: a saved model, loaded again, must be the one that was trained."""
    wanted = dict(tiny_model(arch).named_buffers())
    model = make(precision, arch).model
    for name, buffer in model.named_buffers():
        assert buffer.dtype == wanted[name].dtype and torch.equal(buffer, wanted[name]), name
    assert any("inv_freq" in name for name in wanted)
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())


@pytest.mark.parametrize("precision", PRECISIONS)
def test_dropout_free_train_mode_and_temperature(precision: str) -> None:
    policy, batch = make(precision), rollout()
    assert policy.model.training
    hot, cold = (policy.logprobs(batch, temperature=t) for t in (2.0, 0.5))
    assert torch.equal(hot, policy.logprobs(batch, temperature=2.0))
    exact = plain_logprobs(tiny_model(), batch, 0.5)
    torch.testing.assert_close(cold, exact, atol=1e-5 if precision == "fp32" else 0.6, rtol=1e-5)
    assert cold.std() > hot.std()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("arch", ["llama", "gemma2"])  # gemma2 ties its head to its embedding
def test_reference(arch: str, precision: str, tmp_path: Path) -> None:
    policy, batch = make(precision, arch), rollout()
    reference = policy.reference(tmp_path)
    start = policy.logprobs(batch, temperature=0.7).detach()
    frozen = reference.logprobs(batch, temperature=0.7)
    assert torch.equal(frozen, start) and not frozen.requires_grad
    assert not kl_k3(start, frozen, batch.loss_mask).any()
    for _ in range(2):
        learn(policy, batch)
    moved = policy.logprobs(batch, temperature=0.7)
    assert torch.equal(reference.logprobs(batch, temperature=0.7), start)
    assert not torch.equal(moved, start)
    assert kl_k3(moved, frozen, batch.loss_mask).sum() > 0.01
    assert torch.equal(policy.logprobs(batch, temperature=0.7), moved)  # the policy has its own weights back
    assert all(p.grad is None for p in policy.masters)

    again = policy.reference(
        tmp_path
    )  # as a resumed run does: the file of the start is used, not written anew
    assert torch.equal(again.logprobs(batch, temperature=0.7), start)
    assert torch.equal(again.logprobs(batch, temperature=0.7), frozen)


def test_the_references_file_is_reused_as_it_stands(tmp_path: Path) -> None:
    policy, batch = make("fp32"), rollout()
    first = policy.reference(tmp_path / "run")
    weights = {name: weight * 1.5 for name, weight in load_file(first.path).items()}
    save_file(weights, first.path)
    expected = tiny_model()
    with torch.no_grad():
        for parameter in expected.parameters():
            parameter.mul_(1.5)
    found = policy.reference(tmp_path / "run").logprobs(batch, temperature=1.0)
    torch.testing.assert_close(found, plain_logprobs(expected, batch, 1.0), atol=1e-4, rtol=1e-4)
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["reference.safetensors"]


def test_scores_keep_their_bits_when_groups_share_a_row() -> None:
    """bf16 on a CPU: a group's log-probs do not depend on the micro-batch it stands in."""
    policy = make()
    batch = rollout(((5, (9, 4)), (7, (3, 12)), (3, (6, 6))))
    lengths = tuple(padded_length(len(prompt) + 12) for prompt in batch.prompts)
    batch = replace(batch, sampled=replace(needed(batch.sampled), kv_lengths=lengths))
    with torch.no_grad():
        whole = policy.logprobs(batch, temperature=1.0)
        for rows in ([0, 1], [2, 3], [4, 5], [3], [1, 4]):
            part = policy.logprobs(batch.select(rows), temperature=1.0)
            assert torch.equal(part, whole[rows][:, : part.shape[1]])


@pytest.mark.parametrize("estimate", ["with_old", "with_reference"])
def test_the_batch_asks_policy_and_reference_alike(estimate: str, tmp_path: Path) -> None:
    policy, batch = make("fp32"), rollout()
    scorer = policy if estimate == "with_old" else policy.reference(tmp_path)
    with torch.no_grad():
        found = getattr(batch, estimate)(scorer, temperature=0.7, budget=20)
    scores = found.old_logprobs if estimate == "with_old" else found.ref_logprobs
    torch.testing.assert_close(scores, plain_logprobs(tiny_model(), batch, 0.7), atol=1e-5, rtol=1e-5)
