"""Does the shared-prefix row compute what plain full rows do? Asked of a few tokens, before training.

Two completions of one prompt are scored in plain full rows and in the flat row: log-probs, the gradient of
the embeddings, and token by token as sampling does. Sliding windows are made small meanwhile, so that a few
tokens reach beyond them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from razona.batch import Batch
from razona.errors import ModelError
from razona.models.attention import plain_attention
from razona.models.flat import AttentionOptions, FlatLayout, attention, causal_mask
from razona.models.multimodal import language_model
from razona.models.scorer import FlatScorer, FullRowScorer

PROMPT, LENGTH = 6, 12  # tokens
WINDOW = 4
WINDOWS = ("sliding_window", "attention_chunk_size")
STEPS = 2  # tokens fed one at a time


@dataclass(frozen=True)
class Expected:
    """What plain full rows give."""

    batch: Batch
    logprobs: Tensor  # [2, LENGTH]
    slopes: Tensor  # [PROMPT + 2 * LENGTH, h] gradient of the embeddings, in the order of the flat row


@contextmanager
def small_windows(model: Any) -> Iterator[None]:
    """Sliding windows of `WINDOW` tokens inside, in the config and wherever modules keep them."""
    text = language_model(model)
    changed: list[tuple[Any, str, int]] = []
    for owner in (text.config, *text.modules()):
        for name in WINDOWS:
            value = vars(owner).get(name)
            if isinstance(value, int) and value > WINDOW:
                changed.append((owner, name, value))
                setattr(owner, name, WINDOW)
    try:
        yield
    finally:
        for owner, name, value in changed:
            setattr(owner, name, value)


def full_rows(model: Any, full: FullRowScorer) -> Expected:
    """Raises ModelError for a model that scores the same rows otherwise each time."""
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.arange(3, 3 + 2 * LENGTH).remainder(vocabulary).reshape(2, LENGTH).to(model.device)
    ids[:, 0] = ids[0, 0]
    batch = Batch(
        prompts=(tuple(i % vocabulary for i in range(1, 1 + PROMPT)),),
        group_of=(0, 0),
        lengths=(LENGTH, LENGTH),
        token_ids=ids,
        loss_mask=torch.ones_like(ids, dtype=torch.bool),
    )
    with plain_attention(model), _training(model):
        logprobs, slopes = _with_slopes(model, lambda: full(batch))
        with torch.no_grad():
            apart = (full(batch) - logprobs).abs().max()
    if apart > 1e-2 * _spread(logprobs):
        raise ModelError(
            f"{type(model).__name__} gives the same tokens other log-probs each time in training mode (up "
            f"to {apart.item():.2g} apart): it draws random numbers. Set dropout, jitter and other noise to "
            "0 in its config before loading it."
        )
    slopes = torch.cat([slopes[:, :PROMPT].sum(0), slopes[:, PROMPT:].flatten(0, 1)])
    return Expected(batch, logprobs, slopes)


def disagreement(flat: FlatScorer, expected: Expected) -> str:
    """In what ``flat`` differs from full rows, in words; empty if in nothing."""
    model, batch, wanted = flat.model, expected.batch, expected.logprobs
    in_fp32 = flat.head.projection.weight.dtype == torch.float32
    changed = batch.token_ids.clone()
    changed[0] = changed[0].flip(0)
    with _training(model):
        found, slopes = _with_slopes(model, lambda: flat(batch))
        with torch.no_grad():
            plain, other = flat(batch), flat(replace(batch, token_ids=changed))
            stepwise = _step_by_step(flat, batch)
    spread = _spread(wanted)

    def differs(one: Tensor, two: Tensor) -> bool:
        # The largest difference, not the mean: a short convolution goes wrong on the first tokens alone. In
        # bf16 single tokens of a trained model may differ by nats, and that means nothing.
        difference = (one - two).abs()
        return not (difference.max() < 2e-2 * spread if in_fp32 else difference.mean() < 0.3 * spread)

    for name, one in (("with gradient", found), ("without gradient", plain)):
        if differs(one, wanted):
            return f"its log-probs ({name}) differ by up to {(one - wanted).abs().max().item():.2g}"
    if not (plain[1] - other[1]).abs().max() <= 1e-2 * spread:
        return "a completion moved the one beside it"
    # With the row itself, which has been compared with full rows: two tokens are few to average over in bf16.
    if differs(stepwise, plain[0, :STEPS]):
        apart = (stepwise - plain[0, :STEPS]).abs().max().item()
        return f"token by token its log-probs differ by up to {apart:.2g}"
    error = (slopes[0].float() - expected.slopes.float()).norm() / expected.slopes.float().norm()
    # In bf16 the gradient for a trained model's embeddings is mostly rounding, on tokens that make no sense.
    if not (error < 2e-2 if in_fp32 else error.isfinite()):
        return f"its gradient differs by {error.item():.0%}"
    return ""


def _spread(logprobs: Tensor) -> Tensor:
    return logprobs.std().clamp(min=1e-3)


@contextmanager
def _training(model: Any) -> Iterator[None]:
    """Training mode inside, in which the model will run; the former mode afterwards."""
    former = model.training
    model.train()
    try:
        yield
    finally:
        model.train(former)


def _with_slopes(model: Any, score: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
    """Log-probs ``[2, LENGTH]``, and the gradient of their weighted sum for the embeddings."""
    leaves: list[Tensor] = []

    def leaf(module: Any, inputs: Any, out: Tensor) -> Tensor:
        leaves.append(out.detach().requires_grad_())
        return leaves[-1]

    hook = language_model(model).get_input_embeddings().register_forward_hook(leaf)
    try:
        with torch.enable_grad():
            logprobs = score()
            weights = torch.linspace(-1, 1, logprobs.numel(), device=logprobs.device)
            (slopes,) = torch.autograd.grad((logprobs.flatten() * weights).sum(), leaves)
    finally:
        hook.remove()
    return logprobs.detach(), slopes


def _step_by_step(flat: FlatScorer, batch: Batch) -> Tensor:
    """Log-probs ``[STEPS]`` of the first completion's first tokens, fed one at a time as an engine does."""
    device, targets = batch.token_ids.device, batch.token_ids[0, :STEPS]
    row = batch.select([0]).flat()
    prompt = replace(
        row,
        token_ids=row.token_ids[:, :PROMPT],
        position_ids=row.position_ids[:, :PROMPT],
        spans=(replace(row.spans[0], lengths=()),),
    )
    layout = _Steps()
    prefill = FlatLayout(prompt, exact=flat.exact, sink=layout.keep)
    hidden = [flat.hidden(prompt.token_ids, prompt.position_ids, prefill)[-1:]]
    for step in range(STEPS - 1):
        position = torch.tensor([[PROMPT + step]], device=device)
        hidden.append(flat.hidden(targets[None, step : step + 1], position, layout))
    return flat.head.logprobs(torch.cat(hidden), targets, temperature=1.0)


class _Steps:
    """Layout of one token that sees all those before it."""

    def __init__(self) -> None:
        self.seen: dict[int, tuple[Tensor, Tensor]] = {}  # keys and values [S, KV, D] of each layer

    def keep(self, layer: int, k: Tensor, v: Tensor) -> None:
        if layer in self.seen:
            keys, values = self.seen[layer]
            k, v = torch.cat([keys, k]), torch.cat([values, v])
        self.seen[layer] = k, v

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        self.keep(layer, k[0].transpose(0, 1), v[0].transpose(0, 1))
        keys, values = (x.transpose(0, 1)[None] for x in self.seen[layer])
        mask = causal_mask(keys.shape[2] - 1, 1, keys.shape[2], options.window, q)
        return attention(q, keys, values, mask, options)

    def attend_tokens(self, layer: int, q: Tensor, kv: Tensor, options: AttentionOptions) -> Tensor:
        k, v = (x.transpose(0, 1)[None] for x in kv.chunk(2, 1))
        return self.attend(layer, q.transpose(0, 1)[None], k, v, options)[0]
