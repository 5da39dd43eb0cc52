"""`razona merge`: one model of an adapter and its base, equal to the two of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_runs import grpo_config, model_folder, run_grpo
from transformers import AutoModelForCausalLM

from razona.cli import main
from razona.models import load


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The base, and a run that trained an adapter on it."""
    base, run = model_folder(tmp_path_factory.mktemp("model")), tmp_path_factory.mktemp("runs") / "lora"
    run_grpo(grpo_config(base, run, lora__r=4, optimizer__learning_rate=3e-2))
    return base, run


def test_merged_and_adapter_agree(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, run = folders
    assert main(["merge", str(run), "--output", str(tmp_path / "one"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said == {"adapter": str(run / "model"), "model": str(tmp_path / "one"), "dtype": "fp32"}
    ids = torch.arange(3, 40)[None]
    merged = AutoModelForCausalLM.from_pretrained(said["model"])
    with torch.no_grad():
        together = merged(ids).logits
        apart = load(str(run / "model"), dtype=torch.float32).model(ids).logits
        plain = load(str(base), dtype=torch.float32).model(ids).logits
    assert (together - apart).abs().max() < 1e-5 * together.abs().max()
    assert not torch.allclose(together, plain, atol=1e-3)
    prompt = torch.arange(3, 9)[None]
    again = load(str(run / "model"), dtype=torch.float32).model
    options = {"do_sample": False, "max_new_tokens": 20}
    assert torch.equal(merged.generate(prompt, **options), again.generate(input_ids=prompt, **options))


def test_beside_the_adapter_in_bf16(folders: tuple[Path, Path]) -> None:
    _, run = folders
    assert main(["merge", str(run / "model"), "--dtype", "bf16"]) == 0
    assert AutoModelForCausalLM.from_pretrained(run / "merged", dtype="auto").dtype == torch.bfloat16


def test_what_cannot_be_merged(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, run = folders
    for args, text in (
        ([str(base)], "holds a whole model and no adapter: there is nothing to merge"),
        ([str(tmp_path)], "holds no adapter_config.json"),
        ([], "razona merge has no adapter. Say which"),
        ([str(run), "--output", str(base)], "is there already, and would be lost"),
    ):
        assert main(["merge", *args]) == 2
        assert text in capsys.readouterr().err
