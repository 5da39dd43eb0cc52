"""The language-model head on scored positions only, in chunks: ``[B, T, V]`` never exists.

One matrix product serves a chunk of rows, the element-wise work on its logits goes in tiles that stay in the
processor's cache. Log-softmax is in fp32 and the gradient of the weight is accumulated in fp32 over the
chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from razona.models.master import gradient_sum

CHUNK = 256  # rows of one matrix product
TILE = 8  # rows of element-wise work at a time
VOCABULARY_STEP = 4096  # rows of the weight's gradient at a time, where they go to an fp32 sum at once
KEPT_BYTES = 128 * 2**20  # derivatives of the logits kept from the forward pass, at most; beyond, recomputed


class Known(Protocol):
    """Log-probs ``[S]`` that somebody has computed, and their derivatives: with respect to raw logits ``[S,
    V]``, or of a frozen head to its input ``[S, h]``."""

    logprobs: Tensor

    def derivatives(self) -> Tensor: ...


class Head:
    """Hidden states ``[S, h]`` -> log-probs. ``softcap`` and ``scale`` as some model families define them."""

    def __init__(self, projection: nn.Linear, *, softcap: float | None = None, scale: float = 1.0) -> None:
        self.projection = projection
        self.softcap = softcap
        self.scale = scale

    @classmethod
    def of(cls, model: Any) -> Head:
        """The head of a transformers causal language model."""
        config = model.config.get_text_config()
        divisor = getattr(config, "logits_scaling", None) or 1.0  # Granite
        scale = (getattr(config, "logit_scale", None) or 1.0) / divisor  # Cohere
        softcap = getattr(config, "final_logit_softcapping", None)  # Gemma 2
        return cls(model.get_output_embeddings(), softcap=softcap, scale=scale)

    @property
    def is_frozen(self) -> bool:
        """Whether neither weight nor bias is trained."""
        parameters = self.projection.weight, self.projection.bias
        return not any(p is not None and p.requires_grad for p in parameters)

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 logits ``[S, V]`` of a few rows, for sampling; at temperature 1."""
        return self.finish(self.project(hidden), temperature=1.0)

    def logprobs(
        self,
        hidden: Tensor,
        target: Tensor,
        *,
        temperature: float,
        token_stats: Tensor | None = None,
        known: Known | None = None,
    ) -> Tensor:
        """``log_softmax(logits / temperature)[target]``, fp32 ``[S]``, differentiable. Not computed where
        they are ``known``.

        ``token_stats`` ``[2, S]``, where given, is filled with whether the target is the most probable token,
        1 or 0, and with the entropy of the distribution, in nats; what is ``known`` says nothing of these.
        """
        assert token_stats is None or known is None
        weight, bias = self.projection.weight, self.projection.bias
        result: Tensor = _Logprobs.apply(  # type: ignore[no-untyped-call]
            hidden, weight, bias, target, self, temperature, token_stats, known
        )
        return result

    def project(self, hidden: Tensor) -> Tensor:
        """Raw logits in the model's dtype. At least two rows go through the product, see
        `razona.models.flat`.
        """
        if hidden.shape[0] == 1:
            return self.projection(hidden.expand(2, -1).contiguous())[:1]
        return self.projection(hidden)  # type: ignore[no-any-return]

    def finish(self, raw: Tensor, *, temperature: float) -> Tensor:
        """fp32 logits divided by the temperature, from raw ones."""
        logits = raw.float()
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits / temperature if temperature != 1.0 else logits

    def derivative(self, raw: Tensor, *, temperature: float) -> Tensor | float:
        """d finish(raw) / d raw."""
        slope = self.scale / temperature
        if self.softcap is None:
            return slope
        capped = torch.tanh(raw.float() * (self.scale / self.softcap))
        return (1.0 - capped.square()) * slope

    def derivatives(
        self, raw: Tensor, token: Tensor, logprob: Tensor, probabilities: Tensor, *, temperature: float
    ) -> Tensor:
        """d logprob / d raw ``[n, V]``: of ``token``'s log-probability under
        ``probabilities``, which are used up. In fp32; 1 - p
        of the token is taken as -expm1(log p): near certainty 1 - p would lose its digits."""
        d = probabilities.neg_().scatter_(1, token[:, None], -torch.expm1(logprob)[:, None])
        slope = self.derivative(raw, temperature=temperature)
        return d if isinstance(slope, float) and slope == 1.0 else d.mul_(slope)


class _Logprobs(torch.autograd.Function):
    """With d = onehot(target) - softmax(logits) through the head's own derivative: dH = g * (d @ W) and
    dW = d^T @ (g * H), where g is the incoming gradient of each log-prob."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        head: Head,
        temperature: float,
        token_stats: Tensor | None,
        known: Known | None,
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias, target)
        ctx.head, ctx.temperature = head, temperature
        ctx.of_input = known is not None and head.is_frozen  # what is kept
        if known is not None:
            ctx.kept = known.derivatives()
            return known.logprobs.clone()
        count, vocabulary = target.numel(), weight.shape[0]
        keep = any(ctx.needs_input_grad[:3]) and count * vocabulary * weight.element_size() <= KEPT_BYTES
        out = torch.empty(count, dtype=torch.float32, device=hidden.device)
        kept = hidden.new_empty(count, vocabulary) if keep else None
        for rows in _chunks(count):
            raw = head.project(hidden[rows])
            stats = None if token_stats is None else token_stats[:, rows]
            _score(
                raw,
                target[rows],
                out[rows],
                head,
                temperature,
                stats,
                kept=None if kept is None else kept[rows],
            )
        ctx.kept = kept
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        hidden, weight, _, target = ctx.saved_tensors
        count = target.numel()
        grad_hidden, grad_weight, grad_bias = torch.empty_like(hidden), None, None
        if ctx.of_input and ctx.kept is not None:
            torch.mul(ctx.kept, grad[:, None], out=grad_hidden)
            ctx.kept = None
            return grad_hidden, *[None] * 7
        total = gradient_sum(ctx.head.projection.weight) if ctx.needs_input_grad[1] else None
        for rows in [slice(0, count)] if ctx.kept is not None else _chunks(count):
            d = ctx.kept
            if d is None:
                d = ctx.head.project(hidden[rows])
                unused = torch.empty(len(d), device=d.device)
                _score(d, target[rows], unused, ctx.head, ctx.temperature, kept=d)
            g = grad[rows, None]
            torch.mul(d @ weight, g, out=grad_hidden[rows])
            if ctx.needs_input_grad[1]:
                scaled = (hidden[rows] * g).to(d.dtype)
                if total is None:
                    grad_weight = _plus(grad_weight, d.t() @ scaled, last=rows.stop == count)
                else:
                    for own in (
                        slice(v, v + VOCABULARY_STEP) for v in range(0, len(weight), VOCABULARY_STEP)
                    ):
                        total[own] += d[:, own].t() @ scaled
            if ctx.needs_input_grad[2]:
                grad_bias = _plus(grad_bias, (d.t() @ g.to(d.dtype))[:, 0], last=rows.stop == count)
        ctx.kept = None  # it is large, and the layers' own backward comes next
        return grad_hidden, grad_weight, grad_bias, None, None, None, None, None


def _plus(total: Tensor | None, part: Tensor, *, last: bool) -> Tensor:
    """The sum, in fp32 until the last part."""
    if total is None:
        return part if last else part.float()
    total += part
    return total.to(part.dtype) if last else total


def _score(
    raw: Tensor,
    target: Tensor,
    out: Tensor,
    head: Head,
    temperature: float,
    token_stats: Tensor | None = None,
    *,
    kept: Tensor | None,
) -> None:
    """Writes the log-probs of ``target`` to ``out``, what `Head.logprobs` token_stats to ``token_stats`` if
    given, and d logprob / d raw to ``kept`` if given (which may be ``raw`` itself)."""
    for start in range(0, raw.shape[0], TILE):
        rows = slice(start, start + TILE)
        tile = raw[rows]
        logprobs = head.finish(tile, temperature=temperature).log_softmax(-1)
        label = target[rows]
        out[rows] = logprobs.gather(1, label[:, None])[:, 0]
        if token_stats is not None:
            token_stats[0, rows] = (logprobs.argmax(-1) == label).float()
            token_stats[1, rows] = -(logprobs.exp() * logprobs).nansum(-1)  # 0 * -inf where p is 0
        if kept is not None:
            p = logprobs.exp_()
            kept[rows] = head.derivatives(tile, label, out[rows], p, temperature=temperature)


def _chunks(count: int) -> Iterator[slice]:
    """Even parts of at most CHUNK rows (even, so that no part is a single row when there are several)."""
    parts = max(1, -(-count // CHUNK))
    for part in range(parts):
        yield slice(part * count // parts, (part + 1) * count // parts)
