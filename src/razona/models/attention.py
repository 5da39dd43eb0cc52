"""Which attention a model runs: razona's own, or for a while transformers'."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
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


def use_layout_attention(model: Any, undo: ExitStack) -> None:
    """razona's own attention (`razona.models.flat`), and with ``undo`` the former one."""
    text = language_model(model)
    former = text.config._attn_implementation
    undo.callback(text.set_attn_implementation, _plain(text) if former == "razona" else former)
    text.set_attn_implementation("razona")


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
        text.set_attn_implementation(_plain(text))
    return ours


def _plain(text: Any) -> str:
    return "sdpa" if text._supports_sdpa else "eager"
