"""What README.md prints runs as it is printed: its Python with few steps, its commands, with a tiny model."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from tiny_runs import ROWS, grpo_config, lines, model_folder

from razona.cli import main
from razona.objective import group_advantages

README = Path(__file__).parent.parent / "README.md"
TEXT = README.read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)


REWARDS, *BLOCKS = blocks("python")
FIRST_RUN, SFT = (shlex.split(command.replace("\\\n", " ")) for command in blocks("sh"))


def test_it_is_short() -> None:
    assert len(TEXT.splitlines()) <= 150


def test_the_first_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = model_folder(tmp_path / "tiny")
    monkeypatch.chdir(tmp_path)
    (row,) = blocks("json")
    Path("train.jsonl").write_text(row)
    Path("my_rewards.py").write_text(REWARDS)
    assert main([*FIRST_RUN[1:], "--model", str(model)]) == 0
    printed = capsys.readouterr().out
    assert [step["step"] for step in lines(tmp_path / "runs/first/metrics.jsonl")] == [1, 2, 3, 4, 5]
    for line in ("optimises: 1 x right_and_brief, by GRPO", "clip: ratio of a token in [0.8, 1.2], but"):
        assert line in printed and line in TEXT


def test_the_sft_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_folder(tmp_path / "tiny")
    monkeypatch.chdir(tmp_path)
    Path("demonstrations.jsonl").write_text('{"prompt": "1 + 1 =", "completion": " 2"}\n')
    assert main([*SFT[1:], "--model", str(model)]) == 0
    assert (tmp_path / "runs/sft/model/config.json").exists()


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
