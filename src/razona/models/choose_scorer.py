"""From a model to the fastest scorer that is right for it, found out by trying it (`razona.models.probe`)."""

from __future__ import annotations

from typing import Any

from torch import nn

from razona.errors import ModelError
from razona.models import probe
from razona.models.multimodal import language_model
from razona.models.quant import made_ready
from razona.models.scorer import FlatScorer, FullRowScorer, Scorer

TESTED = frozenset(
    {"llama", "qwen2", "qwen3", "gemma2", "gemma3", "gemma3_text", "mistral", "gpt2", "gpt_neox", "opt"}
)
NOISE = ("jitter_noise", "moe_jitter_eps")  # of mixture-of-experts routers in training mode


def choose_scorer(model: Any, *, kernels: str = "auto") -> Scorer:
    """The fastest scorer that is right for this model: flat if it agrees with full rows. Best asked while the
    model is in fp32, where agreement is sharp. Its `release` gives the model back.

    ``kernels``: "auto" or "plain", as in `ModelConfig`. Raises ModelError where a tested architecture fails
    in the flat row, and for a model that scores the same rows otherwise each time.
    """
    made_ready(type(model).__name__, model)
    quiet = [module for module in model.modules() for name in NOISE if getattr(module, name, None)]
    full = FullRowScorer(model)
    for module in quiet:
        _switch_off(module, full)
    try:
        scorer = _flat_or_full(model, full, kernels)
    except BaseException:
        full.release()
        raise
    if scorer is not full:  # what was switched off stays so until the flat scorer is released
        scorer.on_release(full.release)
    if quiet:
        scorer.notices.append(
            f"{type(model).__name__}: {len(quiet)} routers add noise in training mode; it is switched off, "
            "since the same tokens must have the same log-probs twice."
        )
    return scorer


def _flat_or_full(model: Any, full: FullRowScorer, kernels: str) -> Scorer:
    text = language_model(model)
    if not getattr(text, "_supports_attention_backend", False):
        full.why = "its layers do not call attention through transformers' interface"
        return full
    tested = type(text).__module__.startswith("transformers.models.") and text.config.model_type in TESTED
    with probe.small_windows(model):
        expected = probe.full_rows(model, full)
        flat = None
        try:
            flat = FlatScorer(model, kernels=kernels)
            why = probe.disagreement(flat, expected)
        except Exception as error:
            if flat is not None:
                flat.release()
            if tested:
                raise ModelError(
                    f"{type(model).__name__} fails in the shared-prefix row, where its architecture is known "
                    f"to run: {type(error).__name__}: {error}. If the model was changed after loading, hand "
                    "in an unchanged one; with model.kernels = 'plain' none of its modules is replaced."
                ) from error
            full.why = f"the shared-prefix row was tried and failed with {type(error).__name__}: {error}"
            return full
    if why:
        flat.release()
        full.why = f"the shared-prefix row was tried and {why}"
        return full
    return flat


def _switch_off(module: nn.Module, scorer: FullRowScorer) -> None:
    for name in NOISE:
        former = getattr(module, name, None)
        if former:
            scorer.on_release(setattr, module, name, former)
            setattr(module, name, type(former)(0))
