"""What a resumed run does is, byte for byte, what the uninterrupted one would have done."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import (
    GRPO_TABLE,
    ROWS,
    contents,
    even,
    grpo_config,
    lines,
    model_folder,
    run_grpo,
    run_sft,
    sft_config,
    varied,
)

from razona.cli import main
from razona.errors import CheckpointError, ConfigError
from razona.run.checkpoint import newest_checkpoint, what_is_wrong

HELD_OUT = [{"prompt": f"And {i}?", "answer": str(i)} for i in range(5)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("models") / "llama")


class Stopping:
    """`varied`, that sends Ctrl-C, or fails, when called for the ``at``-th time."""

    __name__ = "varied"

    def __init__(self, at: int, *, fail: bool = False) -> None:
        self.at, self.fail, self.calls = at, fail, 0

    def __call__(self, *, completion_ids: list[list[int]]) -> list[float]:
        self.calls += 1
        if self.calls == self.at:
            if self.fail:
                raise RuntimeError("the power went out")
            os.kill(os.getpid(), signal.SIGINT)
        return varied(completion_ids=completion_ids)


# Eight rows, three a step: the third step of four crosses the border of epochs.
RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "fp32": {"model__precision": "fp32", "sampling__top_p": 0.9},
    "pure_bf16": {"model__precision": "pure_bf16"},
    "several updates": {"minibatches_per_rollout": 3, "epochs_per_rollout": 2},
    "kl": {"objective__kl_coef": 0.1},
    "kl, several updates": {"objective__kl_coef": 0.1, "objective__kl_estimator": "k3_weighted",
                            "minibatches_per_rollout": 2, "epochs_per_rollout": 2},
    "measured kl": {"measure_kl_every": 3},
    "eval": {"eval__every": 3, "eval__samples": 2},
    "eval at the end": {"objective__name": "dr_grpo"},
    "refreshed reference": {"objective__kl_coef": 0.1, "objective__refresh_reference_every": 1},
    "reference refreshed in the middle": {"objective__kl_coef": 0.1, "objective__refresh_reference_every": 2},
    "gspo": {"objective__name": "gspo", "minibatches_per_rollout": 3, "objective__overlong_filter": True},
    "schedule": {"optimizer__schedule": "cosine", "optimizer__warmup_steps": 1,
                 "optimizer__weight_decay": 0.1},
    "in order": {"data__shuffle": False},
}  # fmt: skip


def parts_of(name: str) -> dict[str, Any]:
    return {"eval_rows": HELD_OUT, "eval_reward_fns": [even]} if name.startswith("eval") else {}


@pytest.mark.parametrize("name", RUNS)
def test_grpo_stopped_by_ctrl_c_and_resumed(model: Path, tmp_path: Path, name: str) -> None:
    """After 2 of 4 steps."""
    options = {"run__num_steps": 4, "prompts_per_step": 3, **RUNS[name]}
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    run_grpo(grpo_config(model, whole, **options), **parts_of(name))
    result, printed = run_grpo(
        grpo_config(model, halves, **options), **parts_of(name), reward_fns=[Stopping(2)]
    )
    assert result["interrupted"] and result["step"] == 2 and "finishing this step" in printed
    assert newest_checkpoint(halves / "checkpoints") == (halves / "checkpoints/step-000002", [])
    assert contents(halves)["metrics.jsonl"] != contents(whole)["metrics.jsonl"]
    result, printed = run_grpo(grpo_config(model, halves, **options, run__resume=True), **parts_of(name))
    assert not result["interrupted"] and "resumed from step-000002" in printed
    assert contents(halves) == contents(whole)


@pytest.mark.parametrize("name", ["plain", "eval", "kl, several updates", "refreshed reference"])
def test_grpo_that_failed_and_resumed(model: Path, tmp_path: Path, name: str) -> None:
    """It had gone on after its last checkpoint: those lines are cut off and written again."""
    options = {"run__num_steps": 5, "prompts_per_step": 3, "run__save_every": 2, **RUNS[name]}
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    run_grpo(grpo_config(model, whole, **options), **parts_of(name))
    with pytest.raises(ValueError, match="the power went out"):
        run_grpo(grpo_config(model, halves, **options), **parts_of(name), reward_fns=[Stopping(4, fail=True)])
    assert [step["step"] for step in lines(halves / "metrics.jsonl")] == [1, 2, 3]
    run_grpo(grpo_config(model, halves, **options, run__resume=True), **parts_of(name))
    assert contents(halves) == contents(whole)


def test_grpo_made_longer(model: Path, tmp_path: Path) -> None:
    """num_steps may grow when the learning rate is constant."""
    options = {"prompts_per_step": 3, "eval__every": 2}
    parts = parts_of("eval")
    run_grpo(grpo_config(model, tmp_path / "whole", **options, run__num_steps=4), **parts)
    run_grpo(grpo_config(model, tmp_path / "halves", **options, run__num_steps=2), **parts)
    again = grpo_config(model, tmp_path / "halves", **options, run__num_steps=4, run__resume=True)
    run_grpo(again, **parts)
    assert contents(tmp_path / "halves") == contents(tmp_path / "whole")


def test_a_finished_run_resumed_changes_nothing(model: Path, tmp_path: Path) -> None:
    run_grpo(grpo_config(model, tmp_path / "run"))
    before = contents(tmp_path / "run")
    result, _ = run_grpo(grpo_config(model, tmp_path / "run", run__resume=True))
    assert result["step"] == 2 and contents(tmp_path / "run") == before


@pytest.mark.parametrize(
    "options", [{}, {"objective__kl_coef": 0.1, "objective__refresh_reference_every": 1}]
)
def test_resume_with_nothing_there_begins_at_step_0(
    model: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    """An empty folder, and one of a run that died in its first step; it is said."""
    run_grpo(grpo_config(model, tmp_path / "whole", **options))
    again = grpo_config(model, tmp_path / "again", run__resume=True, **options)
    with pytest.raises(ValueError, match="the power went out"):
        run_grpo(again, reward_fns=[Stopping(1, fail=True)])
    if options:  # it may have died between the refresh and the first record
        shutil.copy(tmp_path / "whole/reference.safetensors", tmp_path / "again/reference.safetensors")
    _, printed = run_grpo(again)
    assert f"nothing to resume in {tmp_path / 'again'}: starting at step 0" in printed
    assert contents(tmp_path / "again") == contents(tmp_path / "whole")
    _, printed = run_grpo(grpo_config(model, tmp_path / "fresh"))
    assert "nothing to resume" not in printed


def test_resume_wipes_no_records_for_want_of_a_checkpoint(model: Path, tmp_path: Path) -> None:
    run, options = tmp_path / "run", {"run__num_steps": 3, "run__save_every": 2}
    with pytest.raises(ValueError, match="the power went out"):
        run_grpo(grpo_config(model, run, **options), reward_fns=[Stopping(2, fail=True)])
    before = contents(run)
    again = grpo_config(model, run, **options, run__resume=True)
    with pytest.raises(CheckpointError, match=r"records of 1 steps and no checkpoint .*none was written"):
        run_grpo(again)
    assert contents(run) == before
    _, printed = run_grpo(grpo_config(model, run, **options, run__overwrite=True))
    assert "is now" in printed
    for checkpoint in (run / "checkpoints").iterdir():
        (checkpoint / "COMPLETE").unlink()
    before = contents(run)
    with pytest.raises(
        CheckpointError, match=r"records of 3 steps.*Skipped.*no COMPLETE file.*--run\.overwr"
    ):
        run_grpo(again)
    assert contents(run) == before


def test_a_new_run_takes_no_checkpoint_that_lies_there(model: Path, tmp_path: Path) -> None:
    run_grpo(grpo_config(model, tmp_path / "old"))
    (tmp_path / "new").mkdir()
    (tmp_path / "old/checkpoints").rename(tmp_path / "new/checkpoints")
    with pytest.raises(ConfigError, match="already holds a run"):
        run_grpo(grpo_config(model, tmp_path / "new"))


def test_a_run_folder_may_move(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its name may be spelled in another way."""
    options = {"run__num_steps": 3, "measure_kl_every": 1}
    run_grpo(grpo_config(model, tmp_path / "whole", **options))
    run_grpo(grpo_config(model, tmp_path / "here", **{**options, "run__num_steps": 2}))
    (tmp_path / "here").rename(tmp_path / "there")
    monkeypatch.chdir(tmp_path)
    run_grpo(grpo_config(model, Path("there"), **options, run__resume=True))
    assert contents(tmp_path / "there") == contents(tmp_path / "whole")


def test_the_same_files_by_another_name(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, other = tmp_path / "rows.jsonl", tmp_path / "other.jsonl"
    for path in (data, other):
        path.write_text("\n".join(json.dumps(row) for row in ROWS))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").symlink_to(model)
    run_grpo(grpo_config(model, tmp_path / "whole", run__num_steps=3, data__path="rows.jsonl"), rows=None)
    run_grpo(grpo_config(model, tmp_path / "run", run__num_steps=2, data__path="rows.jsonl"), rows=None)
    options = {"run__num_steps": 3, "run__resume": True, "model__name": "tiny/"}
    with pytest.raises(CheckpointError, match=r"data.path: it was 'rows.jsonl' and is 'other.jsonl'"):
        run_grpo(grpo_config(model, tmp_path / "run", data__path="other.jsonl", **options), rows=None)
    run_grpo(grpo_config(model, tmp_path / "run", data__path=str(data), **options), rows=None)
    assert contents(tmp_path / "run") == contents(tmp_path / "whole")


@pytest.mark.parametrize("method", ["grpo", "sft"])
def test_every_step_keeps_its_line_of_timings(model: Path, tmp_path: Path, method: str) -> None:
    make, run = (grpo_config, run_grpo) if method == "grpo" else (sft_config, run_sft)
    run(make(model, tmp_path / "run", run__num_steps=2))
    run(make(model, tmp_path / "run", run__num_steps=4, run__save_every=1, run__resume=True))
    timings = lines(tmp_path / "run/timings.jsonl")
    assert [line["step"] for line in timings] == [1, 2, 3, 4] and "checkpoint" in timings[-1]


def test_a_damaged_checkpoint_is_passed_over(model: Path, tmp_path: Path) -> None:
    options = {"run__num_steps": 4, "run__save_every": 1, "run__keep_checkpoints": 3}
    run_grpo(grpo_config(model, tmp_path / "run", **options))
    whole = contents(tmp_path / "run")
    newest = tmp_path / "run/checkpoints/step-000004"
    (newest / "policy.safetensors").write_bytes(b"half of it")
    (tmp_path / "run/checkpoints/step-000003/COMPLETE").unlink()
    _, printed = run_grpo(grpo_config(model, tmp_path / "run", **options, run__resume=True))
    assert "Skipped the checkpoint" in printed and "resumed from step-000002" in printed
    assert contents(tmp_path / "run") == whole and what_is_wrong(newest) is None


@pytest.mark.parametrize("options", [{}, {"model__precision": "fp32"}, {"optimizer__schedule": "linear"}])
def test_sft_stopped_and_resumed(model: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    """Three rows a step of eight, so that the third step crosses the border of epochs."""
    from razona.train import sft

    options = {"run__num_steps": 4, **options}
    run_sft(sft_config(model, tmp_path / "whole", **options))
    original, calls = sft.update, []

    def update(*args: Any, **kwargs: Any) -> dict[str, float]:
        calls.append(1)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sft, "update", update)
        result, _ = run_sft(sft_config(model, tmp_path / "halves", **options))
    assert result["interrupted"] and result["step"] == 2
    run_sft(sft_config(model, tmp_path / "halves", **options, run__resume=True))
    assert contents(tmp_path / "halves") == contents(tmp_path / "whole")


def test_sft_made_longer(model: Path, tmp_path: Path) -> None:
    run_sft(sft_config(model, tmp_path / "whole", run__num_steps=4))
    run_sft(sft_config(model, tmp_path / "halves", run__num_steps=2))
    run_sft(sft_config(model, tmp_path / "halves", run__num_steps=4, run__resume=True))
    assert contents(tmp_path / "halves") == contents(tmp_path / "whole")


# Real processes.

COMMON = f"""
[model]
name = "MODEL"
[data]
path = "rows.jsonl"
[sampling]
group_size = 4
max_completion_length = 12
stop_token_ids = {GRPO_TABLE["sampling"]["stop_token_ids"]}
[optimizer]
learning_rate = 1e-3
[run]
save_every = 1
print_every = 0
"""
REWARD = """
import time
def varied(completion_ids):
    time.sleep(SECONDS)
    return [sum(ids) % 97 / 97 for ids in completion_ids]
"""


def prepare(folder: Path, model: Path, *, seconds: float) -> None:
    """A folder to start `razona grpo run.toml` in."""
    folder.mkdir()
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (folder / "mine.py").write_text(REWARD.replace("SECONDS", str(seconds)))
    top = 'rewards = ["mine.py:varied"]\nprompts_per_step = 3\n'
    (folder / "run.toml").write_text(top + COMMON.replace("MODEL", str(model)))


def command(steps: int, out: str = "run") -> list[str]:
    flags = ["--run.num-steps", str(steps), "--run.output-dir", out, "--run.resume"]
    return ["grpo", "run.toml", *flags]


def start(folder: Path, steps: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "razona", *command(steps)],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def wait_for_a_step(process: subprocess.Popen[str]) -> None:
    """Until the process says that it has done one."""
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line)
        if line.startswith("step "):
            return
    raise AssertionError(f"it ended with {process.wait()}: {''.join(said)}")


def test_ctrl_c_to_a_process(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 130, a whole checkpoint of the step it was in, and the same bytes once resumed."""
    folder = tmp_path / "work"
    prepare(folder, model, seconds=0.2)
    process = start(folder, 100_000)
    wait_for_a_step(process)
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 130, printed
    assert "Resume with: the same command and --run.resume" in printed
    steps = lines(folder / "run/metrics.jsonl")[-1]["step"]
    newest, notices = newest_checkpoint(folder / "run/checkpoints")
    assert newest is not None and newest.name == f"step-{steps:06d}" and not notices

    monkeypatch.chdir(folder)
    (folder / "mine.py").write_text(REWARD.replace("SECONDS", "0"))
    assert main(command(steps + 2)) == 0
    assert main(command(steps + 2, out="whole")) == 0
    assert contents(folder / "run") == contents(folder / "whole")


@pytest.mark.slow
def test_kill_9_at_ten_random_moments(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run with a checkpoint after each step, killed ten times on its way."""
    folder = tmp_path / "work"
    prepare(folder, model, seconds=0)
    chance = random.Random(time.time_ns())
    done, moments = 0, []
    for kill in range(10):
        process = start(folder, 100_000)
        wait_for_a_step(process)
        time.sleep(chance.uniform(0.0, 0.25))
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL, f"it had ended before kill {kill}"
        newest, _ = newest_checkpoint(folder / "run/checkpoints")
        assert newest is not None and int(newest.name[-6:]) >= done, "a step that was saved is lost"
        done = int(newest.name[-6:])
        half = [p.name for p in newest.parent.iterdir() if p.name.startswith(".") or what_is_wrong(p)]
        moments.append((done, half))
    steps = done + 3
    process = start(folder, steps)
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == 0 and f"resumed from step-{done:06d}" in printed, printed
    print("steps done and half-written checkpoints at each kill:", moments)

    monkeypatch.chdir(folder)
    assert main(command(steps, out="whole")) == 0
    assert contents(folder / "run") == contents(folder / "whole"), moments
