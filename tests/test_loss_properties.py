"""What holds for every loss: invariances, one-sided clips, masked positions. Fixture F is in test_losses."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings, strategies as st
from test_losses import MASK, NEW, NORMALIZED, OLD, REF, gradient, total_loss
from torch import Tensor

from razona.losses.kl import KL_ESTIMATORS, kl_k3
from razona.losses.policy import clip_fractions, ppo_clip, ratio
from razona.losses.supervised import negative_log_likelihood
from razona.losses.weights import fixed_length, masked_sum, per_sequence, per_token, sequence_sum
from razona.objective import Objective, grpo

WEIGHTS = (per_token, per_sequence, sequence_sum, partial(fixed_length, max_tokens=8))
logprob = st.floats(-6, 0)
advantage = st.floats(-3, 3)
clips = st.floats(0.05, 0.6)


@given(st.floats(-30, 30), st.floats(-30, 30))
def test_k3_is_never_negative(lp: float, ref: float) -> None:
    found = kl_k3(torch.tensor(lp, dtype=torch.float64), torch.tensor(ref, dtype=torch.float64)).item()
    assert found >= 0
    assert (found == 0) == (abs(ref - lp) < 1e-8) or abs(ref - lp) < 1e-7


@given(logprob, logprob, advantage, clips, clips)
def test_the_clip_is_one_sided_and_pessimistic(
    new: float, old: float, advantage: float, low: float, high: float
) -> None:
    tensors = [torch.tensor([[x]], dtype=torch.float64) for x in (new, old, advantage)]
    mask = torch.ones(1, 1, dtype=torch.bool)
    rho = math.exp(new - old)
    clipped = ppo_clip(*tensors, mask, clip_low=low, clip_high=high)
    assert -clipped.item() <= rho * advantage + 1e-12
    found = gradient(
        lambda x: ppo_clip(x, *tensors[1:], mask, clip_low=low, clip_high=high).sum(), tensors[0]
    ).item()
    stopped = (advantage > 0 and rho > 1 + high) or (advantage < 0 and rho < 1 - low)
    assert found == pytest.approx(0.0 if stopped else -rho * advantage, abs=1e-12)
    rho_of = ratio(tensors[0], tensors[1], mask)
    below, above = clip_fractions(rho_of, tensors[2], mask, clip_low=low, clip_high=high)
    assert (below | above).item() == stopped


@settings(max_examples=40)
@given(st.data())
def test_padding_order_and_micro_batches_change_nothing(data: st.DataObject) -> None:
    """Loss and gradient of every objective: wider padding, rows in another order, any split into parts."""
    count = data.draw(st.integers(1, 5))
    lengths = [data.draw(st.integers(1, 4)) for _ in range(count)]
    mask = torch.arange(4) < torch.tensor(lengths)[:, None]
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 10**6)))
    new, old, ref = (torch.randn(count, 4, generator=generator, dtype=torch.float64) * mask for _ in range(3))
    scores = torch.randn(count, 1, generator=generator, dtype=torch.float64)
    order = torch.tensor(data.draw(st.permutations(range(count))))
    cut = data.draw(st.integers(0, count))
    for weights in WEIGHTS:
        for estimator in KL_ESTIMATORS:
            objective = grpo(kl_coef=0.1, kl_estimator=estimator)._replace(weight_fn=weights)

            def whole(lp: Tensor, rows: Tensor, width: int = 4, objective: Objective = objective) -> Tensor:
                parts = [x[rows] for x in (lp, scores, old, ref, mask)]
                wide = [torch.nn.functional.pad(x, (0, width - 4)) if x.shape[1] > 1 else x for x in parts]
                return total_loss(objective, *wide)

            def split(
                lp: Tensor, objective: Objective = objective, weights: Callable[..., Tensor] = weights
            ) -> Tensor:
                total = weights(mask)
                parts = [slice(0, cut), slice(cut, count)]
                return sum(
                    total_loss(objective, *(x[rows] for x in (lp, scores, old, ref, mask, total)))
                    for rows in parts
                )  # type: ignore[return-value]

            straight = torch.arange(count)
            expected, slope = whole(new, straight), gradient(lambda x: whole(x, straight), new)  # noqa: B023
            for function in (lambda x: whole(x, order), lambda x: whole(x, straight, 9), split):  # noqa: B023
                torch.testing.assert_close(function(new), expected, atol=1e-7, rtol=1e-6)
                torch.testing.assert_close(gradient(function, new), slope, atol=1e-7, rtol=1e-6)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=5), st.integers(0, 5))
def test_counts_may_come_from_outside(lengths: list[int], cut: int) -> None:
    """Weights of a part, given the counts of the whole, are the part of the whole's weights."""
    mask = torch.arange(4) < torch.tensor(lengths)[:, None]
    tokens, count = int(mask.sum()), len(lengths)
    for whole, part in (
        (per_token(mask), per_token(mask[:cut], num_tokens=tokens)),
        (per_sequence(mask), per_sequence(mask[:cut], num_sequences=count)),
        (sequence_sum(mask), sequence_sum(mask[:cut], num_sequences=count)),
        (fixed_length(mask, max_tokens=9), fixed_length(mask[:cut], max_tokens=9, num_sequences=count)),
    ):
        assert torch.equal(whole[:cut], part)
        assert torch.equal(whole != 0, mask)
    if tokens:
        assert per_token(mask).sum().item() == pytest.approx(1, rel=1e-5)
    if min(lengths) > 0:
        assert per_sequence(mask).sum().item() == pytest.approx(1, rel=1e-5)


def test_fixed_length_does_not_read_the_padded_width() -> None:
    wide = torch.nn.functional.pad(MASK, (0, 7))
    assert fixed_length(wide, max_tokens=8).sum().item() == pytest.approx(10 / 32)
    assert fixed_length(MASK, max_tokens=8).sum().item() == pytest.approx(10 / 32)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("estimator", [None, *KL_ESTIMATORS])
@pytest.mark.parametrize("weights", ["per_token", "per_sequence", "sequence_sum"])
def test_what_stands_at_masked_positions_does_not_count(
    bad: float, estimator: str | None, weights: str
) -> None:
    """In log-probs, advantages per token, fully masked rows: same loss, same gradient, exactly 0 there."""
    kl = {} if estimator is None else {"kl_coef": 0.1, "kl_estimator": estimator}
    objective = grpo(weights=weights, **kl)  # type: ignore[arg-type]
    mask = MASK.clone()
    mask[1] = False
    mask[2, 1] = False  # a tool's token in between
    per_token_advantages = NORMALIZED.expand(4, 4)

    def filled(value: float) -> list[Tensor]:
        parts = (NEW, per_token_advantages, OLD, REF)
        return [torch.where(mask, x, value) for x in parts]

    clean, dirty = filled(0.0), filled(bad)
    assert torch.equal(total_loss(objective, *dirty, mask), total_loss(objective, *clean, mask))
    slopes = [
        gradient(lambda x, p=parts: total_loss(objective, x, *p[1:], mask), parts[0])
        for parts in (dirty, clean)
    ]
    assert torch.equal(*slopes)
    assert (slopes[0][~mask] == 0).all()
    token_loss = objective.loss_fn(dirty[0], dirty[2], dirty[1], mask)
    assert (token_loss[~mask] == 0).all()
    kl_loss = objective.kl_fn(dirty[0], dirty[3], dirty[2], mask)
    assert (kl_loss[~mask] == 0).all()
    assert (ratio(dirty[0], dirty[2], mask)[~mask] == 1).all()


@pytest.mark.parametrize("estimator", [None, *KL_ESTIMATORS])
def test_one_token_of_no_probability_leaves_the_loss_finite(estimator: str | None) -> None:
    kl = {} if estimator is None else {"kl_coef": 0.1, "kl_estimator": estimator}
    objective = grpo(**kl)  # type: ignore[arg-type]
    for place in range(3):
        parts = [NEW.clone(), OLD.clone(), REF.clone()]
        parts[place][2, 1] = -math.inf

        def loss(lp: Tensor, parts: list[Tensor] = parts) -> Tensor:
            return total_loss(objective, lp, NORMALIZED, parts[1], parts[2])

        slope = gradient(loss, parts[0])
        assert loss(parts[0]).isfinite() and slope.isfinite().all()
        if place == 0:
            assert slope[2, 1] == 0


@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_batch_without_a_trained_token_has_loss_zero_and_a_graph(weights: Callable[..., Tensor]) -> None:
    mask = torch.zeros_like(MASK)
    objective = grpo(kl_coef=0.1)._replace(weight_fn=weights)
    leaf = NEW.clone().requires_grad_()
    loss = total_loss(objective, leaf, mask=mask)
    loss.backward()
    assert loss.item() == 0 and leaf.grad is not None and (leaf.grad == 0).all()


def test_masked_sum_ignores_what_has_no_weight() -> None:
    values = torch.tensor([[1.0, math.nan], [math.inf, 3.0]], requires_grad=True)
    total = masked_sum(values, torch.tensor([[0.5, 0.0], [0.0, 2.0]]))
    total.backward()
    assert total.item() == 6.5 and values.grad.tolist() == [[0.5, 0.0], [0.0, 2.0]]  # type: ignore[union-attr]


def test_masked_tokens_of_the_supervised_loss() -> None:
    leaf = torch.tensor([[-1.0, -math.inf, math.nan]], requires_grad=True)
    loss = negative_log_likelihood(leaf, torch.tensor([[True, False, False]]))
    loss.sum().backward()
    assert loss.tolist() == [[1.0, 0.0, 0.0]] and leaf.grad.tolist() == [[-1.0, 0.0, 0.0]]  # type: ignore[union-attr]
