"""fp32 masters of bf16 parameters, and the fp32 sums of their gradients over the micro-batches of an update.

Autograd hands a parameter's gradient on in the parameter's dtype, and a hook adds it to the sum. A backward
pass of ours whose gradient is large, or mostly zero, adds to the sum itself (what Megatron-LM calls
``main_grad``), and hands autograd nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

ADDED_AT_ONCE = 2**19  # a sum of two dtypes copies one of them first: a copy this small stays in the cache


def follow(parameter: nn.Parameter, master: nn.Parameter) -> Any:
    """From now on the gradients of ``parameter`` add up in ``master.grad``. Returns the hook's handle."""
    parameter.master = master  # type: ignore[attr-defined]

    def hook(parameter: Tensor) -> None:
        if parameter.grad is None:  # the backward pass has added to the sum itself
            return
        if master.grad is None:
            master.grad = parameter.grad.float().contiguous()
        else:
            total, found = (x.flatten().split(ADDED_AT_ONCE) for x in (master.grad, parameter.grad))
            torch._foreach_add_(total, found)
        parameter.grad = None

    return parameter.register_post_accumulate_grad_hook(hook)


def unfollow(parameter: nn.Parameter, handle: Any) -> None:
    handle.remove()
    del parameter.master  # type: ignore[attr-defined]


def gradient_sum(parameter: Tensor) -> Tensor | None:
    """Where the gradient of ``parameter`` adds up, in its shape; None if that is autograd's matter."""
    master: nn.Parameter | None = getattr(parameter, "master", None)
    if master is None:
        return None
    if master.grad is None:
        master.grad = torch.zeros_like(master)
    return master.grad
