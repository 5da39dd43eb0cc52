"""Linear layers and the LoRA on them: their forward pass, and the backward pass by hand.

peft adds ``B (A x) * scaling`` to ``W x``, in four passes over the output. In bf16 on a CPU, where those cost
as much as the products, both are one product here, ``[W, B] [x; (A * scaling) x]``, which also rounds once
where peft's arithmetic rounds four times. Layers that read the same input can share it: more rows of W, and
zeros where an A is not its B's, which change no bit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import accumulate
from typing import Any, NamedTuple, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from razona.models.cpu.processor import CutLinear, linear, product_rows
from razona.models.quant import QuantizedForward, dequantized

QKV = ("q_proj", "k_proj", "v_proj")
GATE_UP = ("gate_proj", "up_proj")
WIDE = 16  # ranks are padded to a multiple of it: the CPU's kernels have other bits for a single column


def patch_lora(model: nn.Module, undo: ExitStack) -> None:
    """Gives every plain LoRA layer with one active adapter the forward pass of `LoraForward`, until ``undo``;
    others (DoRA, embeddings, 8-bit bases) keep peft's."""
    full, quantized = (sys.modules.get(f"peft.tuners.lora.{name}") for name in ("layer", "bnb"))
    kinds = {getattr(full, "Linear", None), getattr(quantized, "Linear4bit", None)}
    found: list[Any] = [module for module in model.modules() if type(module) in kinds]
    for module in found:
        if len(module.active_adapters) == 1 and _is_linear(module.base_layer):
            (name,) = module.active_adapters
            plain = name in module.lora_A and name not in module.lora_variant
            if plain and module.lora_B[name].bias is None:
                module.__dict__["forward"] = LoraForward(module, name)
                undo.callback(module.__dict__.pop, "forward", None)


def patch_linears(model: nn.Module, undo: ExitStack) -> None:
    """Gives every linear layer of ``model`` products cut by rows, where this processor needs that, until
    ``undo``.
    """
    for module in model.modules() if product_rows().part else ():
        if type(module) in (nn.Linear, Conv1D) and "forward" not in module.__dict__:
            module.__dict__["forward"] = _CutForward(Linear(module, None))
            undo.callback(module.__dict__.pop, "forward", None)


class _CutForward:
    """The forward pass of a linear layer, by `razona.models.cpu.processor.CutLinear`."""

    def __init__(self, layer: Linear) -> None:
        self.layer = layer

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype != torch.bfloat16:
            return type(self.layer.linear).forward(self.layer.linear, x)  # type: ignore[no-any-return]
        weight, bias = self.layer.weight(x.dtype), self.layer.linear.bias
        return CutLinear.apply(x, weight, bias)  # type: ignore[no-any-return, no-untyped-call]


class LoraForward:
    """The forward pass of a plain LoRA layer."""

    def __init__(self, layer: Any, adapter: str) -> None:
        self.layer, self.adapter = layer, adapter
        self.a, self.b = layer.lora_A[adapter], layer.lora_B[adapter]  # A [r, in], B [out, r]
        self.scaling: float = layer.scaling[adapter]

    def __call__(self, x: Tensor) -> Tensor:
        if not self.is_on:
            return type(self.layer).forward(self.layer, x)  # type: ignore[no-any-return]
        if self.is_fused and x.dtype == torch.bfloat16:
            layer = Linear(self.layer.base_layer, self)
            return _Fused.apply(x, layer, *layer.trained)  # type: ignore[no-any-return, no-untyped-call]
        out: Tensor = self.layer.base_layer(x)
        low = F.linear(x.to(self.a.weight.dtype), self.a.weight)
        return (out + F.linear(low, self.b.weight) * self.scaling).to(out.dtype)

    @property
    def is_on(self) -> bool:
        """Not switched off, not merged into the base, and the one that is active."""
        return not self.is_bare and self.layer.active_adapters == [self.adapter]

    @property
    def is_bare(self) -> bool:
        """Whether the base layer alone runs."""
        return bool(self.layer.disable_adapters or self.layer.merged)

    @property
    def is_fused(self) -> bool:
        """Whether one product is faster than peft's arithmetic."""
        return self.a.weight.dtype == torch.bfloat16 and self.a.weight.device.type == "cpu"


class Linear(NamedTuple):
    """A linear layer, and the LoRA that is on it."""

    linear: Any
    lora: LoraForward | None

    def weight(self, dtype: torch.dtype) -> Tensor:
        """``[out, in]``: its own, or in ``dtype`` what four bits stand for."""
        if _is_quantized(self.linear):
            return dequantized(self.linear, dtype)
        weight: Tensor = self.linear.weight
        return weight.t() if isinstance(self.linear, Conv1D) else weight

    @property
    def is_fused(self) -> bool:
        return self.lora is not None and self.lora.is_fused

    @property
    def parts(self) -> tuple[nn.Module, ...]:
        """The modules it is made of."""
        return (self.linear,) if self.lora is None else (self.linear, self.lora.a, self.lora.b)

    @property
    def trained(self) -> list[nn.Parameter]:
        return [p for module in self.parts for p in module.parameters(recurse=False) if p.requires_grad]


def linear_of(module: object) -> Linear | None:
    """``module`` as a linear layer; None where it is anything else."""
    lora = getattr(module, "__dict__", {}).get("forward")
    if isinstance(lora, LoraForward):
        known = lora.is_on or lora.is_bare  # not with another adapter
        return Linear(lora.layer.base_layer, lora if lora.is_on else None) if known else None
    return Linear(module, None) if _is_linear(module) else None


def _is_linear(module: object) -> TypeGuard[nn.Module]:
    return type(module) in (nn.Linear, Conv1D) or _is_quantized(module)


def _is_quantized(module: object) -> bool:
    return isinstance(getattr(module, "__dict__", {}).get("forward"), QuantizedForward)


class Together:
    """Layers that read the same input, as one whose outputs lie side by side: ``weight`` ``[out, in + r]`` of
    every W and B, ``down`` ``[r, in]`` of every A times its scaling (None without LoRA), ``bias``."""

    def __init__(self, layers: Sequence[Linear], dtype: torch.dtype) -> None:
        self.layers = layers
        weights = [layer.weight(dtype).detach() for layer in layers]
        self.sizes = [len(weight) for weight in weights]
        self.ranks = [0 if layer.lora is None else len(layer.lora.a.weight) for layer in layers]
        self.width = weights[0].shape[1]
        self.bias = _side_by_side([layer.linear.bias for layer in layers], self.sizes)
        self.down: Tensor | None = None
        inner = sum(self.ranks)
        if not inner:
            self.weight = weights[0] if len(weights) == 1 else torch.cat(weights)
            return
        inner += -inner % WIDE
        self.weight = weights[0].new_empty(sum(self.sizes), self.width + inner)
        torch.cat(weights, out=self.weight[:, : self.width])
        up = self.weight[:, self.width :].zero_()
        self.down = weights[0].new_zeros(inner, self.width)
        for layer, own, rank in zip(layers, up.split(self.sizes), self.places, strict=True):
            if layer.lora is not None:
                own[:, rank] = layer.lora.b.weight.detach()
                self.down[rank] = layer.lora.a.weight.detach() * layer.lora.scaling

    @property
    def places(self) -> list[slice]:
        """Of each layer's A in ``down``."""
        return [slice(end - rank, end) for end, rank in zip(accumulate(self.ranks), self.ranks, strict=True)]

    def __call__(self, x: Tensor) -> Tensor:
        """``[..., in]`` -> ``[..., out]``, without gradient."""
        if self.down is not None:
            x = torch.cat([x, linear(x, self.down)], -1)
        return linear(x, self.weight, self.bias)

    def backward(self, x: Tensor, grad: Tensor, found: dict[int, Tensor]) -> Tensor:
        """From ``grad`` ``[N, out]`` the gradient of ``x`` ``[N, in]``; those of parameters go to ``found``,
        by the parameter's id."""
        wide = grad @ self.weight
        grads = grad.split(self.sizes, -1)
        self._weights(x, grad, grads, found)
        if self.down is None:
            return wide
        low, grad_low = x @ self.down.t(), wide[:, self.width :]
        grad_down = grad_low.t() @ x
        for layer, own, rank in zip(self.layers, grads, self.places, strict=True):
            if layer.lora is not None:
                a, b = layer.lora.a.weight, layer.lora.b.weight
                if a.requires_grad:
                    found[id(a)] = grad_down[rank] * layer.lora.scaling
                if b.requires_grad:
                    found[id(b)] = own.t() @ low[:, rank]
        return torch.addmm(wide[:, : self.width], grad_low, self.down)

    def _weights(self, x: Tensor, grad: Tensor, grads: Sequence[Tensor], found: dict[int, Tensor]) -> None:
        """The gradients of W and bias."""
        products: Sequence[Tensor | None] = [None] * len(grads)
        if all(layer.linear.weight.requires_grad for layer in self.layers):
            products = (grad.t() @ x).split(self.sizes)
        for layer, product, own in zip(self.layers, products, grads, strict=True):
            weight, bias = layer.linear.weight, layer.linear.bias
            if weight.requires_grad:
                product = own.t() @ x if product is None else product
                found[id(weight)] = product.t() if isinstance(layer.linear, Conv1D) else product
            if bias is not None and bias.requires_grad:
                found[id(bias)] = own.sum(0)


def _side_by_side(biases: Sequence[Tensor | None], sizes: Sequence[int]) -> Tensor | None:
    """One bias, zeros where a layer has none; None where none has."""
    known = [bias for bias in biases if bias is not None]
    if not known:
        return None
    pairs = zip(biases, sizes, strict=True)
    return torch.cat([known[0].new_zeros(n) if bias is None else bias.detach() for bias, n in pairs])


class _Fused(torch.autograd.Function):
    """A linear layer and its LoRA as one product; the weight that serves both is made anew for the backward
    pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Linear, *trained: nn.Parameter) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        ctx.layer, ctx.trained = layer, trained
        return Together([layer], x.dtype)(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        (x,), found = ctx.saved_tensors, dict[int, Tensor]()
        grad_x = Together([ctx.layer], grad.dtype).backward(x.flatten(0, -2), grad.flatten(0, -2), found)
        return grad_x.view(x.shape), None, *(found.get(id(parameter)) for parameter in ctx.trained)


def joined(module: nn.Module, names: tuple[str, ...]) -> Callable[[Tensor], Tensor]:
    """The named layers of ``module`` on the same input, side by side, without gradient."""
    blocked: Callable[[Tensor], Tensor] | None = module.__dict__.get(attribute(names))
    if blocked is not None:
        return blocked
    parts = [getattr(module, name) for name in names]
    layers = [layer for layer in map(linear_of, parts) if layer is not None and layer.is_fused]

    def forward(x: Tensor) -> Tensor:
        if len(layers) == len(parts) and x.dtype == torch.bfloat16:
            return Together(layers, x.dtype)(x)
        return torch.cat([part.forward(x) for part in parts], -1)

    return forward


def attribute(names: tuple[str, ...]) -> str:
    """Where a module keeps its `joined` layers blocked (`razona.models.cpu.prepacked`)."""
    return "packed_" + "_".join(names)
