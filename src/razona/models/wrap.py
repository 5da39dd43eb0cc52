"""From a model to the fastest scorer that is right for it, found out by trying it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from razona.batch import Batch
from razona.models.attention import eval_mode, plain_attention
from razona.models.multimodal import language_model
from razona.models.quant import made_ready
from razona.models.scorer import FlatScorer, FullRowScorer, Scorer


def wrap(model: Any) -> Scorer:
    """The fastest scorer that is right for this model: flat if a flat row of two completions agrees with full
    rows. Best asked while the model is in fp32, where agreement is sharp.
    """
    made_ready(type(model).__name__, model)
    full = FullRowScorer(model)
    text = language_model(model)
    if not getattr(text, "_supports_attention_backend", False):
        return full
    flat = FlatScorer(model)
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.arange(3, 27).remainder(vocabulary).reshape(2, 12).to(model.device)
    ids[:, 0] = ids[0, 0]
    probe = Batch(
        prompts=((1, 2, 3, 4, 5, 6),),
        group_of=(0, 0),
        lengths=(12, 12),
        token_ids=ids,
        loss_mask=torch.ones_like(ids, dtype=torch.bool),
    )
    changed = ids.clone()
    changed[0] = ids[0].flip(0)
    neighbour_changed = replace(probe, token_ids=changed)
    original = text.config._attn_implementation
    with torch.no_grad(), eval_mode(model):
        with plain_attention(model):
            expected = full(probe)
        text.set_attn_implementation("razona")
        try:
            found, other = flat(probe), flat(neighbour_changed)
        except (TypeError, AttributeError, RuntimeError, ValueError):  # not our kind of model
            found = other = torch.full_like(expected, torch.nan)
    spread = expected.std().clamp(min=1e-3)
    difference = (found - expected).abs()
    if flat.head.projection.weight.dtype == torch.float32:
        # The largest difference, not the mean: a short convolution goes wrong on the first tokens alone.
        agrees = difference.max() < 2e-2 * spread
    else:  # single tokens of a trained model may differ by nats in bf16, and that means nothing
        agrees = difference.mean() < 0.3 * spread
    leaks = (found[1] - other[1]).abs().max() > 1e-2 * spread  # into a completion, from the one before it
    if agrees and not leaks:
        return flat
    text.set_attn_implementation(original)
    return full
