"""Whether a sampler's log-probs are the trainer's, measured on the machine at hand when a run starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from razona.batch import collate
from razona.types import Engine, Prompt, Sampling

LENGTHS = (5, 23)  # of the prompts
TOKENS = 8  # of each completion
SMALL = 300e6  # parameters up to which groups are large
GROUP = 18  # completions of a prompt: more than 32 rows decoded together
LITTLE_GROUP = 2  # the same, of a large model


@dataclass(frozen=True)
class Exactness:
    """Log-probs that an engine recorded beside those of the pass with gradient, on ``tokens`` tokens."""

    share: float
    """Of the tokens, that which agrees bit for bit."""
    max_abs: float
    """The largest difference, in nats."""
    tokens: int
    reused: bool
    """Whether training takes the sampler's own forward pass, where there is one update per rollout."""

    @property
    def holds(self) -> bool:
        return self.share == 1.0

    def __str__(self) -> str:
        measured = f"measured here on {self.tokens} tokens"
        if self.holds:
            return f"the sampler's log-probs are the trainer's bit for bit ({measured})"
        found = (
            f"the sampler's log-probs are not the trainer's bit for bit here: {self.share:.0%} are, the rest "
            f"differ by {self.max_abs:.2g} nats at most ({measured})"
        )
        if self.reused:
            found += "; training takes the sampler's own forward pass, so the ratio is 1 all the same"
        return found


def measure(engine: Engine, policy: Any) -> Exactness:
    """``engine`` samples a few random prompts, ``policy`` scores what it sampled. Changes no state: sampling
    draws from seeds of its own, and nothing is kept or updated."""
    config = policy.model.config.get_text_config()
    size = sum(p.numel() for p in policy.model.parameters())
    group = GROUP if size <= SMALL else LITTLE_GROUP
    ids = [tuple(range(3, 3 + length)) for length in LENGTHS]
    prompts = [
        Prompt(id=-1 - i, input="", token_ids=tuple(t % config.vocab_size for t in tokens), columns={})
        for i, tokens in enumerate(ids)
    ]
    sampling = Sampling(group_size=group, max_completion_length=TOKENS)
    seeds = [[1000 * p + g for g in range(group)] for p in range(len(prompts))]
    batch = collate(engine.generate(prompts, sampling, seeds=seeds)).to(policy.device)
    with torch.enable_grad():
        found = policy.logprobs(batch, temperature=1.0).detach()
    difference = (found - batch.sampler_logprobs).abs()[batch.loss_mask]
    return Exactness(
        share=float((difference == 0).float().mean()),
        max_abs=float(difference.max()),
        tokens=batch.num_tokens,
        reused=policy.reuses_activations,
    )
