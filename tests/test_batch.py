"""Batch: nothing is lost or doubled when it is cut, and the two layouts agree, against slow literal loops."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from razona.batch import Batch, collate, collate_demonstrations, needed
from razona.losses.weights import fixed_length, masked_sum, per_sequence, per_token
from razona.types import Completion, Group, Prompt

Row = tuple[tuple[int, ...], tuple[int, ...]]  # prompt, completion


@st.composite
def batches(draw: st.DrawFn, *, holes: bool = True) -> Batch:
    """Up to 5 groups of unequal sizes; every token id is unique, so that a row names itself."""
    ids = iter(range(1, 10_000))

    def take(count: int) -> tuple[int, ...]:
        return tuple(next(ids) for _ in range(count))

    groups = []
    for index in range(draw(st.integers(1, 5))):
        prompt = Prompt(index, "", take(draw(st.integers(1, 6))), {})
        lengths = draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
        tokens = [take(length) for length in lengths]
        completions = tuple(Completion(t, tuple(-float(i) for i in t), "", "stop", 0) for t in tokens)
        groups.append(Group(prompt, completions, kv_length=64 * (index + 1)))
    batch = collate(groups)
    if not holes:
        return batch
    kept = torch.tensor(
        [[draw(st.integers(0, 4)) > 0 for _ in range(batch.token_ids.shape[1])] for _ in batch.lengths]
    )
    return replace(batch, loss_mask=batch.loss_mask & kept)


def rows_of(batch: Batch) -> list[Row]:
    return [
        (batch.prompts[group], tuple(batch.token_ids[row, :length].tolist()))
        for row, (group, length) in enumerate(zip(batch.group_of, batch.lengths, strict=True))
    ]


def scored(batch: Batch) -> Batch:
    """With tensors that are a function of the token, so that they can be checked wherever they go."""
    live = torch.where(batch.loss_mask, batch.token_ids, 0).float()
    return replace(
        batch,
        old_logprobs=live * 2,
        ref_logprobs=live * 3,
        advantages=batch.token_ids[:, :1].float(),
        weights=live * 4,
    )


def check_tensors(batch: Batch) -> None:
    """What `scored` put there still stands beside its token, trimmed to the longest row."""
    live = torch.where(batch.loss_mask, batch.token_ids, 0).float()
    assert batch.token_ids.shape == batch.loss_mask.shape == (len(batch), max(batch.lengths))
    for tensor, factor in ((batch.old_logprobs, 2), (batch.ref_logprobs, 3), (batch.weights, 4)):
        assert torch.equal(tensor, live * factor)  # type: ignore[arg-type]
    assert torch.equal(batch.advantages, batch.token_ids[:, :1].float())  # type: ignore[arg-type]
    width = batch.token_ids.shape[1]
    inside = torch.arange(width) < torch.tensor(batch.lengths)[:, None]
    assert (batch.token_ids[~inside] == 0).all() and not batch.loss_mask[~inside].any()
    assert list(batch.group_of) == sorted(batch.group_of)
    assert sorted(set(batch.group_of)) == list(range(len(batch.prompts)))
    assert batch.sampled is not None
    assert len(batch.sampled.kv_lengths) == len(batch.sampled.activations) == len(batch.prompts)
    assert batch.sampled.logprobs.shape == batch.token_ids.shape and len(batch.sampled.members) == len(batch)


@given(batches(), st.integers(1, 60))
def test_split_keeps_order_and_budget(batch: Batch, budget: int) -> None:
    parts = list(scored(batch).split(budget))
    assert [row for part in parts for row in rows_of(part)] == rows_of(batch)
    for part in parts:
        check_tensors(part)
        cost = sum(len(prompt) for prompt in part.prompts) + sum(part.lengths)
        assert cost <= budget or len(part) == 1
    greedy = [0]  # filled one after the other
    last = None
    for prompt, completion in rows_of(batch):
        cost = len(completion) + (0 if prompt == last else len(prompt))
        if greedy[-1] and greedy[-1] + cost > budget:
            greedy.append(len(prompt) + len(completion))
        else:
            greedy[-1] += cost
        last = prompt
    costs = [sum(len(prompt) for prompt in part.prompts) + sum(part.lengths) for part in parts]
    assert len(costs) == len(greedy)  # no more parts than that,
    assert max(costs) <= max(greedy)  # and the largest is not larger


@given(batches(), st.integers(1, 60))
def test_split_cuts_no_group_where_groups_stay_whole(batch: Batch, budget: int) -> None:
    parts = list(scored(batch).split(budget, whole_groups=True))
    assert [row for part in parts for row in rows_of(part)] == rows_of(batch)
    prompts = [prompt for part in parts for prompt in part.prompts]
    assert tuple(prompts) == batch.prompts  # each in one part alone
    costs = []
    for part in parts:
        check_tensors(part)
        costs.append(sum(len(prompt) for prompt in part.prompts) + sum(part.lengths))
        assert costs[-1] <= budget or len(part.prompts) == 1
    sizes = [
        len(prompt) + sum(n for n, owner in zip(batch.lengths, batch.group_of, strict=True) if owner == group)
        for group, prompt in enumerate(batch.prompts)
    ]
    greedy = [0]
    for size in sizes:
        if greedy[-1] and greedy[-1] + size > budget:
            greedy.append(0)
        greedy[-1] += size
    assert len(costs) == len(greedy) and max(costs) <= max(greedy)


@given(batches())
def test_full_rows_say_the_same_as_the_flat_row(batch: Batch) -> None:
    """At every place that is read stand the same token and the same one before it, in both layouts."""
    flat, full = batch.flat(), batch.full_rows()
    ids, rows = flat.token_ids[0], full.token_ids.flatten()
    assert torch.equal(ids[flat.source], rows[full.source])
    assert torch.equal(ids[flat.ends], rows[full.ends])
    assert torch.equal(flat.target, full.target) and full.scored is flat.scored
    assert rows[full.ends].tolist() == [completion[-1] for _, completion in rows_of(batch)]
    whole = [prompt + completion for prompt, completion in rows_of(batch)]
    assert full.token_ids.shape == (len(batch), max(map(len, whole)))
    assert [tuple(row[own].tolist()) for row, own in zip(full.token_ids, full.attended, strict=True)] == whole


@given(batches(), st.integers(1, 5), st.integers(1, 3), st.integers(0, 9))
def test_minibatches_are_whole_groups_once_per_epoch(
    batch: Batch, count: int, epochs: int, seed: int
) -> None:
    count = min(count, len(batch.prompts))
    batch = scored(batch)
    parts = list(batch.minibatches(count, epochs=epochs, seed=seed))
    assert len(parts) == count * epochs
    for epoch in range(epochs):
        own = parts[epoch * count : (epoch + 1) * count]
        assert sorted(row for part in own for row in rows_of(part)) == sorted(rows_of(batch))
        sizes = [len(part.prompts) for part in own]
        assert max(sizes) - min(sizes) <= 1
        prompts = [prompt for part in own for prompt in part.prompts]
        assert len(prompts) == len(set(prompts))
    for part in parts:
        check_tensors(part)
    again = list(batch.minibatches(count, epochs=epochs, seed=seed))
    assert [rows_of(part) for part in parts] == [rows_of(part) for part in again]


def test_minibatches_come_in_another_order_each_epoch_and_step() -> None:
    groups = [
        Group(Prompt(i, "", (i + 1,), {}), (Completion((9,), (0.0,), "", "stop", 0),)) for i in range(12)
    ]
    batch = collate(groups)

    def order(seed: int) -> list[list[Row]]:
        return [rows_of(part) for part in batch.minibatches(1, epochs=2, seed=seed)]

    first, second = order(0)
    assert first != second and order(1)[0] != first
    (only,) = batch.minibatches(1, epochs=1, seed=0)
    assert only is batch


@given(batches())
def test_the_flat_row_against_a_literal_loop(batch: Batch) -> None:
    row = batch.flat()
    ids, positions, owners = [], [], []  # owner: (group, completion or None)
    for group, prompt in enumerate(batch.prompts):
        ids += prompt
        positions += range(len(prompt))
        owners += [(group, None)] * len(prompt)
        for index, (own_prompt, completion) in enumerate(rows_of(batch)):
            if own_prompt == prompt:
                ids += completion
                positions += range(len(prompt), len(prompt) + len(completion))
                owners += [(group, index)] * len(completion)
    assert row.token_ids.tolist() == [ids] and row.position_ids.tolist() == [positions]

    expected = []
    for index, (prompt, completion) in enumerate(rows_of(batch)):
        for t, token in enumerate(completion):
            if batch.loss_mask[index, t]:
                before = prompt[-1] if t == 0 else completion[t - 1]
                expected.append((ids.index(before), token))
    assert list(zip(row.source.tolist(), row.target.tolist(), strict=True)) == expected
    assert torch.equal(row.scored, batch.loss_mask)

    for group, span in enumerate(row.spans):
        assert owners[span.start] == (group, None)
        assert span.prompt_length == len(batch.prompts[group])
        assert span.kv_length == needed(batch.sampled).kv_lengths[group] == 64 * (group + 1)
        assert sum(span.lengths) == sum(1 for owner, c in owners if owner == group and c is not None)


@given(batches(), st.data())
def test_select_takes_rows_and_their_prompts(batch: Batch, data: st.DataObject) -> None:
    rows = sorted(data.draw(st.sets(st.integers(0, len(batch) - 1), min_size=1)))
    chosen = scored(batch).select(rows)
    assert rows_of(chosen) == [rows_of(batch)[row] for row in rows]
    assert len(chosen.prompts) == len({batch.group_of[row] for row in rows})
    check_tensors(chosen)


@given(batches(), st.data())
def test_only_rows_with_a_signal_remain(batch: Batch, data: st.DataObject) -> None:
    signal = data.draw(st.lists(st.booleans(), min_size=len(batch), max_size=len(batch)))
    sign = torch.where(batch.token_ids[:, :1] % 2 == 0, 1.0, -1.0)
    advantages = torch.tensor(signal).float()[:, None] * sign
    batch = replace(batch, advantages=advantages)
    kept = batch.with_signal()
    trained = batch.loss_mask.any(1).tolist()
    live = [any_ and row for any_, row in zip(signal, trained, strict=True)]
    wanted = [row for row, any_ in zip(rows_of(batch), live, strict=True) if any_]
    if any(live):
        assert rows_of(kept) == wanted
        assert kept.advantages is not None and (kept.advantages != 0).all()
    else:  # one group, of those with a trained token if there are any
        group = batch.group_of[trained.index(True) if any(trained) else 0]
        assert {prompt for prompt, _ in rows_of(kept)} == {batch.prompts[group]}
        assert len(kept) == batch.group_of.count(group)
    if all(live):
        assert kept is batch


@settings(max_examples=60)
@given(batches(), st.integers(1, 60))
def test_weights_of_micro_batches_add_up_to_the_whole(batch: Batch, budget: int) -> None:
    for weight_fn in (per_token, per_sequence, lambda mask: fixed_length(mask, max_tokens=11)):
        whole = batch.weighted(weight_fn)
        assert whole.weights is not None
        losses = torch.sin(batch.token_ids.float())
        total = masked_sum(losses, whole.weights)
        parts = list(whole.split(budget))
        weights = [part.weights for part in parts]
        assert sum(w.sum().item() for w in weights) == pytest.approx(whole.weights.sum().item(), abs=1e-5)  # type: ignore[union-attr]
        summed = sum(masked_sum(torch.sin(part.token_ids.float()), part.weights) for part in parts)  # type: ignore[arg-type]
        torch.testing.assert_close(summed, total, atol=1e-5, rtol=1e-5)


class Scorer:
    """Log-probs that are minus the token id where trained."""

    def logprobs(self, batch: Batch, *, temperature: float) -> Tensor:
        return torch.where(batch.loss_mask, -batch.token_ids.float() * temperature, 0.0)


@given(batches(), st.integers(1, 60))
def test_scores_come_back_to_their_rows(batch: Batch, budget: int) -> None:
    expected = torch.where(batch.loss_mask, -batch.token_ids.float() * 0.5, 0.0)
    found = batch.with_old(Scorer(), temperature=0.5, budget=budget)
    found = found.with_reference(Scorer(), temperature=0.5, budget=budget)
    assert torch.equal(found.old_logprobs, expected) and torch.equal(found.ref_logprobs, expected)  # type: ignore[arg-type]


def test_collate_pads_on_the_right_and_trains_every_token() -> None:
    prompt = Prompt(7, "", (5, 6), {})
    group = Group(
        prompt,
        (
            Completion((1, 2, 3), (-1.0, -2.0, -3.0), "", "length", 0),
            Completion((0,), (-4.0,), "", "stop", 0),
        ),
        kv_length=64,
    )
    rewards = torch.ones(1, 2, 1)
    batch = collate([group], rewards)
    assert batch.token_ids.tolist() == [[1, 2, 3], [0, 0, 0]]
    assert batch.loss_mask.tolist() == [[True, True, True], [True, False, False]]
    assert batch.sampler_logprobs.tolist() == [[-1, -2, -3], [-4, 0, 0]]
    assert batch.sampled is not None and batch.sampled.kv_lengths == (64,) and batch.sampled.members == (0, 1)
    assert (len(batch), batch.num_tokens, batch.group_of) == (2, 4, (0, 0))
    assert batch.rewards is rewards and batch.select([0]).rewards is None


def test_the_overlong_filter_trains_no_token_of_a_completion_that_was_cut_off() -> None:
    """Its row, its length and its reward stay: only the mask goes, and what stood under it."""
    reasons = ("length", "stop", "aborted")
    completions = tuple(Completion((4, 5), (-1.0, -2.0), "", reason, 0) for reason in reasons)
    rewards = torch.arange(3.0).reshape(1, 3, 1)
    group = Group(Prompt(0, "", (1,), {}), completions)
    batch = collate([group], rewards, overlong_filter=True)
    assert batch.loss_mask.tolist() == [[False, False], [True, True], [False, False]]
    assert batch.sampler_logprobs.tolist() == [[0, 0], [-1, -2], [0, 0]]
    assert batch.lengths == (2, 2, 2) and batch.rewards is rewards and batch.num_tokens == 2
    assert batch.weighted(per_sequence).weights.sum() == pytest.approx(1 / 3)  # type: ignore[union-attr]
    assert batch.weighted(per_token).weights.sum() == pytest.approx(1.0)  # type: ignore[union-attr]
    assert collate([group], rewards).loss_mask.all()


def test_advantages_see_rewards_weights_and_mask() -> None:
    group = Group(Prompt(0, "", (1,), {}), tuple(Completion((2,), (0.0,), "", "stop", 0) for _ in range(3)))
    batch = collate([group], torch.arange(6.0).reshape(1, 3, 2))

    def rule(rewards: Tensor, *, reward_weights: tuple[float, ...], loss_mask: Tensor) -> Tensor:
        assert loss_mask is batch.loss_mask
        return (rewards * torch.tensor(reward_weights)).sum(-1).reshape(-1, 1)

    found = batch.with_advantages(rule, reward_weights=(1.0, 10.0)).advantages
    assert found is not None and found.tolist() == [[10.0], [32.0], [54.0]]


def test_demonstrations() -> None:
    yes, no = True, False
    batch = collate_demonstrations(
        [
            ((1, 2, 3, 4), (no, no, yes, yes)),
            ((5, 6, 7), (yes, yes, yes)),  # nothing predicts token 0
            ((8, 9, 10, 11, 12, 13), (no, yes, no, no, yes, yes)),  # two turns
            ((14, 15), (no, yes)),
        ]
    )
    assert batch.prompts == ((1, 2), (5,), (8,), (14,))
    assert batch.group_of == (0, 1, 2, 3) and batch.lengths == (2, 2, 5, 1)
    assert batch.token_ids.tolist() == [
        [3, 4, 0, 0, 0],
        [6, 7, 0, 0, 0],
        [9, 10, 11, 12, 13],
        [15, 0, 0, 0, 0],
    ]
    assert batch.loss_mask.int().tolist() == [
        [1, 1, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 0, 0, 1, 1],
        [1, 0, 0, 0, 0],
    ]
    row = batch.flat()
    tokens = row.token_ids[0].tolist()
    pairs = [(tokens[s], t) for s, t in zip(row.source.tolist(), row.target.tolist(), strict=True)]
    assert pairs == [(2, 3), (3, 4), (5, 6), (6, 7), (8, 9), (11, 12), (12, 13), (14, 15)]


def test_a_demonstration_of_one_token_trains_nothing() -> None:
    batch = collate_demonstrations([((5,), (True,)), ((6, 7), (False, True))])
    assert batch.lengths == (0, 1) and batch.num_tokens == 1
    row = batch.flat()
    assert row.token_ids.tolist() == [[5, 6, 7]] and row.source.tolist() == [1] and row.target.tolist() == [7]
    assert row.ends.tolist() == [0, 2]  # nothing after the prompt: the prompt's last token


def test_an_empty_completion_ends_with_its_prompt() -> None:
    ids = torch.tensor([[7, 8], [0, 0], [9, 0]])
    batch = Batch(prompts=((5, 6),), group_of=(0, 0, 0), lengths=(2, 0, 1), token_ids=ids, loss_mask=ids > 0)
    for row in (batch.flat(), batch.full_rows()):
        assert row.token_ids.flatten()[row.ends].tolist() == [8, 6, 9]
