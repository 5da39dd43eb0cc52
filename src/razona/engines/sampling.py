"""Drawing the next token: shared by every engine, so that the same seed means the same token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from razona.types import Sampling

BLOCK = 256  # tokens of the vocabulary per block of the cumulative distribution


def uniforms(seeds: Sequence[int], count: int) -> Tensor:
    """``[len(seeds), count]`` uniforms in [0, 1): row i depends on seeds[i] alone, whatever the batch or
    device.
    """
    rows = torch.empty(len(seeds), count, dtype=torch.float64)
    generator = torch.Generator()
    for row, seed in zip(rows, seeds, strict=True):
        generator.manual_seed(seed)
        row.uniform_(0.0, 1.0, generator=generator)
    return rows


def draw(logits: Tensor, uniform: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor, Tensor]:
    """Next tokens ``[B]``, their log-probs ``[B]`` and the distribution ``[B, V]`` they are drawn from, given
    fp32 logits ``[B, V]``.

    One uniform per row inverts the cumulative distribution: no random number per vocabulary entry.
    Temperature 0 takes the most likely token and records its log-prob at temperature 1.
    """
    if sampling.temperature not in (0.0, 1.0):
        logits = logits / sampling.temperature
    if sampling.temperature:
        logits = truncate(logits, sampling)
    logprobs = logits.log_softmax(-1)
    probabilities = logprobs.exp()
    greedy = not sampling.temperature
    token = logprobs.argmax(-1) if greedy else _invert(probabilities, uniform.to(logits.device))
    return token, logprobs.gather(1, token[:, None])[:, 0], probabilities


def truncate(logits: Tensor, sampling: Sampling) -> Tensor:
    """-inf for tokens outside top-k, then outside top-p of what is left, then below min-p of the best."""
    if 0 < sampling.top_k < logits.shape[-1]:
        best = logits.topk(sampling.top_k)  # exactly so many, of equal ones too: bf16 logits are often equal
        logits = torch.full_like(logits, -torch.inf).scatter_(1, best.indices, best.values)
    if sampling.top_p < 1.0:
        ordered, order = logits.sort(-1, descending=True)
        probabilities = ordered.softmax(-1)
        beyond = probabilities.cumsum(-1) - probabilities >= sampling.top_p  # mass before this token suffices
        logits = logits.masked_fill(beyond.scatter(1, order, beyond), -torch.inf)
    if sampling.min_p > 0.0:
        probabilities = logits.softmax(-1)
        weak = probabilities < sampling.min_p * probabilities.amax(-1, keepdim=True)
        logits = logits.masked_fill(weak, -torch.inf)
    return logits


def _invert(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """First token whose cumulative probability exceeds the uniform; never one of probability 0.

    In two levels, blocks of the vocabulary and then one block: a running sum over all of it is slow.
    """
    rows, vocabulary = probabilities.shape
    if vocabulary % BLOCK:
        probabilities = F.pad(probabilities, (0, -vocabulary % BLOCK))
    blocks = probabilities.unflatten(1, (-1, BLOCK))
    ends = blocks.sum(-1).double().cumsum(-1)
    threshold = uniform[:, None] * ends[:, -1:]
    block = torch.searchsorted(ends, threshold, right=True).clamp_(max=blocks.shape[1] - 1)
    before = torch.where(block > 0, ends.gather(1, (block - 1).clamp(min=0)), 0.0)
    inside = blocks[torch.arange(rows, device=block.device), block[:, 0]].double().cumsum(-1)
    place = torch.searchsorted(inside, threshold - before, right=True)
    # Rounding may carry the threshold past the block's end: then it is the block's last possible token.
    last = BLOCK - 1 - (inside >= inside[:, -1:]).sum(-1, keepdim=True) + 1
    return (block * BLOCK + place.minimum(last))[:, 0]
