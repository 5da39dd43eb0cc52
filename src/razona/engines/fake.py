"""An engine without a model, for tests: every token comes from one fixed distribution over a small
vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from razona.engines.sampling import draw, uniforms
from razona.types import Completion, Group, Prompt, Sampling


class FakeEngine:
    """Draws tokens from ``softmax(logits)``, whatever the prompt; a token's text is ``vocabulary[token]``."""

    description = "draws from one fixed distribution, without a model"
    exactness = "there is no trainer to compare with"

    def __init__(
        self,
        vocabulary: Sequence[str],
        *,
        stop_token_ids: Sequence[int],
        logits: Sequence[float] | None = None,
    ) -> None:
        self.vocabulary = tuple(vocabulary)
        self.stop_token_ids = tuple(stop_token_ids)
        self.logits = torch.tensor(logits if logits is not None else [0.0] * len(vocabulary))
        self.version = 0

    def load_weights(self, policy: Any, *, version: int) -> None:
        """There are no weights; the version is remembered."""
        self.version = version

    def close(self) -> None:
        """Nothing is held."""

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, seeds: Sequence[Sequence[int]]
    ) -> list[Group]:
        """As `Engine.generate`."""
        return [
            Group(prompt, tuple(self._complete(seed, sampling) for seed in group_seeds))
            for prompt, group_seeds in zip(prompts, seeds, strict=True)
        ]

    def _complete(self, seed: int, sampling: Sampling) -> Completion:
        uniform = uniforms([seed], sampling.max_completion_length)[0]
        tokens, logprobs, _ = draw(self.logits.expand(len(uniform), -1), uniform, sampling)
        stops = {*self.stop_token_ids, *sampling.stop_token_ids}
        end = next((i for i, token in enumerate(tokens.tolist()) if token in stops), None)
        length = len(tokens) if end is None else end + 1
        token_ids = tokens.tolist()[:length]
        return Completion(
            token_ids=tuple(token_ids),
            logprobs=tuple(logprobs.tolist()[:length]),
            text=" ".join(self.vocabulary[token] for token in token_ids[:end]),
            finish_reason="length" if end is None else "stop",
            policy_version=self.version,
        )

    def logprob(self, token: int) -> float:
        """Log-prob of a token at temperature 1."""
        return math.log(self.logits.softmax(-1)[token].item())
