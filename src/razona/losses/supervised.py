"""Supervised losses, per token: ``[B, T]``."""

from __future__ import annotations

import torch
from torch import Tensor


def negative_log_likelihood(logprobs: Tensor, loss_mask: Tensor) -> Tensor:
    """``-log p(token)`` where ``loss_mask`` is True, exactly 0 elsewhere."""
    return torch.where(loss_mask, -logprobs, 0.0)
