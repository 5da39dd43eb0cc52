"""What this processor, with this build of torch, can do: found by short probes, once per process.

The one place that knows. A processor's name or flags say little (the build of torch, oneDNN's limits and
emulators count too), so the arithmetic itself is asked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

WIDTHS = ((576, 576), (1536, 200))  # [in, out] of products that are compared
PART = 32  # rows that AMX multiplies at once
WHOLE = 1024  # rows from which on AMX gives the bits of small products again


@dataclass(frozen=True)
class Rows:
    """How many rows a bf16 product may have, for a row to have the same bits in every product."""

    part: int = 0
    """Products of more rows are cut into parts of so many; 0: no product is cut."""
    whole: int = 0
    """Products of so many rows and more are not cut; 0: all are."""

    def sizes(self, rows: int) -> list[int]:
        """The rows of each part of a product of ``rows`` rows. No part is a single row, which would have bits
        of its own."""
        if not self.part or rows <= self.part or 0 < self.whole <= rows:
            return [rows]
        sizes = [self.part] * (rows // self.part)
        rest = rows % self.part
        if rest == 1:
            sizes[-1] -= 1
        return [*sizes, max(rest, 2)] if rest else sizes


def in_parts(product: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """``product(x)`` of ``x`` ``[..., in]``, cut by rows as this processor needs it: bf16 on a CPU."""
    if x.dtype != torch.bfloat16 or x.device.type != "cpu" or not product_rows().part:
        return product(x)
    rows = x.reshape(-1, x.shape[-1])
    sizes = product_rows().sizes(len(rows))
    if len(sizes) == 1:
        return product(x)
    return torch.cat([product(part) for part in rows.split(sizes)]).unflatten(0, x.shape[:-1])


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`, `in_parts`."""
    return in_parts(lambda rows: F.linear(rows, weight, bias), x)


class CutLinear(torch.autograd.Function):
    """`linear` with gradient; the backward pass, which owes nobody its bits, is not cut."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, weight)
        return linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        return (
            grad @ weight if ctx.needs_input_grad[0] else None,
            rows.t() @ x.flatten(0, -2) if ctx.needs_input_grad[1] else None,
            rows.sum(0) if ctx.needs_input_grad[2] else None,
        )


@cache
def can_block() -> bool:
    """Whether oneDNN is there and re-orders bf16 weights into blocks. It refuses on AVX2, say."""
    if not torch.backends.mkldnn.is_available():
        return False
    weight = torch.ones(32, 32, dtype=torch.bfloat16)
    try:
        blocked = torch.ops.mkldnn._reorder_linear_weight(weight, 8)
        torch.ops.mkldnn._linear_pointwise.default(weight[:8], blocked, None, "none", [], "")
    except (RuntimeError, AttributeError):  # not on this processor; not in this build
        return False
    return True


@cache
def bf16_speed() -> float:
    """How many times as fast as in fp32 bf16 products are, of a training step's mix of few and many rows."""
    total = {torch.bfloat16: 0.0, torch.float32: 0.0}
    with _one_thread():
        for rows, weighting in ((8, 10), (64, 4)):
            best = _seconds(rows, tuple(total))
            for dtype, seconds in best.items():
                total[dtype] += weighting * seconds
    return total[torch.float32] / total[torch.bfloat16]


def bf16_is_fast() -> bool:
    """Whether bf16 is the better choice here."""
    return bf16_speed() > 1.0


def _seconds(rows: int, dtypes: tuple[torch.dtype, ...]) -> dict[torch.dtype, float]:
    """Of a product of ``rows`` rows, in turn in each of ``dtypes``: the best of five, which a busy neighbour
    does not spoil."""
    given = {t: (torch.ones(rows, 576, dtype=t), torch.ones(1536, 576, dtype=t)) for t in dtypes}
    best = dict.fromkeys(dtypes, float("inf"))
    for _ in range(5):
        for dtype, (x, weight) in given.items():
            start = time.perf_counter()
            F.linear(x, weight)
            best[dtype] = min(best[dtype], time.perf_counter() - start)
    return best


@contextmanager
def _one_thread() -> Iterator[None]:
    """Arithmetic on one core: kernels are the same, and a second core that is busy delays nothing."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@cache
def product_rows() -> Rows:
    """The rule of this processor: row counts are cut where they give a row other bits."""
    if not bf16_is_fast():  # no AMX
        return Rows()
    with _one_thread():
        few, many = _same_bits(2, 8, 16), _same_bits(48, 100, 384)
        if many or not few:  # nothing to cut, or nothing that cutting would mend: `Exactness` will say so
            return Rows()
        return Rows(PART, WHOLE if _same_bits(WHOLE) else 0)


def _same_bits(*counts: int) -> bool:
    """Whether products of so many rows give each row the bits that it has among ``PART``."""
    generator = torch.Generator().manual_seed(0)
    for width, out in WIDTHS:
        weight = torch.randn(out, width, generator=generator).mul_(0.05).bfloat16()
        x = torch.randn(max(*counts, 2 * PART), width, generator=generator).bfloat16()
        parts = torch.cat([F.linear(rows, weight) for rows in x.split(PART)])
        if not all(torch.equal(F.linear(x[:count], weight), parts[:count]) for count in counts):
            return False
    return True


@cache
def kv_step() -> int:
    """The least step of key/value lengths at which masked keys change no bit."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(8, 2, n, 64, generator=generator).bfloat16() for n in (4, 192, 192))
    for step in (16, 32):
        if all(_same_attention(q, k, v, seen) for seen in range(step, 192, step)):
            return step
    return 64


def _same_attention(q: Tensor, k: Tensor, v: Tensor, seen: int) -> bool:
    """Whether attention over ``seen`` keys has the bits that it has over all of them, the others masked."""
    mask = torch.full((1, k.shape[2]), -torch.inf, dtype=q.dtype)
    mask[:, :seen] = 0.0
    short, long = (
        F.scaled_dot_product_attention(q, k[:, :, :n], v[:, :, :n], attn_mask=mask[:, :n])
        for n in (seen, k.shape[2])
    )
    return torch.equal(short, long)
