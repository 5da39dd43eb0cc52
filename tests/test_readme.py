"""The Python blocks of README.md run as they are printed, with a tiny model and few steps."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tiny_runs import ROWS, grpo_config, lines, model_folder

from razona.objective import group_advantages

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def test_the_call_from_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(BLOCKS) == 2, "a block of README.md is not tested"
    model = model_folder(tmp_path / "tiny")
    monkeypatch.chdir(tmp_path)
    code = BLOCKS[0]
    for printed, here in (
        ('"HuggingFaceTB/SmolLM2-135M-Instruct"', repr(str(model))),
        ("num_steps=20", "num_steps=2"),
    ):
        assert code.count(printed) == 1, printed
        code = code.replace(printed, here)
    code = code.replace("run=RunConfig", "sampling=Sampling(max_completion_length=8), run=RunConfig")
    exec("from razona.types import Sampling\n" + code, {})
    assert [step["step"] for step in lines(tmp_path / "runs/razona/metrics.jsonl")] == [1, 2]


def test_the_changed_formula(tmp_path: Path) -> None:
    def my_advantages(rewards, *, reward_weights, loss_mask, **rest):  # type: ignore[no-untyped-def]
        seen.append(rewards.shape)
        return group_advantages(rewards, reward_weights=reward_weights, loss_mask=loss_mask, std="none")

    seen: list[tuple[int, ...]] = []
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(f'{{"prompt": "{row["prompt"]}"}}' for row in ROWS))
    config = grpo_config(
        model_folder(tmp_path / "tiny"), tmp_path / "run", data__path=str(data), rewards=["length"]
    )
    exec(BLOCKS[1], {"my_advantages": my_advantages, "config": config})
    assert seen == [(4, 4, 1)] * 2
