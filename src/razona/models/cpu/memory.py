"""Memory that is set aside and costs nothing until it is written to."""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor


def reserved(*shape: int, dtype: torch.dtype) -> Tensor:
    """A tensor whose pages exist from their first write on.

    A plain allocation may lie in huge pages (Linux with transparent_hugepage = always): one number written
    then takes 2 MiB, and rows that are written here and there take all that was set aside.
    """
    count = math.prod(shape)
    memory = mmap.mmap(-1, max(1, count) * dtype.itemsize)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):  # Linux
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(shape)
