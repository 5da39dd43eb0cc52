"""Losses and weights against the golden numbers of docs/algorithms, their gradients included."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from razona.losses.kl import KL_ESTIMATORS, kl_k1, kl_k2, kl_k3
from razona.losses.policy import clip_fractions, ppo_clip, ratio
from razona.losses.supervised import negative_log_likelihood
from razona.losses.weights import fixed_length, masked_sum, per_sequence, per_token, sequence_sum
from razona.objective import Objective, dapo, dr_grpo, grpo

Rows = list[list[float]]
DIGITS = 6e-7
LENGTHS = (3, 2, 4, 1)


def pad(rows: Rows, width: int = 4, fill: float = 0.0) -> Tensor:
    return torch.tensor([row + [fill] * (width - len(row)) for row in rows], dtype=torch.float64)


OLD = pad([[-0.5, -1.2, -0.3], [-0.9, -0.4], [-1.5, -0.7, -0.2, -1.0], [-0.6]])
NEW = pad([[-0.3, -1.25, -0.35], [-1.3, -0.35], [-1.4, -0.95, -0.2, -1.1], [-0.3]])
REF = pad([[-0.55, -1.1, -0.4], [-1.0, -0.5], [-1.45, -0.8, -0.25, -0.9], [-0.7]])
MASK = torch.arange(4) < torch.tensor(LENGTHS)[:, None]
NORMALIZED = pad([[0.962250449], [-0.577350269], [-1.347150628], [0.962250449]], 1)
CENTRED = pad([[1.25], [-0.75], [-1.75], [1.25]], 1)


def total_loss(
    objective: Objective,
    logprobs: Tensor,
    advantages: Tensor = NORMALIZED,
    old: Tensor = OLD,
    ref: Tensor = REF,
    mask: Tensor = MASK,
    weights: Tensor | None = None,
) -> Tensor:
    """As the loop computes it."""
    loss = objective.loss_fn(logprobs, old, advantages, mask)
    if objective.kl_coef:
        loss = loss + objective.kl_coef * objective.kl_fn(logprobs, ref, old, mask)
    return masked_sum(loss, objective.weight_fn(mask) if weights is None else weights)


def gradient(function: Callable[[Tensor], Tensor], logprobs: Tensor = NEW) -> Tensor:
    leaf = logprobs.clone().requires_grad_()
    (found,) = torch.autograd.grad(function(leaf), leaf)
    return found


def central_differences(function: Callable[[Tensor], Tensor], logprobs: Tensor = NEW) -> Tensor:
    found = torch.zeros_like(logprobs)
    for place in range(logprobs.numel()):
        step = torch.zeros_like(logprobs)
        step.view(-1)[place] = 1e-6
        slope = (function(logprobs + step) - function(logprobs - step)) / 2e-6
        found.view(-1)[place] = slope
    return found


def check(objective: Objective, value: float, slopes: Rows | None = None, **given_: Tensor) -> None:
    function = partial(total_loss, objective, **given_)  # type: ignore[arg-type]
    assert function(NEW).item() == pytest.approx(value, abs=DIGITS)
    found = gradient(function)
    torch.testing.assert_close(found, central_differences(function), atol=1e-8, rtol=1e-6)
    if slopes is not None:
        torch.testing.assert_close(found, pad(slopes), atol=DIGITS, rtol=0)


def test_token_objectives_of_the_fixture() -> None:
    middle = [[-0.461880, -0.606952], [-1.488832, -1.077721, -1.347151, -1.218952]]
    for high, first, last in ((0.2, 1.154701, 1.154701), (0.28, 1.175295, 1.231681)):
        rows = [[first, 0.915321, 0.915321], *middle, [last]]
        found = ppo_clip(NEW, OLD, NORMALIZED, MASK, clip_low=0.2, clip_high=high)
        torch.testing.assert_close(-found, pad(rows), atol=DIGITS, rtol=0)
    torch.testing.assert_close(
        ratio(NEW, OLD, MASK)[0, :3], pad([[1.221403, 0.951229, 0.951229]], 3)[0], atol=DIGITS, rtol=0
    )
    assert (kl_k3(NEW, REF, MASK).sum() / MASK.sum()).item() == pytest.approx(0.020845, abs=DIGITS)


def test_clip_fractions_of_the_fixture() -> None:
    for high, above_share in ((0.2, 0.2), (0.28, 0.1)):
        rho = ratio(NEW, OLD, MASK)
        below, above = clip_fractions(rho, NORMALIZED, MASK, clip_low=0.2, clip_high=high)
        assert (below.sum() / 10).item() == pytest.approx(0.2)
        assert (above.sum() / 10).item() == pytest.approx(above_share)


def test_grpo_golden() -> None:
    check(
        grpo(),
        -0.083059,
        [[0, -0.076277, -0.076277], [0, 0.075869], [0.093052, 0, 0.084197, 0.076185], [0]],
    )
    check(
        grpo(kl_coef=0.04),
        -0.081824,
        [
            [0.000737, -0.076816, -0.076114],
            [-0.001749, 0.076565],
            [0.093174, -0.000405, 0.084319, 0.075631],
            [0.003297],
        ],
    )
    check(grpo(kl_coef=0.04, kl_estimator="k3_weighted"), -0.081650)


def test_token_mean_golden() -> None:
    check(grpo(weights="per_token"), 0.206144)
    slopes = [[-0.117530, -0.091532, -0.091532], [0, 0.060695], [0.148883, 0, 0.134715, 0.121895], [0]]
    check(dapo(), 0.196387, slopes)
    check(dapo(kl_coef=0.04), 0.197221)


def test_dr_grpo_golden() -> None:
    slopes = [[0, -0.037157, -0.037157], [0, 0.024639], [0.060439, 0, 0.054688, 0.049483], [0]]
    check(dr_grpo(max_tokens=8), 0.083684, slopes, advantages=CENTRED)


def test_sequence_sum_golden() -> None:
    check(grpo(weights="sequence_sum"), 0.515361)


@pytest.mark.parametrize(
    ("objective", "advantages", "value", "slopes"),
    [
        (grpo(), NORMALIZED, 0.0, (-0.080188, 0.072169, 0.084197, -0.240563)),
        (grpo(weights="per_token"), NORMALIZED, 0.269430, (-0.096225, 0.057735, 0.134715, -0.096225)),
        (dr_grpo(max_tokens=8), CENTRED, 0.109375, (-1.25 / 32, 0.75 / 32, 1.75 / 32, -1.25 / 32)),
    ],
)
def test_on_policy_golden(
    objective: Objective, advantages: Tensor, value: float, slopes: tuple[float, ...]
) -> None:
    """The ratio is 1, nothing is clipped, and the gradient is not 0 though the loss of GRPO is."""
    old = NEW.clone()
    assert (ratio(NEW, old, MASK) == 1).all()
    function = partial(total_loss, objective, advantages=advantages, old=old)
    assert function(NEW).item() == pytest.approx(value, abs=DIGITS)
    rows = [[slope] * length for slope, length in zip(slopes, LENGTHS, strict=True)]
    torch.testing.assert_close(gradient(function), pad(rows), atol=DIGITS, rtol=0)
    anchored = gradient(lambda lp: total_loss(objective, lp, advantages=advantages, old=lp.detach()))
    torch.testing.assert_close(anchored, pad(rows), atol=DIGITS, rtol=0)
    for estimator in KL_ESTIMATORS:  # the reference is the policy: nothing is added
        with_kl = objective._replace(kl_coef=1.0, kl_fn=KL_ESTIMATORS[estimator])
        assert total_loss(with_kl, NEW, advantages, old, NEW).item() == function(NEW).item()
        if estimator != "k1":
            found = gradient(partial(total_loss, with_kl, advantages=advantages, old=old, ref=NEW.clone()))
            torch.testing.assert_close(found, pad(rows), atol=DIGITS, rtol=0)


def test_accumulation_needs_the_global_count() -> None:
    objective = grpo(weights="per_token", clip_high=0.28)
    parts = [slice(0, 1), slice(1, 4)]

    def part(rows: slice, **counts: int) -> float:
        weights = per_token(MASK[rows], **counts)
        return total_loss(
            objective, NEW[rows], NORMALIZED[rows], OLD[rows], REF[rows], MASK[rows], weights
        ).item()

    assert [part(rows) for rows in parts] == pytest.approx([-1.001979, 0.709972], abs=DIGITS)
    assert sum(part(rows, num_tokens=10) for rows in parts) == pytest.approx(0.196387, abs=DIGITS)


def test_aggregations_golden() -> None:
    losses = pad([[0.1, 0.2, 0.3], [1.0], [0.5, 0.5], [2.0, 0.0, 1.0, 1.0]])
    mask = torch.arange(4) < torch.tensor([3, 1, 2, 4])[:, None]
    assert masked_sum(losses, per_token(mask)).item() == pytest.approx(0.66, abs=DIGITS)
    assert masked_sum(losses, per_sequence(mask)).item() == pytest.approx(0.675, abs=DIGITS)
    assert masked_sum(losses, fixed_length(mask, max_tokens=4)).item() == pytest.approx(0.4125, abs=DIGITS)
    assert masked_sum(losses, sequence_sum(mask)).item() == pytest.approx(6.6 / 4, abs=DIGITS)
    halves = [masked_sum(losses[rows], per_token(mask[rows])).item() for rows in (slice(0, 2), slice(2, 4))]
    assert sum(halves) / 2 == pytest.approx(0.616667, abs=DIGITS)  # what a mean of means would give
    odd = [masked_sum(losses[rows], per_sequence(mask[rows])).item() for rows in (slice(0, 3), slice(3, 4))]
    assert sum(odd) / 2 == pytest.approx(0.783333, abs=DIGITS)


def test_a_masked_row_still_counts_as_a_sequence() -> None:
    mask = MASK.clone()
    mask[2] = False
    check(grpo(weights="per_token", clip_high=0.28), -0.528131, mask=mask)
    check(grpo(clip_high=0.28), -0.424811, mask=mask)


def test_dual_clip() -> None:
    new, old = torch.tensor([[math.log(5.0)]]), torch.zeros(1, 1)
    mask = torch.ones(1, 1, dtype=torch.bool)
    clip = partial(ppo_clip, new, old, loss_mask=mask, clip_low=0.2, clip_high=0.2)
    assert clip(torch.tensor([[-1.0]])).item() == pytest.approx(5.0)
    assert clip(torch.tensor([[-1.0]]), dual_clip=3.0).item() == pytest.approx(3.0)
    assert clip(torch.tensor([[1.0]]), dual_clip=3.0).item() == pytest.approx(-1.2)
    bounded = gradient(
        lambda x: ppo_clip(
            x, old, torch.tensor([[-1.0]]), mask, clip_low=0.2, clip_high=0.2, dual_clip=3.0
        ).sum(),
        new,
    )
    assert bounded.item() == 0.0


P = torch.softmax(torch.tensor([0.5, 0.0, -0.5], dtype=torch.float64), 0)
Q = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)


def test_kl_golden_values() -> None:
    lp, ref = P.log(), Q.log()
    expected = {
        kl_k1: [0.929168, -0.487122, -0.476297],
        kl_k2: [0.431677, 0.118644, 0.113429],
        kl_k3: [0.324050, 0.140503, 0.133804],
    }
    for estimator, values in expected.items():
        assert estimator(lp, ref).tolist() == pytest.approx(values, abs=DIGITS)
    means = [(P * estimator(lp, ref)).sum().item() for estimator in (kl_k1, kl_k2, kl_k3)]
    assert means == pytest.approx([0.232218, 0.276217, 0.232218], abs=DIGITS)
    variances = [(P * (k(lp, ref) - 0.232218) ** 2).sum().item() for k in (kl_k1, kl_k3)]
    assert variances == pytest.approx([0.498510, 0.008660], abs=1e-6)


def test_kl_golden_gradients() -> None:
    """E over tokens of the policy of the gradient of each estimator, with respect to the logits."""
    reverse, forward = [0.352992, -0.220978, -0.132013], [0.306480, -0.192804, -0.113676]
    mask = torch.ones(3, dtype=torch.bool)
    for name, expected in (("k1", [0, 0, 0]), ("k2", reverse), ("k3", forward), ("k3_weighted", reverse)):
        logits = torch.tensor([0.5, 0.0, -0.5], dtype=torch.float64, requires_grad=True)
        lp = logits.log_softmax(0)
        tokens = KL_ESTIMATORS[name](lp, Q.log(), lp.detach(), mask)
        (found,) = torch.autograd.grad((P * tokens).sum(), logits)
        assert found.tolist() == pytest.approx(expected, abs=DIGITS), name


def test_sft_golden() -> None:
    logits = torch.tensor(
        [[2.0, 0, -1], [0.5, 0.5, 0], [1, 2, 0], [-1, 0, 3]], dtype=torch.float64, requires_grad=True
    )
    logprobs = logits.log_softmax(-1).gather(1, torch.tensor([[0], [1], [1], [2]])).T
    assert logprobs[0].tolist() == pytest.approx([-0.169846, -0.958020, -0.407606, -0.065884], abs=DIGITS)
    everything = torch.ones(1, 4, dtype=torch.bool)
    mean = masked_sum(negative_log_likelihood(logprobs, everything), per_token(everything))
    assert mean.item() == pytest.approx(0.400339, abs=DIGITS)
    mask = torch.tensor([[False, True, True, True]])
    loss = masked_sum(negative_log_likelihood(logprobs, mask), per_token(mask))
    assert loss.item() == pytest.approx(0.477170, abs=DIGITS)
    (slope,) = torch.autograd.grad(loss, logits)
    assert slope[1].tolist() == pytest.approx([0.127884, -0.205449, 0.077566], abs=DIGITS)
    assert slope[0].tolist() == [0, 0, 0]


def test_sft_accumulation() -> None:
    batch = pad([[-0.2, -0.4, -0.6], [-1.0]], 3)
    mask = torch.tensor([[True, True, True], [True, False, False]])
    weights = per_token(mask)
    losses = negative_log_likelihood(batch, mask)
    parts = [masked_sum(losses[i : i + 1], weights[i : i + 1]).item() for i in (0, 1)]
    assert sum(parts) == pytest.approx(0.55, abs=DIGITS)
    naive = [masked_sum(losses[i : i + 1], per_token(mask[i : i + 1])).item() for i in (0, 1)]
    assert sum(naive) / 2 == pytest.approx(0.7, abs=DIGITS)
