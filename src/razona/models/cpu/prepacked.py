"""Linear layers with oneDNN's blocked weights, for decoding on a CPU.

A decode step multiplies few rows, and the kernel spends half its time re-ordering each weight matrix. Blocked
once per rollout instead, the same product takes half the time and gives the same bits (two rows or more).
Layers that read the same input are blocked as one, with the LoRA on them. A 4-bit layer is de-quantized for
it, so that its copy takes 2 bytes per weight while the rollout lasts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from razona.models.cpu.linear import GATE_UP, QKV, Linear, Together, attribute, linear_of
from razona.models.cpu.processor import can_block, in_parts


def pointwise(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x W^T + b`` on a blocked weight. Looked up when called: some builds of torch have no such thing."""
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]


@contextmanager
def prepacked_linears(model: nn.Module, rows: int, *, join: bool) -> Iterator[None]:
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
                patch(module, attribute(names), layers)
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


def _packable(module: object) -> Linear | None:
    """``module`` as a layer to pack; None where it is none."""
    layer = linear_of(module)
    if layer is None or not can_block():
        return None
    weight = layer.linear.weight
    fits = weight.dtype in (torch.bfloat16, torch.uint8) and weight.device.type == "cpu"  # uint8: in 4 bits
    return layer if fits and (layer.lora is None or layer.lora.is_fused) else None


def _packed(layers: Sequence[Linear], rows: int) -> Callable[[Tensor], Tensor]:
    """The layers' outputs side by side."""
    made = Together(layers, torch.bfloat16)
    product = _product(made.weight, made.bias, rows)
    if made.down is None:
        return product
    down = _product(made.down, None, rows)
    return lambda x: product(torch.cat([x, down(x)], -1))


def _product(weight: Tensor, bias: Tensor | None, rows: int) -> Callable[[Tensor], Tensor]:
    """`razona.models.cpu.processor.linear` on a blocked copy of ``weight``."""
    blocked = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    return lambda x: in_parts(lambda part: pointwise(part, blocked, bias), x)
