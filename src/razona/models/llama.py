"""The Llama shape of decoder by hand: its forward pass on tokens, and the backward pass of a layer.

The arithmetic is that of transformers' modules, bit for bit. Written out, a decode step spends less time
between its matrix products, and a layer says what its backward pass needs (`Kept`): enough to train from a
forward pass that somebody else has run, which is how the trainer uses the sampler's (`razona.models.recall`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from razona.batch import needed
from razona.models.flat import AttentionOptions, FlatLayout, tree_attention_backward
from razona.models.linear import GATE_UP, QKV, Together, joined, linear_of
from razona.models.master import gradient_sum

LLAMA_SHAPED = frozenset({"llama", "mistral", "qwen2", "qwen3"})


class TokenLayout(Protocol):
    """Attends tokens that lie one after the other: q ``[N, H, D]``, keys and values side by side in kv
    ``[N, 2 * KV, D]`` -> ``[N, H, D]``."""

    def attend_tokens(self, layer: int, q: Tensor, kv: Tensor, options: AttentionOptions) -> Tensor: ...


class Kept(NamedTuple):
    """What a layer's backward pass needs, of N tokens; the rest is computed anew."""

    x: Tensor  # [N, h] the layer's input
    attended: Tensor  # [N, H * D] the input of o_proj
    middle: Tensor  # [N, h] after attention, the MLP's input before its norm
    gate_up: Tensor  # [N, 2 * I]


class Recorder(Protocol):
    """Takes what the layers keep, and the last layer's output."""

    def put(self, layer: int, kept: Kept) -> None: ...

    def put_last(self, x: Tensor) -> None: ...


class Source(Protocol):
    """Gives one layer's `Kept` back, to its backward pass."""

    def get(self) -> Kept: ...


class Rotary(NamedTuple):
    """Rotary position embedding of N tokens, ``[N, 1, D]`` each."""

    cos: Tensor
    sin: Tensor  # its first half negated: -b * sin has the bits of b * -sin

    @classmethod
    def of(cls, base: Any, x: Tensor, positions: Tensor) -> Rotary:
        cos, sin = (part[0, :, None] for part in base.rotary_emb(x[None], positions[None]))
        half = cos.shape[-1] // 2
        return cls(cos, torch.cat([-sin[..., :half], sin[..., half:]], -1))

    def turn(self, x: Tensor) -> Tensor:
        """``x`` ``[N, heads, D]``, every pair of coordinates turned by its position's angles."""
        return x * self.cos + _swap(x) * self.sin

    def back(self, grad: Tensor) -> Tensor:
        """The gradient of `turn`."""
        return grad * self.cos + _swap(grad * self.sin)


def _swap(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat([x[..., half:], x[..., :half]], -1)


@torch.no_grad()
def forward(
    model: Any, tokens: Tensor, positions: Tensor, layout: TokenLayout, recorder: Recorder | None = None
) -> Tensor:
    """Last hidden states ``[N, h]`` of tokens ``[N]`` at positions ``[N]``, for a ``LLAMA_SHAPED`` model."""
    base = model.base_model
    x = base.embed_tokens(tokens)
    rotary = Rotary.of(base, x, positions)
    for index, layer in enumerate(base.layers):
        x, kept = _layer_forward(layer, x, rotary, layout)
        if recorder is not None:
            recorder.put(index, kept)
    if recorder is not None:
        recorder.put_last(x)
    result: Tensor = base.norm(x)
    return result


def _layer_forward(layer: Any, x: Tensor, rotary: Rotary, layout: TokenLayout) -> tuple[Tensor, Kept]:
    attn, mlp = layer.self_attn, layer.mlp
    qkv = joined(attn, QKV, layer.input_layernorm.forward(x))
    q, kv = _heads(attn, qkv, rotary)
    attended = layout.attend_tokens(attn.layer_idx, q, kv, _options(attn)).flatten(1)
    middle = x + attn.o_proj.forward(attended)
    gate_up = joined(mlp, GATE_UP, layer.post_attention_layernorm.forward(middle))
    gate, up = gate_up.chunk(2, -1)
    out = middle + mlp.down_proj.forward(mlp.act_fn(gate) * up)
    return out, Kept(x, attended, middle, gate_up)


def _heads(attn: Any, qkv: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
    """Queries ``[N, H, D]``, and keys and values side by side ``[N, 2 * KV, D]``, as attention takes them."""
    qkv, values = _by_head(attn, qkv)
    qk = rotary.turn(_normed(attn, qkv[:, :-values]))
    return qk[:, :-values], torch.cat([qk[:, -values:], qkv[:, -values:]], 1)


def _by_head(attn: Any, qkv: Tensor) -> tuple[Tensor, int]:
    """``[N, H + 2 * KV, D]`` and KV."""
    qkv = qkv.view(len(qkv), -1, attn.head_dim)
    return qkv, qkv.shape[1] // (attn.num_key_value_groups + 2)


def _normed(attn: Any, qk: Tensor) -> Tensor:
    """Queries and keys ``[N, H + KV, D]`` after their norms, where the model has them (Qwen 3)."""
    if not hasattr(attn, "q_norm"):
        return qk
    keys = qk.shape[1] // (attn.num_key_value_groups + 1)
    return torch.cat([attn.q_norm.forward(qk[:, :-keys]), attn.k_norm.forward(qk[:, -keys:])], 1)


def _options(attn: Any) -> AttentionOptions:
    return AttentionOptions(attn.scaling, _window(attn), None)


def _window(attention: nn.Module) -> int | None:
    """The sliding window of an attention module, as its own forward passes it on."""
    if hasattr(attention, "sliding_window"):
        return attention.sliding_window  # type: ignore[return-value]
    if attention.config.model_type == "mistral":  # type: ignore[union-attr]
        return attention.config.sliding_window  # type: ignore[union-attr, return-value]
    return None


def can_replay(model: Any) -> bool:
    """Whether `replay` knows all that the layers are made of: plain linear layers, with or without LoRA."""
    return all(
        linear_of(getattr(module, name)) is not None
        for layer in model.base_model.layers
        for module, names in ((layer.self_attn, (*QKV, "o_proj")), (layer.mlp, (*GATE_UP, "down_proj")))
        for name in names
    )


def replay(
    model: Any,
    tokens: Tensor,
    positions: Tensor,
    layout: FlatLayout,
    layers: Sequence[tuple[Source, Tensor]],
) -> Tensor:
    """`forward`'s result with gradient, without running it: ``layers`` bring what each layer kept and its
    output ``[N, h]``."""
    base = model.base_model
    x = _embedded(base.embed_tokens, tokens)
    rotary = Rotary.of(base, x, positions)
    for layer, (source, out) in zip(base.layers, layers, strict=True):
        trained = [p for p in layer.parameters() if p.requires_grad]
        x = _Layer.apply(x, out, source, layer, rotary, layout, *trained)  # type: ignore[no-untyped-call]
    result: Tensor = base.norm(x)
    return result


def _embedded(module: nn.Module, tokens: Tensor) -> Tensor:
    if type(module) is nn.Embedding:
        return _Embedding.apply(module.weight, tokens, module)  # type: ignore[no-any-return, no-untyped-call]
    return module(tokens)  # type: ignore[no-any-return]  # with a LoRA on it, say


class _Embedding(torch.autograd.Function):
    """An embedding whose gradient, all zeros but for a few rows, is not made where there is a sum to add the
    rows to."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, tokens: Tensor, module: nn.Embedding) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(tokens)
        ctx.module = module
        return module(tokens)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        (tokens,) = ctx.saved_tensors
        weight, padding = ctx.module.weight, ctx.module.padding_idx
        total = gradient_sum(weight)
        result = torch.zeros(weight.shape, device=grad.device) if total is None else total
        if padding is not None:
            grad = grad.masked_fill((tokens == padding)[:, None], 0.0)
        result.index_add_(0, tokens, grad.float())
        return result.to(weight.dtype) if total is None else None, None, None


class _Layer(torch.autograd.Function):
    """A layer that has run: its output is given, its gradients are those of `_layer_forward`."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: Tensor,
        out: Tensor,
        source: Source,
        layer: Any,
        rotary: Rotary,
        layout: FlatLayout,
        *trained: nn.Parameter,
    ) -> Tensor:
        ctx.source, ctx.layer, ctx.rotary, ctx.layout, ctx.trained = source, layer, rotary, layout, trained
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        gradients = _Gradients()
        grad = _layer_backward(ctx.layer, ctx.source.get(), grad, ctx.rotary, ctx.layout, gradients)
        return grad, None, None, None, None, None, *(gradients.of(p) for p in ctx.trained)


def _layer_backward(
    layer: Any, kept: Kept, grad: Tensor, rotary: Rotary, layout: FlatLayout, gradients: _Gradients
) -> Tensor:
    """The gradient of a layer's input, from that of its output; those of its parameters go to
    ``gradients``."""
    attn, mlp = layer.self_attn, layer.mlp
    # The MLP, and around it.
    gate, up = kept.gate_up.chunk(2, -1)
    gate = gate.detach().requires_grad_()
    with torch.enable_grad():
        active = mlp.act_fn(gate)
    grad_inner = gradients.linear(_together(mlp, "down_proj"), active.detach() * up, grad)
    grad_gate_up = torch.empty_like(kept.gate_up)
    grad_gate, grad_up = grad_gate_up.chunk(2, -1)
    torch.mul(grad_inner, active.detach(), out=grad_up)
    grad_gate.copy_(torch.autograd.grad(active, gate, grad_inner.mul_(up))[0])
    del gate, active, grad_inner
    normed, norm_backward = gradients.norm(kept.middle, layer.post_attention_layernorm)
    grad = grad + norm_backward(gradients.linear(_together(mlp, *GATE_UP), normed, grad_gate_up))
    # Attention, and around it.
    grad_attended = gradients.linear(_together(attn, "o_proj"), kept.attended, grad)
    normed, norm_backward = gradients.norm(kept.x, layer.input_layernorm)
    layers = _together(attn, *QKV)
    qkv = layers(normed)
    q, kv = _heads(attn, qkv, rotary)
    k, v = kv.chunk(2, 1)
    grad_q, grad_k, grad_v = tree_attention_backward(
        q, k, v, kept.attended.view(q.shape), grad_attended.view(q.shape), layout, _options(attn)
    )
    grad_q, grad_k = rotary.back(torch.cat([grad_q, grad_k], 1)).split((q.shape[1], k.shape[1]), 1)
    if hasattr(attn, "q_norm"):
        q, k, _ = _by_head(attn, qkv)[0].split((q.shape[1], k.shape[1], k.shape[1]), 1)
        grad_q = gradients.norm(q, attn.q_norm)[1](grad_q)
        grad_k = gradients.norm(k, attn.k_norm)[1](grad_k)
    grad_qkv = torch.cat([grad_q, grad_k, grad_v], 1).flatten(1)
    return grad + norm_backward(gradients.linear(layers, normed, grad_qkv))


class _Gradients:
    """Gradients of parameters, and the steps that find them."""

    def __init__(self) -> None:
        self.found: dict[int, Tensor] = {}

    def of(self, parameter: nn.Parameter) -> Tensor | None:
        return self.found.get(id(parameter))

    def linear(self, layers: Together, x: Tensor, grad: Tensor) -> Tensor:
        """Of ``x`` ``[N, in]``, from ``grad`` ``[N, out]``."""
        return layers.backward(x, grad, self.found)

    def norm(self, x: Tensor, module: nn.Module) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Its output, and the function from the output's gradient to that of ``x``."""
        return self._again(x, module.forward, list(module.parameters()))

    def _again(
        self, x: Tensor, function: Callable[[Tensor], Tensor], parameters: Sequence[nn.Parameter]
    ) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Runs something cheap once more, for its backward pass."""
        trained = [p for p in parameters if p.requires_grad]
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            result = function(x)

        def backward(grad: Tensor) -> Tensor:
            first, *others = torch.autograd.grad(result, (x, *trained), grad)
            self.found.update((id(p), own) for p, own in zip(trained, others, strict=True))
            return first

        return result.detach(), backward


def _together(module: nn.Module, *names: str) -> Together:
    layers = [needed(linear_of(getattr(module, name))) for name in names]  # `can_replay`
    return Together(layers, torch.bfloat16)
