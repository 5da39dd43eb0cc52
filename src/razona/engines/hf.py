"""The reference engine: transformers' own `generate`. Slow, for every model that generate runs, and the
yardstick of the native one.

A logits processor draws the token with the shared sampler and leaves generate nothing but to take it: the
same seeds mean the same tokens in every engine (as far as the logits agree).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor

from razona.engines.sampling import draw, uniforms
from razona.models.attention import eval_mode, plain_attention
from razona.types import Completion, Group, Prompt, Sampling


class HFEngine:
    """Samples with a `Policy`'s model through ``model.generate``, one prompt at a time."""

    description = "transformers' generate on the trained model, one prompt at a time"
    exactness = "its log-probs differ from the trainer's by rounding, measured at every step (mismatch/...)"

    def __init__(self, policy: Any, *, stop_token_ids: Sequence[int]) -> None:
        self.stop_token_ids = tuple(stop_token_ids)
        self.load_weights(policy, version=0)

    def load_weights(self, policy: Any, *, version: int) -> None:
        """Takes the policy's model itself."""
        self.model, self.tokenizer, self.version = policy.model, policy.tokenizer, version

    def close(self) -> None:
        """Nothing is held between calls."""

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, seeds: Sequence[Sequence[int]]
    ) -> list[Group]:
        """As `Engine.generate`."""
        stops = sorted({*self.stop_token_ids, *sampling.stop_token_ids})
        with eval_mode(self.model), plain_attention(self.model):
            return [
                Group(prompt, self._complete(prompt, sampling, group_seeds, stops))
                for prompt, group_seeds in zip(prompts, seeds, strict=True)
            ]

    def _complete(
        self, prompt: Prompt, sampling: Sampling, seeds: Sequence[int], stops: list[int]
    ) -> tuple[Completion, ...]:
        drawing = _Draw(sampling, seeds, self.model.device)
        ids = torch.tensor(prompt.token_ids, device=self.model.device).expand(len(seeds), -1)
        self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=sampling.max_completion_length,
            min_new_tokens=None,
            do_sample=False,
            num_beams=1,
            repetition_penalty=1.0,
            logits_processor=[drawing],
            eos_token_id=stops or None,
            pad_token_id=stops[0] if stops else 0,
        )
        tokens, logprobs = torch.stack(drawing.tokens, 1).tolist(), torch.stack(drawing.logprobs, 1).tolist()
        return tuple(
            self._completion(row, scores, frozenset(stops))
            for row, scores in zip(tokens, logprobs, strict=True)
        )

    def _completion(self, tokens: list[int], logprobs: list[float], stops: frozenset[int]) -> Completion:
        end = next((index for index, token in enumerate(tokens) if token in stops), None)
        length = len(tokens) if end is None else end + 1
        return Completion(
            token_ids=tuple(tokens[:length]),
            logprobs=tuple(logprobs[:length]),
            text=self.tokenizer.decode(tokens[:end], skip_special_tokens=True),
            finish_reason="length" if end is None else "stop",
            policy_version=self.version,
        )


class _Draw(LogitsProcessor):  # type: ignore[misc]
    """Draws the next token of every row and makes it the only possible one."""

    def __init__(self, sampling: Sampling, seeds: Sequence[int], device: torch.device) -> None:
        self.sampling = sampling
        self.uniforms = uniforms(seeds, sampling.max_completion_length).to(device)
        self.tokens: list[Tensor] = []
        self.logprobs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        token, logprob, _ = draw(scores.float(), self.uniforms[:, len(self.tokens)], self.sampling)
        self.tokens.append(token)
        self.logprobs.append(logprob)
        return torch.full_like(scores, -torch.inf).scatter(1, token[:, None], 0.0)
