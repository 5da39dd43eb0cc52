"""Linear layers with oneDNN's blocked weights, for decoding on a CPU.

A decode step multiplies few rows, and the kernel spends half its time re-ordering each weight matrix. Blocked
once per rollout instead, the same product takes half the time and gives the same bits (two rows or more).
Layers that read the same input are blocked as one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

QKV = ("q_proj", "k_proj", "v_proj")
GATE_UP = ("gate_proj", "up_proj")


@contextmanager
def packed_linears(model: nn.Module, rows: int, *, join: bool) -> Iterator[None]:
    """Inside, every bf16 CPU linear layer of ``model`` runs on a blocked copy of its weight, made for
    ``rows`` rows; with ``join``, `joined` layers have one copy together and none of their own.

    The copies are gone afterwards: weights that an optimizer changes would leave them behind.
    """
    patched: list[tuple[nn.Module, str]] = []

    def patch(module: nn.Module, name: str, linears: Sequence[nn.Linear]) -> None:
        module.__dict__[name] = _packed(linears, rows)  # an attribute of the instance, before its class's own
        patched.append((module, name))

    together: set[object] = set()
    for module in model.modules():
        for names in (QKV, GATE_UP) if join else ():
            parts: list[Any] = [getattr(module, name, None) for name in names]
            if all(_packable(part) for part in parts):
                patch(module, _attribute(names), parts)
                together.update(parts)
    for module in model.modules():
        if _packable(module) and module not in together:
            patch(module, "forward", [module])  # type: ignore[list-item]
    try:
        yield
    finally:
        for module, name in patched:
            del module.__dict__[name]


def joined(module: nn.Module, names: tuple[str, ...], x: Tensor) -> Tensor:
    """The named layers of ``module`` on the same input, side by side."""
    together = module.__dict__.get(_attribute(names))
    if together is not None:
        return together(x)  # type: ignore[no-any-return]
    return torch.cat([getattr(module, name).forward(x) for name in names], -1)


def _attribute(names: tuple[str, ...]) -> str:
    return "packed_" + "_".join(names)


def _packable(module: object) -> bool:
    return (
        type(module) is nn.Linear
        and module.weight.device.type == "cpu"
        and module.weight.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
    )


def _packed(linears: Sequence[nn.Linear], rows: int) -> Callable[[Tensor], Tensor]:
    weight = torch.cat([linear.weight.detach() for linear in linears])
    weight = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    bias = None
    if any(linear.bias is not None for linear in linears):
        bias = torch.cat([_bias(linear) for linear in linears])
    apply = torch.ops.mkldnn._linear_pointwise

    def forward(x: Tensor) -> Tensor:
        return apply(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]

    return forward


def _bias(linear: nn.Linear) -> Tensor:
    zeros = linear.weight.new_zeros(linear.out_features)
    return zeros if linear.bias is None else linear.bias.detach()
