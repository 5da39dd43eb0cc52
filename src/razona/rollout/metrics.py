"""What a step measured, under the names the field uses. docs/run-folder.md lists them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from razona.advantages import total_rewards, zero_std_groups
from razona.batch import Batch, needed
from razona.losses.importance import uncorrected
from razona.losses.kl import kl_k1, kl_k3
from razona.losses.policy import clip_fractions
from razona.objective import Objective
from razona.policy import Policy
from razona.rewards import BoundReward
from razona.types import Group


def rollout_metrics(
    groups: Sequence[Group], rewards: Tensor, bound: Sequence[BoundReward]
) -> dict[str, float]:
    """Of what was sampled. ``rewards`` ``[P, G, R]``.

    ``frac_zero_std`` is the share of groups that teach nothing, ``reward_std`` the mean deviation within
    groups, ``entropy`` the mean of -log p over sampled tokens (an estimate, in nats).
    """
    totals = total_rewards(rewards, tuple(b.weight for b in bound))
    completions = [c for group in groups for c in group.completions]
    lengths = torch.tensor([len(c.token_ids) for c in completions], dtype=torch.float64)
    texts = [{c.token_ids for c in group.completions} for group in groups]
    metrics = {
        "reward": _mean(totals),
        "reward_std": _mean(_within_std(totals)),
        "frac_zero_std": zero_std_groups(totals).double().mean().item(),
    }
    for index, reward in enumerate(bound):
        values = rewards[..., index]
        metrics[f"reward/{reward.name}"] = _mean(values)
        metrics[f"reward/{reward.name}/std"] = _mean(_within_std(values))
        abstained = values.isnan().double().mean().item()
        if abstained:
            metrics[f"reward/{reward.name}/abstained"] = abstained
    metrics |= {
        "completion_length": lengths.mean().item(),
        "completion_length/min": lengths.min().item(),
        "completion_length/max": lengths.max().item(),
        "truncated": sum(c.finish_reason == "length" for c in completions) / len(completions),
        "unique": sum(len(t) for t in texts) / len(completions),
        "entropy": -sum(sum(c.logprobs) for c in completions) / lengths.sum().item(),
        "tokens": lengths.sum().item(),
        "prompt_tokens": float(sum(len(g.prompt.token_ids) * len(g.completions) for g in groups)),
    }
    return metrics


class UpdateMeter:
    """Sums over the micro-batches of a step what the updates saw; token means at the end."""

    def __init__(self, objective: Objective) -> None:
        self.objective = objective
        self.loss = 0.0
        self.grad_norms: list[float] = []
        self.sums: dict[str, tuple[float, int]] = {}  # and over how many tokens
        self.tokens = 0
        self.extremes: dict[str, float] = {}

    @torch.no_grad()
    def add(self, micro: Batch, logprobs: Tensor, old: Tensor, loss: Tensor) -> None:
        """One micro-batch: the log-probs it was trained with, the old ones, its part of the loss.

        ``old`` are the trainer's log-probs under the weights that sampled, so against the sampler's own they
        measure the mismatch of the two passes.
        """
        mask = micro.loss_mask
        self.loss += loss.item()
        self.tokens += micro.num_tokens
        if not mask.any():  # every completion filtered
            return
        if not micro.reuses_activations:
            self._mismatch(old, micro.sampler_logprobs, mask)
        rho = self.objective.ratio_fn(logprobs, old, mask)
        if self.objective.clip is not None:
            low, high = self.objective.clip
            below, above = clip_fractions(rho, needed(micro.advantages), mask, clip_low=low, clip_high=high)
            self._sum("clip/low", below.sum(), mask)
            self._sum("clip/high", above.sum(), mask)
        self._sum("ratio", rho[mask].sum(), mask)
        self._most("ratio/max", rho[mask].max())
        if micro.ref_logprobs is not None:
            self._sum("kl", torch.where(mask, kl_k3(logprobs, micro.ref_logprobs, mask), 0.0).sum(), mask)
            self._sum("kl/k1", torch.where(mask, kl_k1(logprobs, micro.ref_logprobs, mask), 0.0).sum(), mask)

    @torch.no_grad()
    def watch(self, policy: Policy, rollout: Batch, *, step: int, temperature: float) -> None:
        """Where training passes take what the sampler computed, the mismatch is that of one completion a
        step, computed anew."""
        activations = needed(rollout.sampled).activations
        saved = [activations[group] is not None and activations[group].is_valid for group in rollout.group_of]
        rows = (rollout.loss_mask.any(1) & torch.tensor(saved)).nonzero()[:, 0].tolist()
        if rows:
            one = rollout.select([rows[step % len(rows)]])
            trainer_logprobs = policy.logprobs(one, temperature=temperature)
            self._mismatch(trainer_logprobs, one.sampler_logprobs, one.loss_mask)

    def _mismatch(self, trainer_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor) -> None:
        """The trainer's log-probs against the sampler's, and the weights that correct, if there are any."""
        difference = (trainer_logprobs - sampler_logprobs)[mask].abs()
        self._sum("mismatch/exact_share", (difference == 0).sum(), mask)
        self._sum("mismatch/mean_abs", difference.sum(), mask)
        self._most("mismatch/max_abs", difference.max())
        kl = kl_k3(sampler_logprobs, trainer_logprobs, mask)
        self._sum("mismatch/kl", torch.where(mask, kl, 0.0).sum(), mask)
        if self.objective.importance_fn is uncorrected:
            return
        weight = self.objective.importance_fn(trainer_logprobs, sampler_logprobs, mask)[mask]
        self._sum("importance", weight.sum(), mask)
        self._most("importance/max", weight.max())
        self._least("importance/min", weight.min())
        self._sum("importance/masked", (weight == 0).sum(), mask)
        if self.objective.importance_bounds is not None:
            low, high = self.objective.importance_bounds
            truncated = (weight > 0) & ((weight <= low) | (weight >= high))
            self._sum("importance/truncated", truncated.sum(), mask)

    def updated(self, grad_norm: float) -> None:
        """After an optimizer update, its gradient norm before clipping."""
        self.grad_norms.append(grad_norm)

    def metrics(self) -> dict[str, float]:
        means = {name: total / tokens for name, (total, tokens) in self.sums.items()}
        updates = max(1, len(self.grad_norms))
        return {
            "loss": self.loss / updates,
            "grad_norm": sum(self.grad_norms) / updates,
            "trained_tokens": float(self.tokens),
            **means,
            **self.extremes,
        }

    def _sum(self, name: str, value: Tensor, mask: Tensor) -> None:
        """Adds ``value``, summed over the tokens of ``mask``."""
        total, tokens = self.sums.get(name, (0.0, 0))
        self.sums[name] = (total + float(value), tokens + int(mask.sum()))

    def _most(self, name: str, value: Tensor) -> None:
        self.extremes[name] = max(self.extremes.get(name, -math.inf), float(value))

    def _least(self, name: str, value: Tensor) -> None:
        self.extremes[name] = min(self.extremes.get(name, math.inf), float(value))


def completion_means(values: Tensor, lengths: Sequence[int]) -> Tensor:
    """The mean of ``values`` ``[B, 1]`` or ``[B, T]`` over the ``lengths[b]`` tokens of each completion:
    ``[B]``.
    """
    rows = zip(values.double().cpu(), lengths, strict=True)
    return torch.stack([row[:length].mean() for row, length in rows])


def mean_and_error(per_prompt: Tensor) -> tuple[float, float]:
    """Mean over prompts and its standard error (sample deviation / sqrt(n)); nan values are left out."""
    values = per_prompt[~per_prompt.isnan()]
    if not len(values):
        return math.nan, math.nan
    error = values.std().item() / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return values.mean().item(), error


def ratio_and_error(totals: Tensor, counts: Tensor) -> tuple[float, float]:
    """``sum(totals) / sum(counts)`` over rows and its standard error, rows being what was drawn (the
    linearised ratio estimator: Cochran, Sampling Techniques, 6.4). A mean over the tokens of all rows.
    """
    rows, ratio = len(totals), totals.sum() / counts.sum()
    spread = (totals - ratio * counts).square().sum()
    error = (rows / (rows - 1) * spread).sqrt() / counts.sum() if rows > 1 else torch.tensor(math.nan)
    return ratio.item(), error.item()


def _mean(values: Tensor) -> float:
    return values.nanmean().item()


def _within_std(values: Tensor) -> Tensor:
    """Population deviation within each group ``[P, G] -> [P]``, abstentions left out."""
    centred = values - values.nanmean(1, keepdim=True)
    return centred.square().nanmean(1).sqrt()
