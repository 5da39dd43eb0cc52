"""What is read off a backbone's hidden states: the log-probs of tokens, or one number.

Both take states ``[n, h]`` and the places of `razona.batch.FlatRow` or `razona.batch.FullRows` in them, and
so do not know which of the two the backbone ran.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from razona.batch import FlatRow, FullRows
from razona.models.head import Head, Known


class LogProbs:
    """``log p(token t | prompt, tokens < t)`` through the language-model head."""

    def __init__(self, head: Head) -> None:
        self.head = head

    def __call__(
        self,
        hidden: Tensor,
        row: FlatRow | FullRows,
        *,
        temperature: float,
        token_stats: Tensor | None = None,
        known: Known | None = None,
    ) -> Tensor:
        """fp32 ``[B, T]``, 0 where nothing is scored; ``token_stats`` ``[2, B, T]`` and ``known`` as in
        `Head.logprobs`.
        """
        stats = None if token_stats is None else torch.zeros(2, len(row.target), device=hidden.device)
        scored = self.head.logprobs(
            hidden[row.source], row.target, temperature=temperature, token_stats=stats, known=known
        )
        if token_stats is not None and stats is not None:
            token_stats[:, row.scored] = stats
        return torch.zeros(row.scored.shape, device=scored.device).masked_scatter(row.scored, scored)


class Scalar(nn.Module):
    """One number per state, ``score(state)``.

    The head stays in fp32 beside a bf16 backbone: bf16 rounds a score by up to 1/256 of itself, as much as
    the differences that are learned from. Without a ``score`` to start from its weight is 0, as a LoRA's B
    is: values start at 0, rewards equal.
    """

    def __init__(self, width: int, *, score: nn.Linear | None = None) -> None:
        super().__init__()
        if score is None:
            score = nn.Linear(width, 1, bias=False)
            nn.init.zeros_(score.weight)
        self.score = score.float()

    def values(self, hidden: Tensor, row: FlatRow | FullRows) -> Tensor:
        """fp32 ``[B, T]``: the value of the state before completion token t, 0 where nothing is scored."""
        found = self._read(hidden[row.source])
        return torch.zeros(row.scored.shape, device=found.device).masked_scatter(row.scored, found)

    def scores(self, hidden: Tensor, row: FlatRow | FullRows) -> Tensor:
        """fp32 ``[B]``, read at the last token of each sequence, wherever the loss mask ends."""
        return self._read(hidden[row.ends])

    def _read(self, states: Tensor) -> Tensor:
        found: Tensor = self.score(states.float())[:, 0]
        return found
