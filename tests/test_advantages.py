"""The golden numbers of docs/algorithms/advantages.md, closed forms, and what must hold for every group."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings, strategies as st

from razona.advantages import (
    Std,
    group_centered,
    group_normalized,
    leave_one_out,
    total_rewards,
    zero_std_groups,
)
from razona.objective import cispo, dapo, dr_grpo, grpo, gspo, rloo

NAN = math.nan
CONVENTIONS = ("population", "sample", "none")
SIX_DIGITS = 6e-7

groups = st.lists(st.integers(-50, 50).map(lambda n: n / 4), min_size=2, max_size=9)


def advantages(rewards: list[float], std: Std = "population", eps: float = 1e-4) -> list[float]:
    return group_normalized(torch.tensor([rewards], dtype=torch.float64), std=std, eps=eps)[0].tolist()


def near(values: list[float], tolerance: float = SIX_DIGITS) -> object:
    return pytest.approx(values, abs=tolerance, rel=0)


@pytest.mark.parametrize(
    ("rewards", "std", "eps", "expected"),
    [
        ([3, 1, 0, 3], "population", 0.0, [0.962250, -0.577350, -1.347151, 0.962250]),
        ([3, 1, 0, 3], "population", 1e-4, [0.962176, -0.577306, -1.347047, 0.962176]),
        ([3, 1, 0, 3], "sample", 1e-4, [0.833278, -0.499967, -1.166589, 0.833278]),
        ([3, 1, 0, 3], "sample", 1e-6, [0.833333, -0.500000, -1.166666, 0.833333]),
        ([3, 1, 0, 3], "none", 1e-4, [1.25, -0.75, -1.75, 1.25]),
        ([3, 0, 0, 0], "population", 1e-4, [1.731917, -0.577306, -0.577306, -0.577306]),
        ([3, 0, 0, 0], "sample", 1e-4, [1.499900, -0.499967, -0.499967, -0.499967]),
        ([30, 10, 0, 30], "population", 1e-4, [0.962243, -0.577346, -1.347140, 0.962243]),
        ([3e-3, 1e-3, 0, 3e-3], "population", 1e-4, [0.893471, -0.536083, -1.250859, 0.893471]),
        ([1, 0, NAN, 1], "population", 1e-4, [0.706957, -1.413914, 0, 0.706957]),
        ([1, 0], "population", 1e-4, [0.9998, -0.9998]),
        ([1, 0], "sample", 1e-4, [0.707007, -0.707007]),
    ],
)
def test_golden_groups(rewards: list[float], std: Std, eps: float, expected: list[float]) -> None:
    assert advantages(rewards, std, eps) == near(expected)


def test_eps_breaks_scale_invariance_for_tiny_rewards() -> None:
    assert advantages([3e-4, 1e-4, 0, 3e-4])[0] == near(0.543706)
    assert advantages([3e-5, 1e-5, 0, 3e-5])[0] == near(0.110629)


def test_batch_std_golden() -> None:
    """docs/algorithms/advantages.md#batch-deviation: the group's mean, the deviation of all eight rewards."""
    rewards = torch.tensor([[3.0, 1.0, 0.0, 3.0], [1.0, 1.0, 0.0, 1.0]])
    found = group_normalized(rewards, std="batch", eps=0.0)
    assert found[0].tolist() == near([1.147079, -0.688247, -1.605910, 1.147079])
    assert found[1].tolist() == near([0.229416, 0.229416, -0.688247, 0.229416])


@given(groups, st.lists(st.integers(-20, 20), min_size=2, max_size=9), st.integers(0, 3))
def test_batch_std_is_that_of_every_judged_reward(
    first: list[float], second: list[float], abstained: int
) -> None:
    size = max(len(first), len(second)) + abstained
    rows = [row + [NAN] * (size - len(row)) for row in (first, second)]
    found = group_normalized(torch.tensor(rows, dtype=torch.float64), std="batch", eps=0.0)
    judged = torch.tensor(first + second, dtype=torch.float64)
    deviation = ((judged - judged.mean()) ** 2).mean().sqrt().item()
    for row, advantages_ in zip((first, second), found.tolist(), strict=True):
        flat = max(row) == min(row)
        mean = sum(row) / len(row)
        expected = [0.0 if flat else (r - mean) / deviation for r in row]
        assert advantages_ == near([*expected, *[0.0] * (size - len(row))], 1e-5)


def test_batch_std_without_anything_to_learn_is_zero() -> None:
    for rows in ([[NAN, NAN]], [[1.0, 1.0]], [[1.0, NAN], [NAN, 2.0]]):
        assert (group_normalized(torch.tensor(rows), std="batch", eps=0.0) == 0).all()


def test_leave_one_out_golden() -> None:
    found = leave_one_out(torch.tensor([[3.0, 1.0, 0.0, 3.0]]))[0].tolist()
    assert found == near([1.666667, -1, -2.333333, 1.666667])


def test_the_texts_table() -> None:
    table = [round(a, 2) for a in advantages([3, 1, 0, 3])]
    assert table == [0.96, -0.58, -1.35, 0.96]
    assert [round(a, 2) for a in advantages([30, 10, 0, 30])] == table
    assert round(advantages([3, 0, 0, 0])[0], 2) == 1.73
    assert advantages([1, 1, 1, 1]) == [0.0] * 4


@pytest.mark.parametrize("size", [2, 4, 7, 16])
def test_closed_forms_for_binary_rewards(size: int) -> None:
    for correct in range(1, size):
        rewards = [1.0] * correct + [0.0] * (size - correct)
        found = advantages(rewards, eps=0.0)
        assert found[0] == pytest.approx(math.sqrt((size - correct) / correct), rel=1e-6)
        assert found[-1] == pytest.approx(-math.sqrt(correct / (size - correct)), rel=1e-6)
    winner = [1.0] + [0.0] * (size - 1)
    assert advantages(winner, eps=0.0)[0] == pytest.approx(math.sqrt(size - 1), rel=1e-6)
    assert advantages(winner, "sample", eps=0.0)[0] == pytest.approx((size - 1) / math.sqrt(size), rel=1e-6)


@given(groups, st.randoms(use_true_random=False))
def test_advantages_follow_a_permutation(rewards: list[float], random: object) -> None:
    order = list(range(len(rewards)))
    random.shuffle(order)  # type: ignore[attr-defined]
    for std in CONVENTIONS:
        before = advantages(rewards, std)
        assert advantages([rewards[i] for i in order], std) == near([before[i] for i in order], 1e-5)


@given(groups, st.floats(0.1, 8), st.booleans(), st.floats(-20, 20))
def test_an_affine_change_of_the_rewards(
    rewards: list[float], scale: float, negative: bool, shift: float
) -> None:
    assume(max(rewards) > min(rewards))
    slope = -scale if negative else scale
    changed = [slope * r + shift for r in rewards]
    for std in ("population", "sample"):
        sign = math.copysign(1, slope)
        assert advantages(changed, std, 0.0) == near([sign * a for a in advantages(rewards, std, 0.0)], 1e-5)
    centred = [slope * a for a in advantages(rewards, "none")]
    assert advantages(changed, "none") == pytest.approx(centred, abs=1e-5, rel=1e-5)


@given(groups)
def test_sums(rewards: list[float]) -> None:
    assume(max(rewards) > min(rewards))
    size = len(rewards)
    for std, squares in (("population", size), ("sample", size - 1)):
        found = advantages(rewards, std, 0.0)
        assert sum(found) == pytest.approx(0, abs=1e-5)
        assert sum(a * a for a in found) == pytest.approx(squares, rel=1e-5)
    population, sample = advantages(rewards, eps=0.0), advantages(rewards, "sample", 0.0)
    assert population == near([a * math.sqrt(size / (size - 1)) for a in sample], 1e-5)
    alone = leave_one_out(torch.tensor([rewards], dtype=torch.float64))[0].tolist()
    literal = [r - (sum(rewards) - r) / (size - 1) for r in rewards]
    assert alone == pytest.approx(literal, abs=1e-5)


@given(st.floats(-1e6, 1e6, width=32), st.integers(1, 40), st.sampled_from(CONVENTIONS))
def test_a_constant_group_gives_exactly_zero(reward: float, size: int, std: Std) -> None:
    for dtype in (torch.float32, torch.float64):
        rewards = torch.full((1, size), reward, dtype=dtype)
        assert group_normalized(rewards, std=std, eps=0.0).tolist() == [[0.0] * size]
        assert group_centered(rewards).tolist() == leave_one_out(rewards).tolist() == [[0.0] * size]


@pytest.mark.parametrize("rewards", [[0.7] * 7, [0.1 + 0.2, 0.3], [5.0, 5.0 + 9e-10, 5.0]])
@pytest.mark.parametrize("std", CONVENTIONS)
def test_rounding_noise_is_no_signal(rewards: list[float], std: Std) -> None:
    assert advantages(rewards, std, 0.0) == [0.0] * len(rewards)
    assert advantages(torch.tensor(rewards, dtype=torch.float32).tolist(), std, 0.0) == [0.0] * len(rewards)
    assert zero_std_groups(torch.tensor([rewards], dtype=torch.float64)).tolist() == [True]


def test_a_difference_above_the_tolerance_is_signal() -> None:
    assert advantages([5.0, 5.0 + 2e-9], eps=0.0) == near([-1, 1], 1e-5)


@pytest.mark.parametrize("function", [group_normalized, group_centered, leave_one_out])
def test_groups_that_cannot_be_judged(function: object) -> None:
    rewards = torch.tensor([[NAN, NAN, NAN], [NAN, 7.0, NAN], [1.0, 1.0, NAN], [1.0, 0.0, NAN]])
    found = function(rewards)  # type: ignore[operator]
    assert found[:3].tolist() == [[0.0] * 3] * 3
    assert found[3, 0] > 0 > found[3, 1] and found[3, 2] == 0
    assert zero_std_groups(rewards).tolist() == [True, True, True, False]


@given(groups, st.integers(0, 3), st.sampled_from(CONVENTIONS))
def test_abstentions_change_nothing_for_the_others(rewards: list[float], abstained: int, std: Std) -> None:
    found = advantages(rewards + [NAN] * abstained, std)
    assert found == near([*advantages(rewards, std), *[0.0] * abstained])
    alone = leave_one_out(torch.tensor([rewards + [NAN] * abstained], dtype=torch.float64))[0].tolist()
    assert alone[: len(rewards)] == near(
        leave_one_out(torch.tensor([rewards], dtype=torch.float64))[0].tolist()
    )


def test_rewards_are_summed_over_functions() -> None:
    rewards = torch.tensor([[[1.0, 2.0], [NAN, 3.0], [NAN, NAN], [4.0, NAN]]], dtype=torch.float64)
    plain, weighted = total_rewards(rewards), total_rewards(rewards, (0.5, -2.0))
    assert plain.dtype == torch.float64
    assert plain.nan_to_num(nan=-9).tolist() == [[3.0, 3.0, -9, 4.0]]
    assert weighted.nan_to_num(nan=-9).tolist() == [[-3.5, -6.0, -9, 2.0]]


def test_a_function_of_weight_zero_still_judges() -> None:
    rewards = torch.tensor([[[1.0, NAN], [NAN, 5.0]]], dtype=torch.float64)
    assert total_rewards(rewards, (1.0, 0.0)).tolist() == [[1.0, 0.0]]


@settings(max_examples=50)
@given(st.lists(st.floats(-1, 1), min_size=1, max_size=5), st.integers(2, 9))
def test_equal_parts_give_equal_sums(parts: list[float], size: int) -> None:
    """Weighted sums that differ by rounding at most, as of 0.1 + 0.2 and 0.3, teach nothing."""
    rows = [parts if member % 2 else parts[::-1] for member in range(size)]
    totals = total_rewards(torch.tensor([rows], dtype=torch.float64))
    assert group_normalized(totals, eps=0.0).tolist() == [[0.0] * size]


def test_objectives_carry_their_advantage_rule() -> None:
    rewards = torch.tensor([[[3.0], [1.0], [0.0], [3.0]], [[1.0], [1.0], [1.0], [1.0]]], dtype=torch.float64)
    mask = torch.ones(8, 5, dtype=torch.bool)

    def rule(objective: object) -> list[float]:
        found = objective.advantage_fn(rewards, reward_weights=(1.0,), loss_mask=mask)  # type: ignore[attr-defined]
        assert found.shape == (8, 1)
        return found[:, 0].tolist()

    assert rule(grpo()) == near([0.962176, -0.577306, -1.347047, 0.962176, 0, 0, 0, 0])
    assert rule(grpo(std="sample"))[:2] == near([0.833278, -0.499967])
    assert rule(dr_grpo(max_tokens=8))[:4] == near([1.25, -0.75, -1.75, 1.25])
    assert rule(dr_grpo(max_tokens=8, std="population"))[:2] == near([0.962176, -0.577306])
    for objective in (dapo(), gspo(), cispo()):
        assert rule(objective)[:2] == near([0.962176, -0.577306])
    assert rule(rloo()) == near([1.666667, -1, -2.333333, 1.666667, 0, 0, 0, 0])
    assert rule(dapo(std="batch"))[:2] == near([1.25 / 0.992257, -0.75 / 0.992257])
