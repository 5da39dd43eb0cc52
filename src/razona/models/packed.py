"""Linear layers with oneDNN's blocked weights, for decoding on a CPU.

A decode step multiplies few rows, and the kernel spends half its time re-ordering each weight matrix. Blocked
once per rollout instead, the same product takes half the time and gives the same bits (two rows or more).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def packed_linears(model: nn.Module, rows: int) -> Iterator[None]:
    """Inside, every bf16 CPU linear layer of ``model`` runs on a blocked copy of its weight, made for
    ``rows`` rows.

    The copies are gone afterwards: weights that an optimizer changes would leave them behind.
    """
    linears = [m for m in model.modules() if type(m) is nn.Linear and _packable(m.weight)]
    for linear in linears:
        linear.__dict__["forward"] = _packed(linear, rows)  # before the class's own
    try:
        yield
    finally:
        for linear in linears:
            del linear.__dict__["forward"]


def _packable(weight: Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
    )


def _packed(linear: nn.Linear, rows: int) -> Callable[[Tensor], Tensor]:
    weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), rows)
    bias = linear.bias
    apply = torch.ops.mkldnn._linear_pointwise

    def forward(x: Tensor) -> Tensor:
        return apply(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]

    return forward
