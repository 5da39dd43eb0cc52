"""Linear layers with oneDNN's blocked weights, for decoding on a CPU.

A decode step multiplies few rows, and the kernel spends half its time re-ordering each weight matrix. Blocked
once per rollout instead, the same product takes half the time and gives the same bits (two rows or more).
Layers that read the same input are blocked as one. A LoRA layer's product is added to its base layer's. A
4-bit layer is de-quantized for it, so that its copy takes 2 bytes per weight while the rollout lasts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from razona.models.lora import WIDE, LoraForward
from razona.models.quant import QuantizedForward, dequantized

QKV = ("q_proj", "k_proj", "v_proj")
GATE_UP = ("gate_proj", "up_proj")


@contextmanager
def packed_linears(model: nn.Module, rows: int, *, join: bool) -> Iterator[None]:
    """Inside, every bf16 CPU linear layer of ``model`` runs on a blocked copy of its weight, made for
    ``rows`` rows; with ``join``, `joined` layers have one copy together and none of their own.

    The copies are gone afterwards: weights that an optimizer changes would leave them behind.
    """
    patched: list[tuple[nn.Module, str, Any]] = []

    def patch(module: nn.Module, name: str, layers: Sequence[Linear]) -> None:
        patched.append((module, name, module.__dict__.get(name)))
        module.__dict__[name] = _packed(layers, rows)  # an attribute of the instance, before its class's own

    done: set[object] = set()
    for module in model.modules():
        for names in (QKV, GATE_UP) if join else ():
            parts = [_packable(getattr(module, name, None)) for name in names]
            layers = [part for part in parts if part is not None]
            if len(layers) == len(parts):
                patch(module, _attribute(names), layers)
                done.update(part for layer in layers for part in layer.parts)
    for module in model.modules():
        layer = _packable(module)
        if layer is not None and done.isdisjoint(layer.parts):
            patch(module, "forward", [layer])
            done.update(layer.parts)
    try:
        yield
    finally:
        for module, name, former in patched:
            del module.__dict__[name]
            if former is not None:
                module.__dict__[name] = former


@dataclass(frozen=True)
class Linear:
    """A linear layer, and the LoRA that is on it."""

    linear: nn.Linear
    lora: LoraForward | None

    def weight(self, dtype: torch.dtype) -> Tensor:
        """``[out, in]``: its own, or in ``dtype`` what four bits stand for."""
        return dequantized(self.linear, dtype) if _is_quantized(self.linear) else self.linear.weight

    @property
    def parts(self) -> tuple[object, ...]:
        """The modules it is made of."""
        return (self.linear,) if self.lora is None else (self.linear, self.lora.a, self.lora.b)


def linear_of(module: object) -> Linear | None:
    """``module`` as a linear layer; None where it is anything else."""
    lora = getattr(module, "__dict__", {}).get("forward")
    if isinstance(lora, LoraForward):
        base = lora.layer.base_layer
        return Linear(base, lora if lora.is_on else None) if _is_linear(base) else None
    return Linear(module, None) if _is_linear(module) else None


def _is_linear(module: object) -> TypeGuard[nn.Linear]:
    return type(module) is nn.Linear or _is_quantized(module)


def _is_quantized(module: object) -> bool:
    return isinstance(getattr(module, "__dict__", {}).get("forward"), QuantizedForward)


def joined(module: nn.Module, names: tuple[str, ...], x: Tensor) -> Tensor:
    """The named layers of ``module`` on the same input, side by side."""
    together = module.__dict__.get(_attribute(names))
    if together is not None:
        return together(x)  # type: ignore[no-any-return]
    return torch.cat([getattr(module, name).forward(x) for name in names], -1)


def _attribute(names: tuple[str, ...]) -> str:
    return "packed_" + "_".join(names)


def _packable(module: object) -> Linear | None:
    """``module`` as a layer to pack; None where it is none."""
    layer = linear_of(module)
    if layer is None or not torch.backends.mkldnn.is_available():
        return None
    weight = layer.linear.weight
    fits = weight.dtype == torch.bfloat16 or _is_quantized(layer.linear)
    return layer if weight.device.type == "cpu" and fits else None


def _packed(layers: Sequence[Linear], rows: int) -> Callable[[Tensor], Tensor]:
    """The layers' outputs side by side. The A of every LoRA is one more block of the same product; a second
    one takes what they give through every B, zeros where an A is not its B's."""
    linears = [layer.linear for layer in layers]
    weight = torch.cat([layer.weight(torch.bfloat16).detach() for layer in layers])
    bias = None
    if any(linear.bias is not None for linear in linears):
        bias = torch.cat([_bias(linear) for linear in linears])
    apply, block = torch.ops.mkldnn._linear_pointwise, torch.ops.mkldnn._reorder_linear_weight
    loras = [layer.lora for layer in layers if layer.lora is not None]
    if not loras:
        weight = block(weight, rows)
        return lambda x: apply(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]

    width, scaling = len(weight), _scaling(layers)
    ranks = sum(len(lora.a.weight) for lora in loras)
    inner = ranks + -ranks % WIDE
    down, up = weight.new_zeros(inner, weight.shape[1]), weight.new_zeros(width, inner)
    low, ends = 0, accumulate(linear.out_features for linear in linears)
    for end, layer in zip(ends, layers, strict=True):
        if layer.lora is not None:
            a, b = layer.lora.a.weight.detach(), layer.lora.b.weight.detach()
            down[low : low + len(a)] = a
            up[end - len(b) : end, low : low + len(a)] = b
            low += len(a)
    weight, up = block(torch.cat([weight, down]), rows), block(up, rows)
    if bias is not None:
        bias = torch.cat([bias, bias.new_zeros(len(down))])

    def forward(x: Tensor) -> Tensor:
        out = apply(x, weight, bias, "none", [], "")
        added = apply(out[..., width:].contiguous(), up, None, "none", [], "")
        return out[..., :width] + (added * scaling).to(out.dtype)  # type: ignore[no-any-return]

    return forward


def _scaling(layers: Sequence[Linear]) -> float | Tensor:
    """Of the layers' LoRAs: one number, or one per output in fp32, whose product has the same bits."""
    each = [0.0 if layer.lora is None else layer.lora.scaling for layer in layers]
    if len({layer.lora.scaling for layer in layers if layer.lora is not None}) == 1:
        return max(each, key=abs)
    return torch.tensor(each).repeat_interleave(torch.tensor([layer.linear.out_features for layer in layers]))


def _bias(linear: nn.Linear) -> Tensor:
    zeros = torch.zeros(linear.out_features, dtype=torch.bfloat16)
    return zeros if linear.bias is None else linear.bias.detach()
