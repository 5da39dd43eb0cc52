"""What a processor can do decides how products are cut and in which numbers a run computes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_exact import exact_share, prompts_of, sample
from test_lora import adapted, policy_of as lora_policy_of
from tiny_models import tiny_model, tiny_tokenizer
from tiny_runs import grpo_config, run_grpo

from razona.build import precision
from razona.build.precision import resolved, with_precision
from razona.config import ModelConfig, OptimizerConfig
from razona.engines.native import NativeEngine
from razona.models.cpu import fast_path, linear, prepacked, processor
from razona.models.cpu.processor import PART, WHOLE, Rows, in_parts
from razona.policy import Policy
from razona.types import Sampling

AMX = Rows(PART, WHOLE)


def test_parts_are_of_one_class_and_never_a_single_row() -> None:
    for rows in range(1, 1100):
        sizes = AMX.sizes(rows)
        assert sum(sizes) == rows and Rows().sizes(rows) == [rows]
        if 1 < rows < WHOLE:
            assert all(2 <= size <= PART for size in sizes)
        else:
            assert sizes == [rows]
    assert max(Rows(PART).sizes(2000)) == PART  # none is whole


def test_cut_products_are_the_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "product_rows", lambda: AMX)
    monkeypatch.setattr(linear, "product_rows", lambda: AMX)
    plain, cut = (torch.nn.Linear(64, 48, dtype=torch.bfloat16) for _ in range(2))
    cut.load_state_dict(plain.state_dict())
    linear.patch_linears(cut, ExitStack())
    found = []
    for module in (plain, cut):
        x = torch.randn(3, 67, 64, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
        out = module(x)
        out.float().square().sum().backward()
        found.append((out, x.grad, module.weight.grad, module.bias.grad))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2 * one.detach().abs().max().item())


def with_amx(monkeypatch: pytest.MonkeyPatch, *, cut: bool) -> None:
    """Products whose bits depend on the class of their row count, as on AMX, and much more so: a product that
    is not cut shows."""
    real_linear, real_pointwise = F.linear, prepacked.pointwise
    real_addmm = torch.addmm

    def by_class(product: Callable[..., torch.Tensor], at: int) -> Callable[..., torch.Tensor]:
        def changed(*given: Any) -> torch.Tensor:
            out, x = product(*given), given[at]
            rows = x.numel() // x.shape[-1]
            odd = out.dtype == torch.bfloat16 and (rows == 1 or PART < rows < WHOLE)
            return out * 1.25 if odd else out

        return changed

    monkeypatch.setattr(F, "linear", by_class(real_linear, 0))
    monkeypatch.setattr(torch, "addmm", by_class(real_addmm, 1))
    monkeypatch.setattr(prepacked, "pointwise", by_class(real_pointwise, 0))
    rule = AMX if cut else Rows()
    for module in (processor, linear):
        monkeypatch.setattr(module, "product_rows", lambda: rule)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "plain"])
@pytest.mark.parametrize("arch", ["llama", "qwen2", "gemma2", "gpt2", "opt", "gpt_neox", "llama with LoRA"])
def test_every_product_is_cut(arch: str, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than 32 rows decoded together, and micro-batches of 33 to 1,023 tokens."""
    if not processor.bf16_is_fast():
        pytest.skip("bf16 is exact where it is fast")
    monkeypatch.setattr(fast_path, "PREPACK_FROM", 1 if packed else 10**9)
    for cut in (True, False):
        with monkeypatch.context() as patch:
            with_amx(patch, cut=cut)
            if arch == "llama with LoRA":
                policy = lora_policy_of(adapted())
            else:
                policy = Policy(tiny_model(arch), tiny_tokenizer(), optimizer=OptimizerConfig())
            groups = sample(policy, prompts_of(5, 20), Sampling(group_size=20, max_completion_length=12))
            for budget in (600, 100):
                share, _ = exact_share(policy, groups, budget=budget)
                assert share == 1.0 if cut else share < 0.5


def test_one_row_of_another_product_has_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """That the test above sees what is not cut."""
    with_amx(monkeypatch, cut=True)
    x, weight = torch.randn(40, 64).bfloat16(), torch.randn(8, 64).bfloat16()
    assert not torch.equal(F.linear(x, weight)[:32], F.linear(x[:32], weight))
    assert torch.equal(in_parts(lambda part: F.linear(part, weight), x)[:32], F.linear(x[:32], weight))


def test_the_probe_of_a_run_changes_nothing_and_says_what_it_found() -> None:
    policy = Policy(tiny_model(), tiny_tokenizer(), optimizer=OptimizerConfig())
    before = [p.clone() for p in policy.compute]
    torch.manual_seed(7)
    state = torch.get_rng_state()
    found = NativeEngine(policy, stop_token_ids=()).exactness
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(before, policy.compute, strict=True))
    assert all(p.grad is None for p in (*policy.masters, *policy.compute))
    assert found.holds == (found.max_abs == 0.0) and found.tokens == 288 and found.reused
    assert ("bit for bit here: " in str(found)) != found.holds
    in_fp32 = Policy(tiny_model(), tiny_tokenizer(), optimizer=OptimizerConfig(), precision="fp32")
    found = NativeEngine(in_fp32, stop_token_ids=()).exactness
    assert not found.holds and found.max_abs < 1e-3 and not found.reused and "ratio" not in str(found)


def test_precision_follows_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    for speed, expected in ((4.0, "bf16"), (1.1, "bf16"), (0.4, "fp32")):
        for module in (processor, precision):
            monkeypatch.setattr(module, "bf16_speed", lambda speed=speed: speed)
        assert resolved(ModelConfig(device="cpu")).precision == expected
        assert resolved(ModelConfig(precision="pure_bf16")).precision == "pure_bf16"


def test_a_resumed_run_keeps_its_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "model"
    tiny_model().save_pretrained(model)
    tiny_tokenizer().save_pretrained(model)
    for module in (processor, precision):
        monkeypatch.setattr(module, "bf16_speed", lambda: 0.1)
    config = grpo_config(model, tmp_path / "run", model__precision="auto", run__num_steps=1)
    _, printed = run_grpo(config)
    assert "numbers: fp32: bf16 products take 10.0 times as long as fp32 ones here" in printed
    for module in (processor, precision):
        monkeypatch.setattr(module, "bf16_speed", lambda: 9.0)
    again = grpo_config(model, tmp_path / "run", model__precision="auto", run__resume=True)
    config, why = with_precision(again)
    assert config.model.precision == "fp32" and why == "fp32: as the run began"
    config, why = with_precision(grpo_config(model, tmp_path / "new", model__precision="auto"))
    assert config.model.precision == "bf16" and "9.0 times as fast" in why
