"""The shared-prefix pass: many groups as one flat row, each prompt computed once for all its completions.

Attention is ours, registered with transformers as ``razona``; the layout travels as a keyword argument and decides who
sees whom: causal within a prompt, and each completion sees its prompt and itself. Everything else in the model is
position-wise, so a flat row needs nothing more. It does not go through a key/value cache, which activation checkpointing
would drop.

**Bit for bit on a CPU.** In bfloat16, stock kernels give a token the same log-prob in this pass as in the decode step
that sampled it, if (1) both attend over key/values padded to the same length with a mask, (2) every attention call has
at least four query rows, (3) every matrix product has at least two rows. `padded_length` is the first part of the deal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, AttentionMaskInterface

from razona.batch import FlatRow, Span

MIN_QUERY_ROWS = 4
KV_BLOCK = 512  # the CPU kernel walks key/values in blocks of this size; whole masked blocks change no bit
KV_STEP = 64


def padded_length(length: int) -> int:
    """The key/value length that sampler and trainer both pad ``length`` tokens to.

    A function of the group alone, so that a completion's bits do not depend on its batch neighbours.
    """
    step = KV_STEP if length <= KV_BLOCK else KV_BLOCK
    return -(-length // step) * step


class Layout(Protocol):
    """Who sees whom. Shapes as transformers passes them: q ``[1 or B, H, N, D]``, k and v with their own head count."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor: ...


class AttentionOptions:
    """What a layer asks of attention: scale, sliding window, soft cap of the scores."""

    __slots__ = ("scaling", "softcap", "window")

    def __init__(self, scaling: float | None, window: int | None, softcap: float | None) -> None:
        self.scaling, self.window, self.softcap = scaling, window, softcap


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: Layout,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface; ``attention_mask`` and dropout are unused, the layout knows."""
    options = AttentionOptions(scaling, sliding_window, softcap)
    return layout.attend(module.layer_idx, query, key, value, options), None  # type: ignore[arg-type]


AttentionInterface.register("razona", attention_forward)
AttentionMaskInterface.register("razona", lambda *args, **kwargs: None)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, options: AttentionOptions) -> Tensor:
    """q ``[B, H, t, D]``, k and v ``[B, KV, S, D]``, additive mask ``[t, S]`` or ``[B, 1, t, S]`` -> ``[B, t, H, D]``."""
    if options.softcap is None:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=options.scaling, enable_gqa=True)
        return out.transpose(1, 2)
    repeats = q.shape[1] // k.shape[1]
    scale = q.shape[-1] ** -0.5 if options.scaling is None else options.scaling
    scores = q @ k.repeat_interleave(repeats, 1).transpose(-1, -2) * scale
    scores = torch.tanh(scores / options.softcap) * options.softcap + mask
    probabilities = scores.softmax(-1, dtype=torch.float32).to(q.dtype)
    return (probabilities @ v.repeat_interleave(repeats, 1)).transpose(1, 2)


def causal_mask(first: int, rows: int, kv_length: int, window: int | None, like: Tensor) -> Tensor:
    """Additive mask ``[rows, kv_length]``: row r stands at position first + r and sees positions <= its own, no
    farther back than ``window``."""
    at = torch.arange(first, first + rows, device=like.device)[:, None]
    seen = torch.arange(kv_length, device=like.device)[None]
    visible = seen <= at
    if window:
        visible &= seen > at - window
    return torch.zeros(visible.shape, dtype=like.dtype, device=like.device).masked_fill_(~visible, -torch.inf)


class FlatLayout:
    """Layout of a `FlatRow`. ``exact`` pads key/values as the sampler did; ``sink(layer, k, v)`` receives the keys and
    values ``[N, KV, D]`` of every layer, which is how an engine prefills."""

    def __init__(
        self, row: FlatRow, *, exact: bool, sink: Callable[[int, Tensor, Tensor], None] | None = None
    ) -> None:
        self.spans = row.spans
        self.exact = exact
        self.sink = sink
        self._masks: dict[tuple[int, int, int, int | None], Tensor] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))  # [N, heads, D]
        if self.sink is not None:
            self.sink(layer, k, v)
        parts = []
        for span in self.spans:
            parts.append(self._prompt(span, q, k, v, options))
            if span.lengths:
                parts.append(self._completions(span, q, k, v, options))
        return torch.cat(parts)[None]

    def _prompt(self, span: Span, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        rows = slice(span.start, span.start + span.prompt_length)
        length = self._kv_length(span, span.prompt_length)
        queries = max(span.prompt_length, MIN_QUERY_ROWS)
        mask = self._mask(0, queries, length, options.window, q)
        out = attention(
            _pad_to(q[None, rows], queries).transpose(1, 2),
            _pad_to(k[None, rows], length).transpose(1, 2),
            _pad_to(v[None, rows], length).transpose(1, 2),
            mask,
            options,
        )
        return out[0, : span.prompt_length]

    def _completions(self, span: Span, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        first = span.start + span.prompt_length
        longest = max(span.lengths)
        length = self._kv_length(span, span.prompt_length + longest)
        queries = max(longest, MIN_QUERY_ROWS)

        def own(x: Tensor) -> Tensor:  # [G, longest, heads, D]
            return pad_sequence(x[first : first + sum(span.lengths)].split(span.lengths), batch_first=True)

        def with_prompt(x: Tensor) -> Tensor:  # [G, length, heads, D]
            prompt = x[None, span.start : first].expand(len(span.lengths), -1, -1, -1)
            return _pad_to(torch.cat([prompt, own(x)], 1), length)

        mask = self._mask(span.prompt_length, queries, length, options.window, q)
        out = attention(
            _pad_to(own(q), queries).transpose(1, 2),
            with_prompt(k).transpose(1, 2),
            with_prompt(v).transpose(1, 2),
            mask,
            options,
        )
        return torch.cat([row[:n] for row, n in zip(out.unbind(0), span.lengths, strict=True)])

    def _kv_length(self, span: Span, needed: int) -> int:
        if not self.exact or not span.kv_length:
            return needed
        # Trailing blocks that nobody of this part sees may go: they change no bit.
        return min(span.kv_length, -(-needed // KV_BLOCK) * KV_BLOCK)

    def _mask(self, first: int, rows: int, length: int, window: int | None, like: Tensor) -> Tensor:
        key = (first, rows, length, window)
        if key not in self._masks:
            self._masks[key] = causal_mask(first, rows, length, window, like)
        return self._masks[key]


def _pad_to(x: Tensor, length: int) -> Tensor:
    """Zeros after dimension 1 of ``[B, t, heads, D]``."""
    missing = length - x.shape[1]
    return x if missing <= 0 else F.pad(x, (0, 0, 0, 0, 0, missing))
