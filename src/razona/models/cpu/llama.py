"""The Llama shape of decoder by hand: its forward pass on tokens, and the backward pass of a layer.

The arithmetic is that of transformers' modules, bit for bit. Written out, a decode step spends less time
between its matrix products, and a layer says what its backward pass needs (`LayerActivations`): enough to
train from a forward pass that somebody else has run, which is how the trainer uses the sampler's
(`razona.models.cpu.reuse`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from razona.batch import needed
from razona.models.cpu.linear import GATE_UP, QKV, Together, joined, linear_of
from razona.models.flat import AttentionOptions, FlatLayout, tree_attention_backward
from razona.models.master import gradient_sum

LLAMA_SHAPED = frozenset({"llama", "mistral", "qwen2", "qwen3"})


class TokenLayout(Protocol):
    """Attends tokens that lie one after the other: q ``[N, H, D]``, keys and values side by side in kv
    ``[N, 2 * KV, D]`` -> ``[N, H, D]``."""

    def attend_tokens(self, layer: int, q: Tensor, kv: Tensor, options: AttentionOptions) -> Tensor: ...


class LayerActivations(NamedTuple):
    """What a layer's backward pass needs, of N tokens; the rest is computed anew."""

    x: Tensor  # [N, h] the layer's input
    attended: Tensor  # [N, H * D] the input of o_proj
    middle: Tensor  # [N, h] after attention, the MLP's input before its norm
    gate_up: Tensor  # [N, 2 * I]


class Recorder(Protocol):
    """Takes what the layers keep, and the last layer's output."""

    def put(self, saved: LayerActivations) -> None: ...

    def put_last(self, x: Tensor) -> None: ...


class Source(Protocol):
    """Gives one layer's `LayerActivations` back, to its backward pass."""

    def get(self) -> LayerActivations: ...


class Rotary(NamedTuple):
    """Rotary position embedding of N tokens, ``[N, H + 2 * KV, D]`` each; values are turned by no angle."""

    cos: Tensor
    sin: Tensor  # its first half negated: -b * sin has the bits of b * -sin

    @classmethod
    def of(cls, base: Any, x: Tensor, positions: Tensor) -> Rotary:
        cos, sin = (part[0, :, None] for part in base.rotary_emb(x[None], positions[None]))
        half = cos.shape[-1] // 2
        sin = torch.cat([-sin[..., :half], sin[..., half:]], -1)
        sizes = _head_counts(base)
        cos, sin = (part.repeat(1, sum(sizes), 1) for part in (cos, sin))
        cos[:, -sizes[-1] :], sin[:, -sizes[-1] :] = 1, 0
        return cls(cos, sin)

    def turn(self, qkv: Tensor) -> Tensor:
        """``qkv`` ``[N, H + 2 * KV, D]``, every pair of coordinates turned by its position's angles."""
        return qkv * self.cos + _swap(qkv) * self.sin

    def back(self, grad: Tensor) -> Tensor:
        """The gradient of `turn`."""
        return grad * self.cos + _swap(grad * self.sin)


def _swap(x: Tensor) -> Tensor:
    return x.roll(x.shape[-1] // 2, -1)


class Decoder:
    """The forward pass of a ``LLAMA_SHAPED`` model. Its modules are looked up once, which for a decode step's
    few tokens would take as long as some of the arithmetic."""

    def __init__(self, model: Any) -> None:
        self.base = model.base_model
        self.layers = [_LayerForward.of(layer) for layer in self.base.layers]

    @torch.no_grad()
    def __call__(
        self, tokens: Tensor, positions: Tensor, layout: TokenLayout, recorder: Recorder | None = None
    ) -> Tensor:
        """Last hidden states ``[N, h]`` of tokens ``[N]`` at positions ``[N]``."""
        x = self.base.embed_tokens(tokens)
        rotary = Rotary.of(self.base, x, positions)
        for layer in self.layers:
            x, saved = layer(x, rotary, layout)
            if recorder is not None:
                recorder.put(saved)
        if recorder is not None:
            recorder.put_last(x)
        result: Tensor = self.base.norm(x)
        return result


Step = Callable[[Tensor], Tensor]


class _LayerForward(NamedTuple):
    """What a layer does to a token, step by step."""

    number: int
    norm: Step
    qkv: Step
    heads: _Heads
    options: AttentionOptions
    o: Step
    mlp_norm: Step
    gate_up: Step
    act: Step
    down: Step

    @classmethod
    def of(cls, layer: Any) -> _LayerForward:
        attn, mlp = layer.self_attn, layer.mlp
        return cls(
            attn.layer_idx,
            layer.input_layernorm.forward,
            joined(attn, QKV),
            _Heads.of(attn),
            _options(attn),
            attn.o_proj.forward,
            layer.post_attention_layernorm.forward,
            joined(mlp, GATE_UP),
            mlp.act_fn.forward,
            mlp.down_proj.forward,
        )

    def __call__(self, x: Tensor, rotary: Rotary, layout: TokenLayout) -> tuple[Tensor, LayerActivations]:
        q, kv = self.heads(self.qkv(self.norm(x)), rotary)
        attended = layout.attend_tokens(self.number, q, kv, self.options).flatten(1)
        middle = x + self.o(attended)
        gate_up = self.gate_up(self.mlp_norm(middle))
        gate, up = gate_up.chunk(2, -1)
        return middle + self.down(self.act(gate) * up), LayerActivations(x, attended, middle, gate_up)


class _Heads(NamedTuple):
    """From the output of q, k and v side by side to what attention takes. Qwen 3 has norms of q and k."""

    sizes: tuple[int, int, int]  # H, KV, KV
    dim: int
    q_norm: Step | None
    k_norm: Step | None

    @classmethod
    def of(cls, attn: Any) -> _Heads:
        norms = (attn.q_norm.forward, attn.k_norm.forward) if hasattr(attn, "q_norm") else (None, None)
        return cls(_head_counts(attn), attn.head_dim, *norms)

    def __call__(self, qkv: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """``[N, (H + 2 * KV) * D]`` -> queries ``[N, H, D]``, and keys and values side by side ``[N, 2 * KV,
        D]``."""
        qkv = qkv.view(len(qkv), -1, self.dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k, v = qkv.split(self.sizes, 1)
            qkv = torch.cat([self.q_norm(q), self.k_norm(k), v], 1)
        turned = rotary.turn(qkv)
        return turned[:, : self.sizes[0]], turned[:, self.sizes[0] :]


def _head_counts(module: Any) -> tuple[int, int, int]:
    """Query, key and value heads."""
    heads, kv_heads = module.config.num_attention_heads, module.config.num_key_value_heads
    return heads, kv_heads, kv_heads


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
    """A `Decoder`'s result with gradient, without running it: ``layers`` bring what each layer saved and its
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
    """A layer that has run: its output is given, its gradients are those of `_LayerForward`."""

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
    layer: Any,
    saved: LayerActivations,
    grad: Tensor,
    rotary: Rotary,
    layout: FlatLayout,
    gradients: _Gradients,
) -> Tensor:
    """The gradient of a layer's input, from that of its output; those of its parameters go to
    ``gradients``."""
    attn, mlp = layer.self_attn, layer.mlp
    # The MLP, and around it.
    gate, up = saved.gate_up.chunk(2, -1)
    gate = gate.detach().requires_grad_()
    with torch.enable_grad():
        active = mlp.act_fn(gate)
    grad_inner = gradients.linear(_together(mlp, "down_proj"), active.detach() * up, grad)
    grad_gate_up = torch.empty_like(saved.gate_up)
    grad_gate, grad_up = grad_gate_up.chunk(2, -1)
    torch.mul(grad_inner, active.detach(), out=grad_up)
    grad_gate.copy_(torch.autograd.grad(active, gate, grad_inner.mul_(up))[0])
    del gate, active, grad_inner
    normed, norm_backward = gradients.norm(saved.middle, layer.post_attention_layernorm)
    grad = grad + norm_backward(gradients.linear(_together(mlp, *GATE_UP), normed, grad_gate_up))
    # Attention, and around it.
    grad_attended = gradients.linear(_together(attn, "o_proj"), saved.attended, grad)
    normed, norm_backward = gradients.norm(saved.x, layer.input_layernorm)
    layers = _together(attn, *QKV)
    qkv = layers(normed)
    heads = _Heads.of(attn)
    q, kv = heads(qkv, rotary)
    k, v = kv.chunk(2, 1)
    grad_q, grad_k, grad_v = tree_attention_backward(
        q, k, v, saved.attended.view(q.shape), grad_attended.view(q.shape), layout, _options(attn)
    )
    grad_qkv = rotary.back(torch.cat([grad_q, grad_k, grad_v], 1))
    if hasattr(attn, "q_norm"):
        parts = (x.split(heads.sizes, 1) for x in (qkv.view_as(grad_qkv), grad_qkv))
        (q, k, _), (grad_q, grad_k, grad_v) = parts
        grad_q = gradients.norm(q, attn.q_norm)[1](grad_q)
        grad_k = gradients.norm(k, attn.k_norm)[1](grad_k)
        grad_qkv = torch.cat([grad_q, grad_k, grad_v], 1)
    return grad + norm_backward(gradients.linear(layers, normed, grad_qkv.flatten(1)))


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
