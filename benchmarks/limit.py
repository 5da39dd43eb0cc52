"""The physical limit of a GRPO step: the time it must take on a machine of given arithmetic and memory speed.

It counts only work that no implementation can leave out: every real token once (no padding), a prompt once
for all completions, the head on completion tokens only. `measure_machine` measures the two speeds; the
formulas need no torch.

    python benchmarks/limit.py 2      # what this machine can do with 2 threads
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Shape:
    """What the formulas need to know of a dense decoder."""

    block_weights: int
    """Weights of the linear layers in all blocks (N_b)."""
    head_weights: int
    """Weights of the head, vocabulary x hidden (N_h)."""
    layers: int
    query_width: int
    """Query heads x head size (d_a)."""
    kv_width: int
    """Key/value heads x head size."""
    parameters: int
    """Trained parameters; a tied head counts once."""
    adapter_weights: int = 0
    """Weights of a LoRA on the linear layers of all blocks; 0 without one, and every weight is trained."""

    @property
    def attention(self) -> int:
        """FLOP of attention for one (query, key) pair, all layers: two products of d_a multiply-adds each."""
        return 4 * self.layers * self.query_width


@dataclass(frozen=True)
class Machine:
    """Two speeds: bf16 matrix products in FLOP/s (Pi), reading memory in bytes/s (beta)."""

    flops: float
    bandwidth: float


@dataclass(frozen=True)
class Work:
    """A prompt of `prompt` tokens and the lengths of its completions."""

    prompt: int
    completions: tuple[int, ...]


@dataclass(frozen=True)
class Limit:
    """Seconds by phase."""

    prefill: float
    decode: float
    train: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.prefill + self.decode + self.train + self.optimizer


def shape_of(config: Mapping[str, Any], *, lora: int = 0) -> Shape:
    """Shape of a Llama-like decoder (gated MLP, no biases) from its config.json, with a LoRA of that rank on
    all linear layers of its blocks."""
    hidden, layers, heads = config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"]
    head_size = config.get("head_dim") or hidden // heads
    query, kv = heads * head_size, (config.get("num_key_value_heads") or heads) * head_size
    inner = config["intermediate_size"]
    block = layers * (2 * hidden * query + 2 * hidden * kv + 3 * hidden * inner)
    head = config["vocab_size"] * hidden
    tables = head if config.get("tie_word_embeddings") else 2 * head
    norms = (2 * layers + 1) * hidden
    adapter = lora * layers * (2 * (hidden + query) + 2 * (hidden + kv) + 3 * (hidden + inner))
    return Shape(block, head, layers, query, kv, adapter or block + tables + norms, adapter)


def completion_pairs(work: Sequence[Work]) -> int:
    """(query, key) pairs in which a completion token is the query."""
    return sum(c * w.prompt + c * (c + 1) // 2 for w in work for c in w.completions)


def prompt_pairs(work: Sequence[Work]) -> int:
    """(query, key) pairs within the prompts, each prompt once."""
    return sum(w.prompt * (w.prompt + 1) // 2 for w in work)


def scored_tokens(work: Sequence[Work]) -> int:
    """Completion tokens (S)."""
    return sum(sum(w.completions) for w in work)


def row_tokens(work: Sequence[Work]) -> int:
    """Tokens with each prompt counted once (T_sh)."""
    return sum(w.prompt for w in work) + scored_tokens(work)


def prefill_flops(shape: Shape, work: Sequence[Work]) -> float:
    """Each prompt once, the head at its last position."""
    prompts = sum(w.prompt for w in work)
    return (
        2 * (shape.block_weights + shape.adapter_weights) * prompts
        + 2 * shape.head_weights * len(work)
        + shape.attention * prompt_pairs(work)
    )


def decode_seconds(
    shape: Shape, work: Sequence[Work], machine: Machine, *, shared_prompt_reads: bool = True
) -> float:
    """All completions side by side, rows leaving as they end; each step bound by arithmetic or by memory.

    A step reads every bf16 weight once, every row's own KV, and the prompt's KV once for its group
    (`shared_prompt_reads`) or once for every row.
    """
    weights = shape.block_weights + shape.head_weights + shape.adapter_weights
    kv_bytes = 2 * 2 * shape.kv_width * shape.layers  # keys and values of one token, bf16
    seconds = 0.0
    for t in range(1, max((max(w.completions, default=0) for w in work), default=0) + 1):
        live = [(w.prompt, sum(c >= t for c in w.completions)) for w in work]
        rows = sum(n for _, n in live)
        flops = 2 * weights * rows + shape.attention * sum((p + t) * n for p, n in live)
        prompts = sum(p * (min(n, 1) if shared_prompt_reads else n) for p, n in live)
        read = 2 * weights + kv_bytes * (prompts + t * rows)
        seconds += max(flops / machine.flops, read / machine.bandwidth)
    return seconds


def forward_flops(shape: Shape, work: Sequence[Work]) -> float:
    """One forward pass over the shared-prefix rows, the head on completion tokens only."""
    return (
        2 * (shape.block_weights + shape.adapter_weights) * row_tokens(work)
        + 2 * shape.head_weights * scored_tokens(work)
        + shape.attention * (prompt_pairs(work) + completion_pairs(work))
    )


def train_flops(shape: Shape, work: Sequence[Work]) -> float:
    """Forward and backward: a backward pass is two forward passes, or one for weights that are not trained,
    whose own gradient nobody needs."""
    frozen = shape.block_weights * row_tokens(work) + shape.head_weights * scored_tokens(work)
    return 3 * forward_flops(shape, work) - (2 * frozen if shape.adapter_weights else 0)


def executed_train_flops(
    shape: Shape, work: Sequence[Work], *, checkpointing: bool = False, head_passes: int = 4
) -> float:
    """What today's kernels execute: flash attention's backward and a chunked head recompute their forward."""
    again = int(checkpointing)
    return (
        (3 + again) * 2 * shape.block_weights * row_tokens(work)
        + head_passes * 2 * shape.head_weights * scored_tokens(work)
        + (3.5 + again) * shape.attention * (prompt_pairs(work) + completion_pairs(work))
    )


def optimizer_seconds(shape: Shape, machine: Machine) -> float:
    """AdamW: p, m, v in fp32 read and written (24 bytes), the gradient (4), a bf16 copy of p (2)."""
    return 30 * shape.parameters / machine.bandwidth


def limit(shape: Shape, work: Sequence[Work], machine: Machine) -> Limit:
    """The limit of one step with one update, no reference model and no old-policy pass."""
    return Limit(
        prefill=prefill_flops(shape, work) / machine.flops,
        decode=decode_seconds(shape, work, machine),
        train=train_flops(shape, work) / machine.flops,
        optimizer=optimizer_seconds(shape, machine),
    )


def measure_machine(threads: int) -> Machine:
    """Best of several: a bf16 product of 4096 x 2048 x 2048; the sum of 1 GB of fp32, beyond any cache."""
    import torch

    torch.set_num_threads(threads)

    def best(work: Callable[[], object], times: int) -> float:
        work()
        seconds = []
        for _ in range(times):
            start = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - start)
        return min(seconds)

    a, b = torch.randn(4096, 2048).bfloat16(), torch.randn(2048, 2048).bfloat16()
    flops = 2 * 4096 * 2048 * 2048 / best(lambda: torch.nn.functional.linear(a, b), 20)
    memory = torch.ones(2**28)
    bandwidth = 4 * memory.numel() / best(memory.sum, 8)
    return Machine(flops, bandwidth)


if __name__ == "__main__":
    print(json.dumps(asdict(measure_machine(threads=int(sys.argv[1])))))
