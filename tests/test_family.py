"""GSPO, CISPO, RLOO, REINFORCE and importance weights against the golden numbers of
docs/algorithms/policy-losses.md. Fixture F is in test_losses.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings, strategies as st
from test_losses import (
    DIGITS,
    LENGTHS,
    MASK,
    NEW,
    NORMALIZED,
    OLD,
    REF,
    Rows,
    check,
    gradient,
    pad,
    total_loss,
)
from torch import Tensor

from razona.losses import policy
from razona.losses.importance import Level, Outside, importance_weights, uncorrected
from razona.losses.weights import masked_sum, per_sequence, per_token, sequence_sum
from razona.objective import OBJECTIVES, Objective, cispo, dapo, grpo, gspo, rloo, with_importance

SAMPLER = pad([[-0.52, -1.1, -0.3], [-0.9, -1.2], [-1.55, -0.7, -0.15, -1.05], [-0.58]])
LEFT_OUT = pad([[5 / 3], [-1.0], [-7 / 3], [5 / 3]], 1)
FAMILY = {
    "dapo": dapo(),
    "gspo": gspo(),
    "gspo, wide": gspo(clip_low=0.2, clip_high=0.2),
    "cispo": cispo(),
    "cispo, two bounds": cispo(clip_low=0.2, clip_high=0.2),
    "rloo": rloo(),
    "dual clip": grpo(dual_clip=3.0),
    "reinforce": grpo()._replace(loss_fn=policy.reinforce),
    "gspo_token": gspo()._replace(loss_fn=partial(policy.gspo_token, clip_low=3e-4, clip_high=4e-4)),
}


def per_row(values: Rows) -> Rows:
    """One number per completion, for each of its tokens."""
    return [row * length for row, length in zip(values, LENGTHS, strict=True)]


def test_gspo_golden() -> None:
    ratios = policy.mean_ratio(NEW, OLD, MASK)
    assert ratios[:, 0].tolist() == pytest.approx([1.033895, 0.839457, 0.939413, 1.349859], abs=DIGITS)
    assert (ratios[~MASK] == 1).all()
    check(
        gspo(clip_low=0.2, clip_high=0.2),
        -0.099844,
        per_row([[-0.082906], [0.060583], [0.079096], [0.0]]),
    )
    check(gspo(), -0.000337, per_row([[0.0], [0.0], [0.0], [0.0]]))  # every completion is clipped


def test_gspo_golden_small_drift() -> None:
    drift = pad([[0.0003, -0.0001, 0.0004], [-0.0005, 0.0001], [0.0002, -0.0004, 0.0, -0.0001], [0.0003]])
    function = partial(total_loss, gspo())
    assert function(OLD + drift).item() == pytest.approx(-0.000174, abs=DIGITS)
    slopes = pad(per_row([[-0.080204], [0.072154], [0.084191], [-0.240635]]))
    torch.testing.assert_close(gradient(function, OLD + drift), slopes, atol=DIGITS, rtol=0)
    below, above = policy.clip_fractions(
        policy.mean_ratio(OLD + drift, OLD, MASK), NORMALIZED, MASK, clip_low=3e-4, clip_high=4e-4
    )
    assert not below.any() and not above.any()


def test_cispo_golden() -> None:
    slopes = [
        [-0.117530, -0.091532, -0.091532],
        [0.038701, 0.060695],
        [0.148883, 0.104916, 0.134715, 0.121895],
        [-0.123168],
    ]
    objective = cispo(clip_high=0.28)
    assert total_loss(objective, NEW).item() == pytest.approx(-0.322028, abs=DIGITS)
    found = gradient(partial(total_loss, objective))
    torch.testing.assert_close(found, pad(slopes), atol=DIGITS, rtol=0)
    assert (found[MASK] != 0).all()  # nothing is dropped
    assert total_loss(cispo(), NEW).item() == pytest.approx(-0.320012, abs=DIGITS)  # at most 5
    two_sided = cispo(clip_low=0.2, clip_high=0.2)
    assert total_loss(two_sided, NEW).item() == pytest.approx(-0.337402, abs=DIGITS)


def test_rloo_golden() -> None:
    ratios = policy.sequence_ratio(NEW, OLD, MASK)
    assert ratios[:, 0].tolist() == pytest.approx([1.105171, 0.704688, 0.778801, 1.349859], abs=DIGITS)
    assert (ratios[~MASK] == 1).all()
    check(rloo(), -0.293821, advantages=LEFT_OUT)
    plain = masked_sum(policy.reinforce(NEW, OLD, LEFT_OUT, MASK), sequence_sum(MASK))
    assert plain.item() == pytest.approx(-1.625, abs=DIGITS)


def slopes_on_policy(objective: Objective, advantages: Tensor = NORMALIZED) -> Tensor:
    return gradient(lambda lp: total_loss(objective, lp, advantages, lp.detach()))


def test_on_policy_identities() -> None:
    """docs/algorithms/policy-losses.md#on-policy-identities: where the ratio is 1, GRPO by tokens = CISPO =
    REINFORCE, GSPO = GRPO by completions, and RLOO is REINFORCE on whole completions.
    """
    reinforce = Objective(**{**grpo()._asdict(), "loss_fn": policy.reinforce, "weight_fn": per_token})
    by_tokens = slopes_on_policy(grpo(weights="per_token"))
    for same in (cispo(), dapo(), reinforce):
        torch.testing.assert_close(slopes_on_policy(same), by_tokens, atol=1e-12, rtol=1e-6)
    torch.testing.assert_close(slopes_on_policy(gspo()), slopes_on_policy(grpo()), atol=1e-9, rtol=1e-6)
    whole = slopes_on_policy(reinforce._replace(weight_fn=sequence_sum), LEFT_OUT)
    torch.testing.assert_close(slopes_on_policy(rloo(), LEFT_OUT), whole, atol=1e-9, rtol=1e-6)


@given(st.integers(0, 10**6), st.floats(0.01, 0.5))
def test_gspo_token_is_gspo_when_a_row_has_one_advantage(seed: int, clip: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    new = torch.randn(4, 4, generator=generator, dtype=torch.float64) * 0.3 * MASK + OLD
    for advantages in (NORMALIZED, NORMALIZED.expand(4, 4)):

        def loss(lp: Tensor, fn: Callable[..., Tensor], advantages: Tensor = advantages) -> Tensor:
            token = fn(lp, OLD, advantages, MASK, clip_low=clip, clip_high=clip)
            return masked_sum(token, per_sequence(MASK))

        whole, tokens = partial(loss, fn=policy.gspo), partial(loss, fn=policy.gspo_token)
        torch.testing.assert_close(tokens(new), whole(new))
        torch.testing.assert_close(gradient(tokens, new), gradient(whole, new), atol=1e-9, rtol=1e-6)


def test_gspo_token_credits_tokens_apart() -> None:
    advantages = torch.zeros(4, 4, dtype=torch.float64)
    advantages[0, 1] = 1.0
    loss = partial(policy.gspo_token, clip_low=0.5, clip_high=0.5)
    found = gradient(lambda lp: loss(lp, OLD, advantages, MASK).sum())
    assert found.nonzero().tolist() == [[0, 1]] and found[0, 1] == pytest.approx(-1.033895, abs=DIGITS)


@given(st.lists(st.floats(-0.5, 0.5), min_size=1, max_size=4), st.integers(1, 3))
def test_the_ratio_of_gspo_does_not_grow_with_the_length(drift: list[float], times: int) -> None:
    """docs/algorithms/policy-losses.md#on-policy-identities; that of RLOO does."""
    row = torch.tensor([drift], dtype=torch.float64)
    longer, zero = row.repeat(1, times), torch.zeros(1, len(drift) * times, dtype=torch.float64)
    once = policy.mean_ratio(row, torch.zeros_like(row), row == row)[0, 0].item()
    assert policy.mean_ratio(longer, zero, zero == 0)[0, 0].item() == pytest.approx(once)
    product = policy.sequence_ratio(longer, zero, zero == 0)[0, 0].item()
    assert product == pytest.approx(math.exp(sum(drift) * times))


def test_the_ratio_of_a_long_completion_stays_finite() -> None:
    new, old = torch.zeros(2, 300), torch.tensor([-5.0, 5.0])[:, None].expand(2, 300)
    found = policy.sequence_ratio(new, old, torch.ones(2, 300, dtype=torch.bool))
    assert found[:, 0].tolist() == pytest.approx([math.exp(20), math.exp(-20)], rel=1e-5)


@settings(max_examples=25)
@given(st.sampled_from(sorted(FAMILY)), st.data())
def test_padding_order_and_splitting_change_nothing(name: str, data: st.DataObject) -> None:
    """Value and gradient; rows are split, never cut."""
    objective = FAMILY[name]
    count = data.draw(st.integers(1, 5))
    mask = torch.arange(4) < torch.tensor([data.draw(st.integers(1, 4)) for _ in range(count)])[:, None]
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 10**6)))
    scale = data.draw(st.sampled_from([1e-4, 0.2]))  # within GSPO's bounds, and beyond
    old = -torch.rand(count, 4, generator=generator, dtype=torch.float64) * mask
    new = old + scale * torch.randn(count, 4, generator=generator, dtype=torch.float64) * mask
    scores = torch.randn(count, 1, generator=generator, dtype=torch.float64)
    order = torch.tensor(data.draw(st.permutations(range(count))))
    cut = data.draw(st.integers(0, count))
    weights = objective.weight_fn(mask)

    def loss(lp: Tensor, rows: Tensor | slice = slice(None), width: int = 4) -> Tensor:
        wide = [torch.nn.functional.pad(x[rows], (0, width - 4)) for x in (lp, old, mask, weights)]
        token = objective.loss_fn(wide[0], wide[1], scores[rows], wide[2])
        return masked_sum(token, wide[3])

    expected, slope = loss(new), gradient(loss, new)
    for other in (
        lambda lp: loss(lp, order),
        lambda lp: loss(lp, width=9),
        lambda lp: loss(lp, slice(0, cut)) + loss(lp, slice(cut, count)),
    ):
        torch.testing.assert_close(other(new), expected, atol=1e-9, rtol=1e-6)
        torch.testing.assert_close(gradient(other, new), slope, atol=1e-9, rtol=1e-6)


@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_stands_at_masked_positions_does_not_count(name: str, bad: float) -> None:
    objective, mask = FAMILY[name], MASK.clone()
    mask[1] = False
    mask[2, 1] = False

    def filled(value: float) -> list[Tensor]:
        return [torch.where(mask, x, value) for x in (NEW, NORMALIZED.expand(4, 4), OLD)]

    losses, slopes = [], []
    for new, advantages, old in (filled(0.0), filled(bad)):
        losses.append(total_loss(objective, new, advantages, old, mask=mask))
        slopes.append(gradient(lambda x, a=advantages, o=old: total_loss(objective, x, a, o, mask=mask), new))
        assert (objective.loss_fn(new, old, advantages, mask)[~mask] == 0).all()
        assert (objective.ratio_fn(new, old, mask)[~mask] == 1).all()
    assert torch.equal(*losses) and torch.equal(*slopes)
    assert (slopes[0][~mask] == 0).all()


@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize("place", ["new", "old", "both"])
def test_one_token_of_no_probability_leaves_the_loss_finite(name: str, place: str) -> None:
    new, old = NEW.clone(), OLD.clone()
    if place != "old":
        new[2, 1] = -math.inf
    if place != "new":
        old[2, 1] = -math.inf
    function = partial(total_loss, FAMILY[name], old=old)
    slope = gradient(function, new)
    assert function(new).isfinite() and slope.isfinite().all()
    if place != "old":
        assert slope[2, 1] == 0


@pytest.mark.parametrize("name", FAMILY)
def test_a_log_prob_that_is_no_number_is_not_hidden(name: str) -> None:
    """A model that broke: the loss says so, and `Policy.update` changes nothing."""
    new = NEW.clone()
    new[2, 1] = math.nan
    assert total_loss(FAMILY[name], new).isnan()


def weights_of(level: Level, outside: Outside, high: float, low: float = 0.0) -> Tensor:
    return importance_weights(OLD, SAMPLER, MASK, level=level, outside=outside, low=low, high=high)


def test_importance_ratios_golden() -> None:
    tokens = [[1.020201, 0.904837, 1], [1, 2.225541], [1.051271, 1, 0.951229, 1.051271], [0.980199]]
    torch.testing.assert_close(weights_of("token", "truncate", 9.0), pad(tokens), atol=DIGITS, rtol=0)
    for level, expected in (
        ("sequence", [0.923116, 2.225541, 1.051271, 0.980199]),
        ("geometric", [0.973686, 1.491825, 1.012578, 0.980199]),
    ):
        found = weights_of(level, "truncate", 9.0)  # type: ignore[arg-type]
        rows = pad(per_row([[value] for value in expected]))
        torch.testing.assert_close(found, rows, atol=DIGITS, rtol=0)


@pytest.mark.parametrize(
    ("level", "outside", "low", "high", "value"),
    [
        ("token", "truncate", 0.0, 2.0, 0.282817),
        ("token", "mask", 0.5, 2.0, 0.161426),
        ("token", "mask", 0.5, 5.0, 0.296506),
        ("sequence", "truncate", 0.0, 2.0, 0.364582),
        ("sequence", "mask", 0.0, 3.0, 0.388689),
        ("sequence", "mask", 0.0, 2.0, 0.150816),
    ],
)
def test_importance_golden(level: Level, outside: Outside, low: float, high: float, value: float) -> None:
    objective = with_importance(grpo(weights="per_token"), level=level, outside=outside, low=low, high=high)

    def corrected(lp: Tensor, sampler: Tensor) -> Tensor:
        weight = objective.importance_fn(OLD, sampler, MASK)
        return masked_sum(objective.loss_fn(lp, OLD, NORMALIZED, MASK) * weight, objective.weight_fn(MASK))

    assert corrected(NEW, SAMPLER).item() == pytest.approx(value, abs=DIGITS)
    plain = total_loss(grpo(weights="per_token"), NEW)
    assert corrected(NEW, OLD).item() == plain.item() == pytest.approx(0.206144, abs=DIGITS)
    assert objective.importance_bounds == (low, high)


@given(st.data())
def test_importance_weights(data: st.DataObject) -> None:
    """Within the bounds or 0, constant, 1 where nothing is known; padding and masked values do not count."""
    mask = torch.arange(4) < torch.tensor([3, 1, 4])[:, None]
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 10**6)))
    old, sampler = (torch.randn(3, 4, generator=generator, requires_grad=True) for _ in range(2))
    level = data.draw(st.sampled_from(["token", "sequence", "geometric"]))
    outside = data.draw(st.sampled_from(["truncate", "mask"]))
    low, high = data.draw(st.floats(0, 1)), data.draw(st.floats(1, 6))
    rule = partial(importance_weights, level=level, outside=outside, low=low, high=high)
    found = rule(old, sampler, mask)
    assert not found.requires_grad and (found[~mask] == 0).all()
    live = found[mask]
    inside = (live >= low - 1e-6) & (live <= high + 1e-6)
    assert (inside if outside == "truncate" else inside | (live == 0)).all()
    bad = data.draw(st.sampled_from([math.nan, math.inf, -math.inf]))
    dirty = [torch.where(mask, x, bad) for x in (old, sampler)]
    assert torch.equal(rule(*dirty, mask), found)
    wide = [torch.nn.functional.pad(x, (0, 3), value=bad) for x in (old, sampler)]
    torch.testing.assert_close(rule(*wide, torch.nn.functional.pad(mask, (0, 3)))[:, :4], found)
    assert torch.equal(rule(old, torch.full_like(old, math.nan), mask), mask.float())
    assert torch.equal(rule(old, old, mask), mask.float())
    assert torch.equal(uncorrected(old, sampler, mask), mask.float())


def test_a_weight_of_a_token_the_sampler_gave_no_probability_is_finite() -> None:
    sampler = SAMPLER.clone()
    sampler[1, 0] = -math.inf
    for level in ("token", "sequence", "geometric"):
        found = importance_weights(OLD, sampler, MASK, level=level, outside="truncate", high=2.0)  # type: ignore[arg-type]
        assert found.isfinite().all() and found[1, 0] == 2.0


def test_the_kl_term_is_not_weighted() -> None:
    """The loop's own order: the policy loss is weighted, then the KL is added."""
    objective = with_importance(dapo(kl_coef=0.04), level="token", outside="mask", low=1.0, high=1.0)
    weight = objective.importance_fn(OLD, OLD - 1.0, MASK)
    assert (weight == 0).all()
    loss = objective.loss_fn(NEW, OLD, NORMALIZED, MASK) * weight
    loss = loss + objective.kl_coef * objective.kl_fn(NEW, REF, OLD, MASK)
    assert masked_sum(loss, objective.weight_fn(MASK)).item() == pytest.approx(0.04 * 0.020845, abs=DIGITS)


def test_every_objective_has_a_name_and_words() -> None:
    for name, build in OBJECTIVES.items():
        objective = build(max_tokens=8)
        assert objective.name.lower().replace(". ", "_") == name
        assert {"advantage", "aggregation", "kl", "ratio"} <= objective.description.keys()
        assert "dual clip" not in "".join(objective.description.values())
    assert dapo().clip == (0.2, 0.28) and gspo().clip == (3e-4, 4e-4)
    assert cispo().clip == (None, 4.0) and rloo().clip == (0.2, 0.2)


@pytest.mark.parametrize(("build", "option"), [(gspo, "weights"), (rloo, "weights"), (cispo, "dual_clip")])
def test_an_option_an_objective_has_no_place_for_is_no_argument(
    build: Callable[..., Objective], option: str
) -> None:
    with pytest.raises(TypeError, match=option):
        build(**{option: "per_token"})
