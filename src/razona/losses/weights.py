"""Token weights: how token losses become one number. Counts are global; None means this tensor's own.

Each returns ``[B, T]`` weights that are 0 where ``loss_mask`` is, to be used as ``masked_sum(token_loss,
weights)``. Padding never enters a count. Rows without a trained token weigh nothing, but still count as
sequences.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

WeightFn = Callable[..., Tensor]


def per_token(loss_mask: Tensor, *, num_tokens: int | None = None) -> Tensor:
    """1 / (trained tokens of the batch): every token weighs the same (DAPO, arXiv 2503.14476 eq. 8)."""
    total = loss_mask.sum() if num_tokens is None else num_tokens
    return loss_mask.float() / _at_least_one(total)


def per_sequence(loss_mask: Tensor, *, num_sequences: int | None = None) -> Tensor:
    """1 / (B * trained tokens of the row): every sequence weighs the same (GRPO, arXiv 2402.03300 eq. 3)."""
    lengths = loss_mask.sum(1, keepdim=True).clamp(min=1)
    return loss_mask.float() / lengths / _num_sequences(loss_mask, num_sequences)


def sequence_sum(loss_mask: Tensor, *, num_sequences: int | None = None) -> Tensor:
    """1 / B: a sequence weighs as many tokens as it has (the shape of R1's eq. 1, arXiv 2501.12948)."""
    return loss_mask.float() / _num_sequences(loss_mask, num_sequences)


def fixed_length(loss_mask: Tensor, *, max_tokens: int, num_sequences: int | None = None) -> Tensor:
    """1 / (B * max_tokens), a constant length for all (Dr. GRPO, arXiv 2503.20783).

    ``max_tokens`` is the generation budget, not the padded width, which would let padding change the loss.
    """
    return loss_mask.float() / (_num_sequences(loss_mask, num_sequences) * max_tokens)


def masked_sum(values: Tensor, weights: Tensor) -> Tensor:
    """Sum of values * weights where the weight is not 0: a scalar, safe when values are nan or inf
    elsewhere.
    """
    live = weights != 0
    return (torch.where(live, values, 0.0) * weights).sum()


def _num_sequences(loss_mask: Tensor, num_sequences: int | None) -> int:
    return max(1, loss_mask.shape[0] if num_sequences is None else num_sequences)


def _at_least_one(count: Tensor | int) -> Tensor | int:
    return count.clamp(min=1) if isinstance(count, Tensor) else max(1, count)
