"""Which attention a model runs: razona's own, or for a while transformers'."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from razona.models.multimodal import language_model


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside, the former mode afterwards."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


@contextmanager
def plain_attention(model: Any) -> Iterator[None]:
    """transformers' own attention inside, for what does not bring a layout (`generate`, full rows)."""
    text = language_model(model)
    ours = use_plain_attention(model)
    try:
        yield
    finally:
        if ours:
            text.set_attn_implementation("razona")


def use_plain_attention(model: Any) -> bool:
    """From now on transformers' own attention; whether it had another."""
    text = language_model(model)
    ours: bool = text.config._attn_implementation == "razona"
    if ours:
        text.set_attn_implementation("sdpa" if text._supports_sdpa else "eager")
    return ours
