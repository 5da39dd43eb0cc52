"""Helpers that several test files share: ``from conftest import tiny_tokenizer``."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "3000")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from hub_server import Hub, running_hub, use_hub
from hypothesis import settings
from tiny_models import tiny_model
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

settings.register_profile("razona", deadline=None)  # a busy machine is no failure
settings.load_profile("razona")

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ROUNDING = 0.1  # nats, of a tiny model with sharp logits in bf16, on average
NO_GPU = "needs a CUDA device"
SPECIAL = ("<|im_start|>", "<|im_end|>", "<s>")


def tiny_tokenizer(*, bos: bool = False, chat_template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """Byte-level BPE of 256 bytes, two merges ("bc" and two newlines) and three special tokens.

    The end token is <|im_end|>, and pad is the same. ``bos``: <s> is put in front of plain texts.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*alphabet, "bc", "ĊĊ"])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[("b", "c"), ("Ċ", "Ċ")]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    if bos:
        core.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", core.token_to_id("<s>"))]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        bos_token="<s>" if bos else None,
        name_or_path="tiny",
    )
    tokenizer.chat_template = chat_template
    return tokenizer


@cache
def bf16_is_exact() -> bool:
    """Whether in bf16 sampler and trainer must agree bit for bit here: bf16 has kernels of its own, and the
    engine's probe says so. Where bf16 is emulated a few in a thousand tokens may differ.
    """
    from razona.config import OptimizerConfig
    from razona.engines.native import NativeEngine
    from razona.models.cpu.processor import bf16_is_fast
    from razona.policy import Policy

    if not bf16_is_fast():
        return False
    policy = Policy(tiny_model(hidden_size=576), None, optimizer=OptimizerConfig())
    policy.tokenizer = tiny_tokenizer()
    return NativeEngine(policy, stop_token_ids=()).exactness.holds


def in_bf16() -> dict[str, Any]:
    """What `check_engine` may ask of an engine in bf16: equal bits where this machine can, else closeness."""
    return {"exact": True} if bf16_is_exact() else {"tolerance": 10 * ROUNDING}


def is_on_policy(step: Mapping[str, Any]) -> bool:
    """Of a step's metrics: whether the sampler's log-probs are the trainer's, bit for bit where this machine
    can, and elsewhere but for rounding."""
    if bf16_is_exact():
        return bool(step["mismatch/exact_share"] == 1.0 and step["mismatch/mean_abs"] == 0.0)
    return bool(step["mismatch/mean_abs"] < ROUNDING)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked gpu run where there is CUDA only."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=NO_GPU))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what could not run: a green line must not be taken for tests on a GPU."""
    skipped = terminalreporter.stats.get("skipped", [])
    names = [report.nodeid for report in skipped if NO_GPU in str(report.longrepr)]
    if names:
        terminalreporter.write_line(f"not run here (no CUDA device): {len(names)} GPU tests")
        for name in names:
            terminalreporter.write_line(f"  {name}")


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return tiny_tokenizer()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub on this machine, which this process asks until the test ends."""
    with running_hub() as hub:
        use_hub(hub, monkeypatch)
        yield hub
