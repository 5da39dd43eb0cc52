"""The two layouts of a batch, and the one rule that aligns them.

*Model layout*: one flat row ``[1, N]`` without padding: each prompt once, followed by its completions
(`FlatRow`). *Loss layout*: ``[B, T]``, completion tokens only, right-padded; column t speaks about completion
token t: ``logprobs[b, t] = log p(token t | prompt, tokens < t)``. `FlatRow.source` and `FlatRow.scored` are
the alignment: the hidden state at ``source[s]`` predicts the s-th scored token of the loss layout, in
row-major order. `FlatRow.ends` says where each sequence ends. `FullRows` are the same places in full padded
rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from razona.types import Group

Value = TypeVar("Value")

CPU_TOKENS = 1280  # enough rows for a matrix product to be at its best, few enough activations
ACCELERATOR_TOKENS = 16384


@dataclass(frozen=True)
class Span:
    """Where one group lies in a flat row: the prompt at [start, start + prompt_length), completions right
    after it.
    """

    start: int
    prompt_length: int
    lengths: tuple[int, ...]
    kv_length: int


@dataclass(frozen=True)
class FlatRow:
    """Groups as one row of tokens, every prompt once. ``N`` tokens, ``S`` scored tokens."""

    token_ids: Tensor  # [1, N]
    position_ids: Tensor  # [1, N], restarting at every prompt; every completion goes on from its prompt's end
    spans: tuple[Span, ...]
    source: Tensor  # [S] index in the row of the hidden state that predicts a scored token
    target: Tensor  # [S] the scored token
    scored: Tensor  # [B, T] bool, where the S log-probs go
    ends: Tensor  # [B] index in the row of each sequence's last token


@dataclass(frozen=True)
class FullRows:
    """Every prompt + completion as a row of its own, padded on the right to ``L`` tokens. ``source`` and
    ``ends`` are indices in the rows laid end to end, ``[B * L]``.
    """

    token_ids: Tensor  # [B, L]
    attended: Tensor  # [B, L] bool
    source: Tensor  # these four as in `FlatRow`
    target: Tensor
    scored: Tensor
    ends: Tensor


@dataclass(frozen=True)
class Sampled:
    """What a sampler knows about the rows of a batch, and nobody else."""

    logprobs: Tensor  # [B, T], of the distribution sampled
    kv_lengths: tuple[int, ...]  # per prompt, what keys and values were padded to
    members: tuple[int, ...]  # which completion of its group each row is
    activations: tuple[Any, ...]  # per prompt, what was saved for the training pass, or None

    def select(self, rows: Sequence[int], groups: Sequence[int], width: int) -> Sampled:
        """Of the given rows, their prompts and their first ``width`` tokens."""
        return Sampled(
            logprobs=self.logprobs[torch.tensor(rows, device=self.logprobs.device)][:, :width],
            kv_lengths=tuple(self.kv_lengths[group] for group in groups),
            members=tuple(self.members[row] for row in rows),
            activations=tuple(self.activations[group] for group in groups),
        )


@dataclass(frozen=True)
class Batch:
    """Rows in loss layout, with what is known about each. Tensors are 0 where ``loss_mask`` is False.

    Rows of one group are neighbours; ``group_of[b]`` is the index of row b's prompt.
    """

    prompts: tuple[tuple[int, ...], ...]
    group_of: tuple[int, ...]
    lengths: tuple[int, ...]  # tokens of each completion, trained or not
    token_ids: Tensor  # [B, T]
    loss_mask: Tensor  # [B, T] bool
    sampled: Sampled | None = None
    old_logprobs: Tensor | None = None  # [B, T]
    ref_logprobs: Tensor | None = None  # [B, T]
    rewards: Tensor | None = None  # [P, G, R], nan where a function abstained
    advantages: Tensor | None = None  # [B, 1] or [B, T]
    weights: Tensor | None = None  # [B, T], of the optimizer step this batch belongs to

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """Trained tokens."""
        return int(self.loss_mask.sum())

    @property
    def sampler_logprobs(self) -> Tensor:
        """``[B, T]``, of rows that were sampled."""
        return needed(self.sampled).logprobs

    @property
    def reuses_activations(self) -> bool:
        """Whether its training pass took what the sampler had computed."""
        if self.sampled is None:
            return False
        members, activations = self.sampled.members, self.sampled.activations
        rows = [(activations[group], member) for group, member in zip(self.group_of, members, strict=True)]
        return all(saved is not None and member in saved.taken for saved, member in rows)

    def with_old(
        self, policy: Any, *, temperature: float, budget: int, stale: Sequence[bool] | None = None
    ) -> Batch:
        """Adds the log-probs of the policy as it is now, which the probability ratio will be anchored to.
        Rows that are ``stale``, sampled from an older policy, are anchored to what they were sampled with.
        """
        old = self._score(policy, temperature, budget)
        if stale is not None:
            rows = torch.tensor(stale, device=old.device)[:, None]
            old = torch.where(rows, self.sampler_logprobs, old)
        return replace(self, old_logprobs=old)

    def with_reference(self, reference: Any, *, temperature: float, budget: int) -> Batch:
        """Adds the log-probs of a frozen reference."""
        return replace(self, ref_logprobs=self._score(reference, temperature, budget))

    def _score(self, scorer: Any, temperature: float, budget: int) -> Tensor:
        out = torch.zeros(self.token_ids.shape, device=self.token_ids.device)
        start = 0
        for micro in self.split(budget):
            scores = scorer.logprobs(micro, temperature=temperature)
            out[start : start + len(micro), : scores.shape[1]] = scores
            start += len(micro)
        return out

    def with_advantages(self, advantage_fn: Any, *, reward_weights: tuple[float, ...]) -> Batch:
        """Adds ``advantage_fn(rewards [P, G, R], reward_weights=, loss_mask=)``.

        Where a reference has scored, it is given ``kl`` ``[B, T]`` too, log pi_old / pi_ref of the sampled
        tokens, for advantages that have the KL in the reward.
        """
        options = {"reward_weights": reward_weights, "loss_mask": self.loss_mask}
        if self.ref_logprobs is not None:
            old = self.sampler_logprobs if self.old_logprobs is None else self.old_logprobs
            options["kl"] = old - self.ref_logprobs
        advantages = advantage_fn(self.rewards, **options)
        return replace(self, advantages=advantages)

    def weighted(self, weight_fn: Any) -> Batch:
        """Adds token weights, counted over this whole batch: call it on what one optimizer step trains on."""
        return replace(self, weights=weight_fn(self.loss_mask))

    def with_signal(self) -> Batch:
        """Only rows with a trained token and an advantage other than 0: without a KL term the others'
        gradient is exactly 0. When there are none, one group remains, so that something is measured."""
        assert self.advantages is not None
        trained = self.loss_mask.any(1)
        live = (trained & (self.advantages != 0).any(1)).nonzero()[:, 0].tolist()
        if len(live) == len(self):
            return self
        return self.select(live or self._rows_of(self.group_of[int(trained.int().argmax())]))

    def minibatches(self, count: int, *, epochs: int, seed: int) -> Iterator[Batch]:
        """``count`` parts of whole groups per epoch, in a new order each time. One part and one epoch:
        itself.
        """
        if count == 1 and epochs == 1:
            yield self
            return
        for epoch in range(epochs):
            generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
            order = torch.randperm(len(self.prompts), generator=generator).tolist()
            for part in range(count):
                chosen = order[part * len(order) // count : (part + 1) * len(order) // count]
                yield self.select([row for group in chosen for row in self._rows_of(group)])

    def split(self, budget: int, *, whole_groups: bool = False) -> Iterator[Batch]:
        """Parts of at most ``budget`` tokens, prompts counted once per part, in order and about equally
        large.

        A group that does not fit is cut between completions, or never with ``whole_groups``: a loss that
        compares a group's completions needs them side by side. One completion, or one such group, is never
        cut, so it may exceed the budget. 0: a size that suits the device.
        """
        budget = budget or (CPU_TOKENS if self.token_ids.device.type == "cpu" else ACCELERATOR_TOKENS)
        parts = self._cut(budget, whole_groups)
        low = 1  # the smallest budget that makes as many parts: the largest part decides the memory
        while low < budget:
            middle = (low + budget) // 2
            even = self._cut(middle, whole_groups)
            if len(even) > len(parts):
                low = middle + 1
            else:
                budget, parts = middle, even
        yield from (self.select(part) for part in parts)

    def _cut(self, budget: int, whole_groups: bool) -> list[list[int]]:
        """Rows, filled greedily into parts."""
        rows = range(len(self))
        units = (
            [[*own] for _, own in groupby(rows, self.group_of.__getitem__)]
            if whole_groups
            else [[row] for row in rows]
        )
        parts: list[list[int]] = []
        used = 0
        for unit in units:
            group, cost = self.group_of[unit[0]], sum(self.lengths[row] for row in unit)
            prompt = len(self.prompts[group])
            shared = parts and self.group_of[parts[-1][-1]] == group
            if not parts or used + cost + (0 if shared else prompt) > budget:
                parts.append([])
                used, shared = 0, False
            parts[-1] += unit
            used += cost + (0 if shared else prompt)
        return parts

    def select(self, rows: Sequence[int]) -> Batch:
        """The given rows, trimmed to their longest completion. Rewards stay with the whole batch."""
        groups = list(dict.fromkeys(self.group_of[row] for row in rows))
        width = max(self.lengths[row] for row in rows)
        index = torch.tensor(rows, device=self.token_ids.device)

        def pick(value: Tensor | None) -> Tensor | None:
            return None if value is None else value[index][:, :width]

        tensors = {f.name: pick(getattr(self, f.name)) for f in fields(self) if f.name in ROW_TENSORS}
        return replace(
            self,
            prompts=tuple(self.prompts[group] for group in groups),
            group_of=tuple(groups.index(self.group_of[row]) for row in rows),
            lengths=tuple(self.lengths[row] for row in rows),
            sampled=None if self.sampled is None else self.sampled.select(rows, groups, width),
            rewards=None,
            **tensors,  # type: ignore[arg-type]
        )

    def flat(self) -> FlatRow:
        """This batch in model layout."""
        device = self.token_ids.device
        ids: list[Tensor] = []
        positions: list[Tensor] = []
        sources: list[Tensor] = []
        spans: list[Span] = []
        ends: list[int] = []
        kv_lengths = (0,) * len(self.prompts) if self.sampled is None else self.sampled.kv_lengths
        offset = 0
        for group, prompt in enumerate(self.prompts):
            rows = self._rows_of(group)
            spans.append(Span(offset, len(prompt), tuple(self.lengths[r] for r in rows), kv_lengths[group]))
            ids.append(torch.tensor(prompt, device=device))
            positions.append(torch.arange(len(prompt), device=device))
            offset += len(prompt)
            last_of_prompt = offset - 1
            for row in rows:
                length = self.lengths[row]
                ids.append(self.token_ids[row, :length])
                positions.append(torch.arange(len(prompt), len(prompt) + length, device=device))
                predictors = torch.arange(offset - 1, offset - 1 + length, device=device)
                predictors[:1] = last_of_prompt
                sources.append(predictors[self.loss_mask[row, :length]])
                offset += length
                ends.append(offset - 1 if length else last_of_prompt)
        return FlatRow(
            token_ids=torch.cat(ids)[None],
            position_ids=torch.cat(positions)[None],
            spans=tuple(spans),
            source=torch.cat(sources),
            target=self.token_ids[self.loss_mask],
            scored=self.loss_mask,
            ends=torch.tensor(ends, device=device),
        )

    def full_rows(self) -> FullRows:
        """This batch as full padded rows."""
        device = self.token_ids.device
        firsts = torch.tensor([len(self.prompts[group]) for group in self.group_of], device=device)
        lengths = firsts + torch.tensor(self.lengths, device=device)
        rows = [
            torch.cat([torch.tensor(self.prompts[group], device=device), self.token_ids[row, :length]])
            for row, (group, length) in enumerate(zip(self.group_of, self.lengths, strict=True))
        ]
        token_ids = pad_sequence(rows, batch_first=True)
        width = token_ids.shape[1]
        starts = torch.arange(len(self), device=device) * width
        before = (starts + firsts - 1)[:, None] + torch.arange(self.token_ids.shape[1], device=device)
        return FullRows(
            token_ids=token_ids,
            attended=torch.arange(width, device=device) < lengths[:, None],
            source=before[self.loss_mask],
            target=self.token_ids[self.loss_mask],
            scored=self.loss_mask,
            ends=starts + lengths - 1,
        )

    def _rows_of(self, group: int) -> list[int]:
        return [row for row, owner in enumerate(self.group_of) if owner == group]

    def to(self, device: torch.device | str) -> Batch:
        moved = {
            f.name: value.to(device)
            for f in fields(self)
            if isinstance(value := getattr(self, f.name), Tensor)
        }
        sampled = self.sampled and replace(self.sampled, logprobs=self.sampled.logprobs.to(device))
        return replace(self, sampled=sampled, **moved)  # type: ignore[arg-type]


ROW_TENSORS = frozenset({"token_ids", "loss_mask", "old_logprobs", "ref_logprobs", "advantages", "weights"})


def collate(
    groups: Sequence[Group], rewards: Tensor | None = None, *, overlong_filter: bool = False
) -> Batch:
    """Sampled groups in loss layout: every completion token is trained, the stop token included.

    ``overlong_filter``: no token of a completion that did not end by itself is (DAPO, arXiv 2503.14476
    section 3.4). Its row and its reward stay: it counts as a sequence, and in its group's mean and deviation.
    """
    completions = [completion for group in groups for completion in group.completions]
    token_ids, lengths = _pad([c.token_ids for c in completions], torch.long)
    logprobs, _ = _pad([c.logprobs for c in completions], torch.float32)
    ended = [not overlong_filter or c.finish_reason == "stop" for c in completions]
    trained = torch.tensor([length if done else 0 for length, done in zip(lengths, ended, strict=True)])
    loss_mask = torch.arange(token_ids.shape[1]) < trained[:, None]
    return Batch(
        prompts=tuple(group.prompt.token_ids for group in groups),
        group_of=tuple(index for index, group in enumerate(groups) for _ in group.completions),
        lengths=lengths,
        token_ids=token_ids,
        loss_mask=loss_mask,
        sampled=Sampled(
            logprobs=torch.where(loss_mask, logprobs, 0.0),
            kv_lengths=tuple(group.kv_length for group in groups),
            members=tuple(member for group in groups for member in range(len(group.completions))),
            activations=tuple(group.activations for group in groups),
        ),
        rewards=rewards,
    )


def collate_demonstrations(rows: Sequence[tuple[Sequence[int], Sequence[bool]]]) -> Batch:
    """(token_ids, loss_mask) rows, each a group of one: the prompt ends where the first trained token
    begins.
    """
    prompts, completions, masks = [], [], []
    for row, trained in rows:
        first = max(1, list(trained).index(True))  # nothing predicts token 0
        prompts.append(tuple(row[:first]))
        completions.append(tuple(row[first:]))
        masks.append(tuple(trained[first:]))
    token_ids, lengths = _pad(completions, torch.long)
    return Batch(
        prompts=tuple(prompts),
        group_of=tuple(range(len(prompts))),
        lengths=lengths,
        token_ids=token_ids,
        loss_mask=_pad(masks, torch.bool)[0],
    )


def needed(value: Value | None) -> Value:
    """What an earlier step has put in."""
    assert value is not None
    return value


def _pad(rows: Sequence[Sequence[Any]], dtype: torch.dtype) -> tuple[Tensor, tuple[int, ...]]:
    """Right-padded with 0: ``[B, T]`` and the lengths."""
    lengths = tuple(len(row) for row in rows)
    out = torch.zeros(len(rows), max(lengths), dtype=dtype)
    for index, row in enumerate(rows):
        out[index, : len(row)] = torch.tensor(row, dtype=dtype)
    return out, lengths
