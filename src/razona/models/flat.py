"""The shared-prefix pass: many groups as one flat row, each prompt computed once for all its completions.

Attention is ours, registered with transformers as ``razona``; the layout travels as a keyword argument and
decides who sees whom: causal within a prompt, and each completion sees its prompt and itself. Everything else
in the model is position-wise, so a flat row needs nothing more. It does not go through a key/value cache,
which activation checkpointing would drop.

**Bit for bit on a CPU.** In bfloat16, stock kernels give a token the same log-prob in this pass as in the
decode step that sampled it, if (1) both attend over key/values padded to the same length with a mask, (2)
every attention call has a multiple of four query rows (the kernel walks them in blocks, and a last block of
fewer has other bits), (3) every matrix product has at least two rows, and as many as
`razona.models.cpu.processor` allows. `padded_length` is the first part of the deal. Whether it holds on the
machine at hand is measured when a run starts (`razona.engines.exactness`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, AttentionMaskInterface

from razona.batch import FlatRow, Span
from razona.models.cpu.processor import kv_step

MIN_QUERY_ROWS = 4
KV_BLOCK = 512  # the CPU kernel walks key/values in blocks of this size
KV_STEP = 64
QUERY_STEP = 64  # query rows at a time in the backward pass: later ones see more keys, earlier ones fewer
BLOCK_BYTES = 4 * 2**20  # of attention scores worked on at a time in the backward pass: the processor's cache


def padded_length(length: int) -> int:
    """The key/value length that sampler and trainer both pad ``length`` tokens to.

    A function of the group alone, so that a completion's bits do not depend on its batch neighbours.
    """
    step = KV_STEP if length <= KV_BLOCK else KV_BLOCK
    return -(-length // step) * step


def sufficient_length(kv_length: int, needed: int) -> int:
    """The least key/value length that gives ``needed`` tokens the bits they have at ``kv_length``.

    Masked keys change no bit as long as the rest is summed in the same blocks. The CPU kernel goes in blocks
    of 512, and its matrix product divides such a block by its size: not up to 192, alike from 384 to 512.
    """
    if kv_length > KV_BLOCK:
        least, step = KV_BLOCK, KV_BLOCK
    elif kv_length <= 192:
        least, step = kv_step(), kv_step()
    else:
        least, step = min(384, kv_length), kv_step()
    return min(kv_length, max(least, -(-needed // step) * step))


class Layout(Protocol):
    """Who sees whom. Shapes as transformers passes them: q ``[1 or B, H, N, D]``, k and v with their own head
    count.
    """

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
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface; ``attention_mask`` and dropout are unused, the layout knows."""
    if s_aux is not None:
        raise ValueError("attention sinks (s_aux) have no place in a flat row; such a model runs full rows")
    options = AttentionOptions(scaling, sliding_window, softcap)
    return layout.attend(module.layer_idx, query, key, value, options), None  # type: ignore[arg-type]


AttentionInterface.register("razona", attention_forward)
AttentionMaskInterface.register("razona", lambda *args, **kwargs: None)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, options: AttentionOptions) -> Tensor:
    """q ``[B, H, t, D]``, k and v ``[B, KV, S, D]``, additive mask ``[t, S]`` or ``[B, 1, t, S]`` -> ``[B, t,
    H, D]``.
    """
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
    """Additive mask ``[rows, kv_length]``: row r stands at position first + r and sees positions <= its own,
    no farther back than ``window``."""
    at = torch.arange(first, first + rows, device=like.device)[:, None]
    seen = torch.arange(kv_length, device=like.device)[None]
    visible = seen <= at
    if window:
        visible &= seen > at - window
    return torch.zeros(visible.shape, dtype=like.dtype, device=like.device).masked_fill_(~visible, -torch.inf)


class FlatLayout:
    """Layout of a `FlatRow`. ``exact`` pads key/values as the sampler did; ``sink(layer, k, v)`` receives the
    keys and values ``[N, KV, D]`` of every layer, which is how an engine prefills."""

    def __init__(
        self, row: FlatRow, *, exact: bool, sink: Callable[[int, Tensor, Tensor], None] | None = None
    ) -> None:
        self.parts = [part for span in row.spans for part in _parts(span, exact=exact)]
        self.sink = sink
        self._masks: dict[tuple[object, ...], Tensor] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))  # [N, heads, D]
        if self.sink is not None:
            self.sink(layer, k, v)
        result: Tensor = _TreeAttention.apply(q, k, v, self, options)  # type: ignore[no-untyped-call]
        return result[None]

    def attend_tokens(self, layer: int, q: Tensor, kv: Tensor, options: AttentionOptions) -> Tensor:
        """Without gradient: q ``[N, H, D]``, keys and values side by side in kv ``[N, 2 * KV, D]`` -> ``[N,
        H, D]``."""
        k, v = kv.chunk(2, 1)
        if self.sink is not None:
            self.sink(layer, k, v)
        return _tree_attention(q, k, v, self, options)

    def mask(self, first: int, rows: int, kv_length: int, window: int | None, like: Tensor) -> Tensor:
        """`causal_mask`, made once per row and not once per layer."""
        key = (first, rows, kv_length, window, like.dtype)
        if key not in self._masks:
            self._masks[key] = causal_mask(first, rows, kv_length, window, like)
        return self._masks[key]


@dataclass(frozen=True)
class Part:
    """Sequences that attend alike: ``lengths`` tokens each, lying one after the other from ``start``, all
    after the same ``prefix`` (start, length) of tokens that they see too. ``kv_length`` is what keys are
    padded to.
    """

    prefix: tuple[int, int]
    start: int
    lengths: tuple[int, ...]
    kv_length: int

    def queries(self, x: Tensor) -> Tensor:
        """Of ``x`` ``[N, heads, D]`` the part's own tokens, padded: ``[B, t, heads, D]``."""
        own = x[self.start : self.start + sum(self.lengths)]
        if len(set(self.lengths)) == 1:
            return own.unflatten(0, (len(self.lengths), -1))
        return pad_sequence(own.split(self.lengths), batch_first=True)

    def keys(self, x: Tensor, length: int) -> Tensor:
        """Prefix and own tokens, padded to ``length``: ``[B, length, heads, D]``."""
        first, count = self.prefix
        own = self.queries(x)
        out = x.new_zeros(len(self.lengths), max(length, count + own.shape[1]), *x.shape[1:])
        out[:, :count] = x[first : first + count]
        out[:, count : count + own.shape[1]] = own
        return out

    def put(self, out: Tensor, values: Tensor) -> None:
        """Writes ``values`` ``[B, t, heads, D]`` to the part's own places in ``out`` ``[N, heads, D]``."""
        at = self.start
        for row, length in zip(values, self.lengths, strict=True):
            out[at : at + length] = row[:length]
            at += length


def _parts(span: Span, *, exact: bool) -> list[Part]:
    """A prompt and its completions; with at most one completion both are one causal sequence."""

    def padded(needed: int) -> int:
        if not exact or not span.kv_length:
            return needed
        return sufficient_length(span.kv_length, needed)

    if len(span.lengths) <= 1:
        length = span.prompt_length + sum(span.lengths)
        return [Part((span.start, 0), span.start, (length,), padded(length))]
    first = span.start + span.prompt_length
    return [
        Part((span.start, 0), span.start, (span.prompt_length,), padded(span.prompt_length)),
        Part(
            (span.start, span.prompt_length),
            first,
            span.lengths,
            padded(span.prompt_length + max(span.lengths)),
        ),
    ]


class _TreeAttention(torch.autograd.Function):
    """Attention of all parts of a row: q ``[N, H, D]``, k and v ``[N, KV, D]`` -> ``[N, H, D]``.

    The forward pass is the stock kernel, whose bits the sampler shares. The backward pass recomputes the
    probabilities in fp32, block by block, and writes gradients straight to where they belong: on a CPU it
    takes less time than the stock one, and nothing padded is kept.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, layout: FlatLayout, options: AttentionOptions
    ) -> Tensor:
        out = _tree_attention(q, k, v, layout, options)
        ctx.save_for_backward(q, k, v, out)
        ctx.layout, ctx.options = layout, options
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        q, k, v, out = ctx.saved_tensors
        return *tree_attention_backward(q, k, v, out, grad, ctx.layout, ctx.options), None, None


def _tree_attention(q: Tensor, k: Tensor, v: Tensor, layout: FlatLayout, options: AttentionOptions) -> Tensor:
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for part in layout.parts:
        queries = part.queries(q)
        missing = -queries.shape[1] % MIN_QUERY_ROWS
        if missing:
            queries = F.pad(queries, (0, 0, 0, 0, 0, missing))
        keys, values = part.keys(k, part.kv_length), part.keys(v, part.kv_length)
        mask = layout.mask(part.prefix[1], queries.shape[1], keys.shape[1], options.window, q)
        queries, keys, values = (x.transpose(1, 2) for x in (queries, keys, values))
        part.put(out, attention(queries, keys, values, mask, options))
    return out


def tree_attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    grad: Tensor,
    layout: FlatLayout,
    options: AttentionOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v from ``out``, the attention of all parts ``[N, H, D]``, and its gradient."""
    grad_q = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    grad_k, grad_v = (torch.zeros(x.shape, device=x.device) for x in (k, v))  # sums over completions: fp32
    mean = (grad.float() * out).sum(-1, keepdim=True)
    for part in layout.parts:
        count = part.prefix[1]
        queries = part.queries(q)
        keys, values = (part.keys(x, count + queries.shape[1]) for x in (k, v))
        outer = part.queries(grad), part.queries(mean)
        own = _attention_backward(queries, keys, values, *outer, count, layout, options)
        part.put(grad_q, own[0])
        for total, found in ((grad_k, own[1]), (grad_v, own[2])):
            total[part.prefix[0] : part.prefix[0] + count] += found[:, :count].sum(0)
            at = part.start
            for row, length in zip(found, part.lengths, strict=True):
                total[at : at + length] += row[count : count + length]
                at += length
    return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype)


def _attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad: Tensor,
    mean: Tensor,
    first: int,
    layout: FlatLayout,
    options: AttentionOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `attention` for q and grad ``[B, t, H, D]``, k and v ``[B, S, KV, D]``; k's and v's in
    fp32.

    With P the probabilities and dP = grad V^T: dV = P^T grad, dS = P (dP - mean), dQ = dS K, dK = dS^T Q,
    where ``mean`` ``[B, t, H, 1]`` is sum(dP P), which equals sum(grad out) (FlashAttention, arXiv
    2205.14135, appendix B). Query heads that share a key/value head are rows of one matrix.
    """
    batch, t, heads, dim = q.shape
    kv_heads, repeats = k.shape[2], heads // k.shape[2]
    scale = dim**-0.5 if options.scaling is None else options.scaling
    grad_q = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    grad_k, grad_v = torch.zeros(k.shape, device=k.device), torch.zeros(v.shape, device=v.device)

    def rows(x: Tensor) -> Tensor:  # [b, t, H, n] -> [b * KV, repeats * t, n]
        x = x.unflatten(2, (kv_heads, repeats)).permute(0, 2, 3, 1, 4)
        return x.reshape(-1, repeats * x.shape[3], x.shape[4])

    t_step = min(t, QUERY_STEP)
    b_step = max(1, BLOCK_BYTES // (4 * heads * t_step * k.shape[1]))
    for b in range(0, batch, b_step):
        keys, values = (x[b : b + b_step].transpose(1, 2).flatten(0, 1) for x in (k, v))
        keys_t, values_t = (x.float().transpose(1, 2) for x in (keys, values))
        for start in range(0, t, t_step):
            here = (slice(b, b + b_step), slice(start, start + t_step))
            seen = min(k.shape[1], first + start + q[here].shape[1])
            mask = layout.mask(first + start, q[here].shape[1], seen, options.window, mean.new_empty(()))
            queries, grads = rows(q[here]), rows(grad[here])
            # Scaled here, where there are fewer numbers than scores.
            scores = torch.bmm(queries.float() * scale, keys_t[..., :seen])
            if options.softcap is not None:
                scores = scores.div_(options.softcap).tanh_()
                slope = 1.0 - scores.square()
                scores = scores * options.softcap
            p = scores.unflatten(1, (repeats, -1)).add_(mask).softmax(-1).flatten(1, 2)
            ds = torch.bmm(grads.float() * scale, values_t[..., :seen])
            ds.sub_(rows(mean[here]) * scale).mul_(p)
            if options.softcap is not None:
                ds.mul_(slope)
            p, ds = p.to(q.dtype), ds.to(q.dtype)
            found_q = torch.bmm(ds, keys[:, :seen]).unflatten(0, (-1, kv_heads)).unflatten(2, (repeats, -1))
            grad_q[here] = found_q.permute(0, 3, 1, 2, 4).flatten(2, 3)
            for total, left, right in ((grad_k, ds, queries), (grad_v, p, grads)):
                found = torch.bmm(left.transpose(1, 2), right).unflatten(0, (-1, kv_heads))
                total[here[0], :seen] += found.transpose(1, 2)
    return grad_q, grad_k, grad_v
