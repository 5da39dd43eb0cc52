"""The same arithmetic as transformers' modules, bit for bit, with less around it.

`lighten` gives RMS norms a backward pass of their own: stock autograd keeps an fp32 copy of the input and
the normalised values beside it; this keeps the input. `decode_step` is the forward pass of one token per row
for the Llama shape of decoder: a decode step is so short that the calls between the matrix products decide
its time.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from razona.models.flat import AttentionOptions
from razona.models.packed import GATE_UP, QKV, joined

LLAMA_SHAPED = frozenset({"llama", "mistral", "qwen2", "qwen3"})


class TokenLayout(Protocol):
    """Attends one token per row: q ``[B, H, D]``, keys and values side by side in kv ``[B, 2 * KV, D]``
    -> ``[B, H, D]``."""

    def attend_tokens(self, layer: int, q: Tensor, kv: Tensor, options: AttentionOptions) -> Tensor: ...


def decode_step(model: Any, tokens: Tensor, positions: Tensor, layout: TokenLayout) -> Tensor:
    """Last hidden states ``[B, h]`` of tokens ``[B]`` at positions ``[B]``, for a ``LLAMA_SHAPED`` model."""
    base = model.base_model
    x = base.embed_tokens(tokens)
    cos, sin = (part[0, :, None] for part in base.rotary_emb(x[None], positions[None]))  # [B, 1, D]
    half = cos.shape[-1] // 2
    sin = torch.cat([-sin[..., :half], sin[..., half:]], -1)  # -b * sin has the bits of b * -sin
    for layer in base.layers:
        attn, mlp = layer.self_attn, layer.mlp
        qkv = joined(attn, QKV, layer.input_layernorm.forward(x)).view(len(x), -1, attn.head_dim)
        values = qkv.shape[1] // (attn.num_key_value_groups + 2)
        qk = qkv[:, :-values]
        if hasattr(attn, "q_norm"):
            qk = torch.cat([attn.q_norm.forward(qk[:, :-values]), attn.k_norm.forward(qk[:, -values:])], 1)
        qk = qk * cos + torch.cat([qk[..., half:], qk[..., :half]], -1) * sin
        kv = torch.cat([qk[:, -values:], qkv[:, -values:]], 1)
        options = AttentionOptions(attn.scaling, _window(attn), None)
        attended = layout.attend_tokens(attn.layer_idx, qk[:, :-values], kv, options)
        x = x + attn.o_proj.forward(attended.view(len(x), -1))
        gate, up = joined(mlp, GATE_UP, layer.post_attention_layernorm.forward(x)).chunk(2, -1)
        x = x + mlp.down_proj.forward(mlp.act_fn(gate) * up)
    result: Tensor = base.norm(x)
    return result


def _window(attention: nn.Module) -> int | None:
    """The sliding window of an attention module, as its own forward passes it on."""
    if hasattr(attention, "sliding_window"):
        return attention.sliding_window  # type: ignore[return-value]
    if attention.config.model_type == "mistral":  # type: ignore[union-attr]
        return attention.config.sliding_window  # type: ignore[union-attr, return-value]
    return None


def lighten(model: nn.Module) -> None:
    """Replaces the forward pass of every RMS norm whose result is this one's bit for bit."""
    alike: dict[type, bool] = {}
    for module in model.modules():
        kind = type(module)
        if kind.__name__.endswith("RMSNorm") and isinstance(getattr(module, "variance_epsilon", None), float):
            if kind not in alike:
                alike[kind] = _is_plain(module)
            if alike[kind]:
                module.__dict__["forward"] = partial(_norm, module)  # before the class's own


def _norm(module: nn.Module, x: Tensor) -> Tensor:
    if torch.is_grad_enabled():
        return _RMSNorm.apply(x, module.weight, module.variance_epsilon)  # type: ignore[no-any-return, no-untyped-call]
    return module.weight * F.rms_norm(x, x.shape[-1:], None, module.variance_epsilon)  # type: ignore[operator, arg-type]


@torch.no_grad()
def _is_plain(module: nn.Module) -> bool:
    weight: Tensor = module.weight  # type: ignore[assignment]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, weight.numel(), generator=generator).to(weight)
    other = torch.randn(weight.numel(), generator=generator).to(weight)
    expected = torch.func.functional_call(module, {"weight": other}, (x,))
    return torch.equal(expected, other * F.rms_norm(x, x.shape[-1:], None, module.variance_epsilon))  # type: ignore[arg-type]


class _RMSNorm(torch.autograd.Function):
    """``weight * (x / sqrt(mean(x^2) + eps))``, the quotient rounded to x's dtype, as transformers does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return weight * F.rms_norm(x, x.shape[-1:], None, eps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        """With n = x r and r = 1 / sqrt(mean(x^2) + eps): dx = r (g w - n mean(g w n)), dw = sum(g n)."""
        x, weight = ctx.saved_tensors
        n = x.float()
        r = (torch.linalg.vecdot(n, n)[..., None] / n.shape[-1] + ctx.eps).rsqrt()
        n = n.mul_(r)
        g = grad.float()
        grad_weight = (g * n).flatten(0, -2).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        g = g.mul_(weight)
        along = torch.linalg.vecdot(g, n)[..., None] / n.shape[-1]
        return g.sub_(n.mul_(along)).mul_(r).to(x.dtype), grad_weight, None
