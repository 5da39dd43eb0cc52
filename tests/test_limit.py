"""The formulas of benchmarks/limit.py against worked values: SmolLM2-135M, 4 prompts of 150 tokens with 8
completions each, of 128 tokens on average, on 0.6 TFLOP/s and 40 GB/s."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

CONFIG = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}


def load_limit() -> ModuleType:
    path = Path(__file__).parent.parent / "benchmarks" / "limit.py"
    spec = importlib.util.spec_from_file_location("benchmarks_limit", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


limit = load_limit()
SHAPE = limit.shape_of(CONFIG)
MACHINE = limit.Machine(flops=0.6e12, bandwidth=40e9)
LENGTHS = tuple(4 + 8 * i for i in range(32))  # 4 .. 252, mean 128
UNEQUAL = [limit.Work(150, LENGTHS[q::4]) for q in range(4)]
EQUAL = [limit.Work(150, (128,) * 8)] * 4


def test_shape_of_smollm2() -> None:
    assert SHAPE.block_weights == 106_168_320
    assert SHAPE.head_weights == 28_311_552
    assert SHAPE.parameters == 134_515_008
    assert 2 * (SHAPE.block_weights + SHAPE.head_weights) == pytest.approx(269e6, rel=1e-3)
    assert SHAPE.attention == pytest.approx(69e3, rel=2e-3)


def test_worked_values_of_the_cpu_column() -> None:
    unshared = [limit.Work(150, (c,)) for work in UNEQUAL for c in work.completions]
    assert limit.prefill_flops(SHAPE, UNEQUAL) / MACHINE.flops == pytest.approx(0.22, abs=0.005)
    assert limit.prefill_flops(SHAPE, unshared) / MACHINE.flops == pytest.approx(1.74, abs=0.03)
    plain = limit.decode_seconds(SHAPE, UNEQUAL, MACHINE, shared_prompt_reads=False)
    assert plain == pytest.approx(2.5, abs=0.01)
    assert 0.95 * plain < limit.decode_seconds(SHAPE, UNEQUAL, MACHINE) < plain
    static = [limit.Work(150, (256,) * 8)] * 4  # nobody leaves before the longest has ended
    assert limit.decode_seconds(SHAPE, static, MACHINE) == pytest.approx(4.0, abs=0.07)
    assert limit.forward_flops(SHAPE, UNEQUAL) / MACHINE.flops == pytest.approx(2.2, abs=0.05)
    assert limit.executed_train_flops(SHAPE, EQUAL) == pytest.approx(4.14e12, abs=0.005e12)
    assert limit.executed_train_flops(SHAPE, EQUAL) / MACHINE.flops == pytest.approx(6.9, abs=0.05)
    assert limit.optimizer_seconds(SHAPE, MACHINE) == pytest.approx(0.10, abs=0.002)


def test_work_of_padded_unshared_rows_with_checkpointing() -> None:
    # 32 rows of 200 + 256 tokens, the head on every position: as if all were completion.
    padded = [limit.Work(0, (456,))] * 32
    flops = limit.executed_train_flops(SHAPE, padded, checkpointing=True)
    assert flops == pytest.approx(16.7e12, abs=0.05e12)


def test_limit_is_the_sum_of_its_phases_and_no_more_than_what_kernels_execute() -> None:
    whole = limit.limit(SHAPE, EQUAL, MACHINE)
    assert whole.total == whole.prefill + whole.decode + whole.train + whole.optimizer
    assert whole.prefill == limit.prefill_flops(SHAPE, EQUAL) / MACHINE.flops
    assert whole.decode == limit.decode_seconds(SHAPE, EQUAL, MACHINE)
    assert whole.train == limit.train_flops(SHAPE, EQUAL) / MACHINE.flops
    assert whole.optimizer == limit.optimizer_seconds(SHAPE, MACHINE)
    assert limit.train_flops(SHAPE, EQUAL) == 3 * limit.forward_flops(SHAPE, EQUAL)
    assert limit.train_flops(SHAPE, EQUAL) < limit.executed_train_flops(SHAPE, EQUAL)


def test_a_single_row_is_bound_by_reading_the_weights() -> None:
    one = [limit.Work(8, (4,))]
    read = 4 * 2 * (SHAPE.block_weights + SHAPE.head_weights)
    assert limit.decode_seconds(SHAPE, one, MACHINE) == pytest.approx(read / MACHINE.bandwidth, rel=0.01)


def test_a_lora_trains_its_own_weights_only() -> None:
    lora = limit.shape_of(CONFIG, lora=16)
    assert lora.adapter_weights == lora.parameters == 4_884_480  # as peft counts them
    assert lora.block_weights == SHAPE.block_weights
    frozen = SHAPE.block_weights * limit.row_tokens(EQUAL) + SHAPE.head_weights * limit.scored_tokens(EQUAL)
    whole, added = limit.train_flops(SHAPE, EQUAL), 6 * lora.adapter_weights * limit.row_tokens(EQUAL)
    assert limit.train_flops(lora, EQUAL) == whole - 2 * frozen + added
    assert limit.prefill_flops(lora, EQUAL) > limit.prefill_flops(SHAPE, EQUAL)
    assert limit.optimizer_seconds(lora, MACHINE) == 30 * lora.parameters / MACHINE.bandwidth
