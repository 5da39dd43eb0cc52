"""The run folder, the timer and the console."""

from __future__ import annotations

import dataclasses
import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from razona.config import DataConfig, GRPOConfig, OptimizerConfig, RunConfig
from razona.errors import CheckpointError, ConfigError
from razona.rewards import bind
from razona.rollout.records import rollout_records
from razona.run.console import Console, shorten
from razona.run.folder import Phases, RunFolder, json_line, truncate_jsonl
from razona.types import Completion, Group, Prompt


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def records(step: int) -> list[dict[str, Any]]:
    prompt = Prompt(id=7, input=[{"role": "user", "content": "¿2+2?"}], token_ids=(1, 2), columns={})
    completions = tuple(
        Completion((4, 5), (-0.1, -0.2), text, "stop" if text == "4" else "length", policy_version=step)
        for text in ("4", "[bold]5[/bold] \x1b[31m")
    )
    rewards = torch.tensor([[[1.0, math.nan], [0.0, 0.5]]], dtype=torch.float64)
    bound = bind([lambda completions: []] * 2, columns=[], names=["correct", "format"])
    return rollout_records(step, [Group(prompt, completions)], rewards, bound, torch.tensor([1.0, -1.0]))


# -- the folder


def test_a_folder_that_holds_a_run_is_refused(tmp_path: Path) -> None:
    config = GRPOConfig()
    RunFolder(tmp_path / "run").write_config(config, model="m", data_fingerprint="f")
    with pytest.raises(ConfigError, match=r"already holds a run\. Go on with it \(--run\.resume\)"):
        RunFolder(tmp_path / "run")
    RunFolder(tmp_path / "run", resume=True)


def test_an_empty_folder_and_one_with_other_things_are_taken(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    RunFolder(tmp_path).log(0, {"loss": 1.0})
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_overwrite_moves_the_old_run_aside(tmp_path: Path) -> None:
    for n in range(3):
        run = RunFolder(tmp_path / "run", overwrite=True)
        run.log(0, {"n": n})
        run.close()
    assert lines(tmp_path / "run" / "metrics.jsonl") == [{"step": 0, "n": 2}]
    assert lines(tmp_path / "run.old-1" / "metrics.jsonl") == [{"step": 0, "n": 0}]
    assert lines(tmp_path / "run.old-2" / "metrics.jsonl") == [{"step": 0, "n": 1}]
    assert run.moved == tmp_path / "run.old-2"


def test_options_that_exclude_each_other_and_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="resume and overwrite exclude each other"):
        RunFolder(tmp_path / "run", resume=True, overwrite=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        RunFolder(tmp_path / "file")


# -- config.json


def test_config_json_holds_the_resolved_config(tmp_path: Path) -> None:
    config = GRPOConfig(rewards=("exact_answer",), data=DataConfig(rename={"a": "b"}))
    RunFolder(tmp_path).write_config(config, model="m", data_fingerprint="f")
    stored = json.loads((tmp_path / "config.json").read_text())
    assert stored["model"] == "m" and stored["data_fingerprint"] == "f" and stored["razona"]
    assert stored["config"] == json.loads(json.dumps(dataclasses.asdict(config)))


def test_a_resumed_run_with_the_same_config_passes(tmp_path: Path) -> None:
    config = GRPOConfig(rewards=("exact_answer",), optimizer=OptimizerConfig(betas=(0.9, 0.95)))
    RunFolder(tmp_path).write_config(config, model="m", data_fingerprint="f")
    more = dataclasses.replace(config, run=RunConfig(num_steps=500, resume=True, save_every=7))
    RunFolder(tmp_path, resume=True).write_config(more, model="m", data_fingerprint="f")
    assert json.loads((tmp_path / "config.json").read_text())["config"]["run"]["num_steps"] == 500


def test_a_run_of_another_version_is_said_to_be_one(tmp_path: Path) -> None:
    RunFolder(tmp_path).write_config(GRPOConfig(), model="m")
    path = tmp_path / "config.json"
    stored = json.loads(path.read_text())
    stored["config"]["objective"]["refill"] = stored["config"]["objective"].pop("dynamic_sampling")
    path.write_text(json.dumps(stored))
    message = (
        r"begun by another version of razona, .* objective.refill, which is objective.dynamic_sampling now"
    )
    with pytest.raises(CheckpointError, match=message):
        RunFolder(tmp_path, resume=True).write_config(GRPOConfig(), model="m")


def test_what_changed_is_named(tmp_path: Path) -> None:
    RunFolder(tmp_path).write_config(GRPOConfig(), model="m", data_fingerprint="f")
    changed = GRPOConfig(optimizer=OptimizerConfig(learning_rate=0.5), prompts_per_step=3)
    with pytest.raises(CheckpointError) as caught:
        RunFolder(tmp_path, resume=True).write_config(changed, model="m", data_fingerprint="g")
    text = str(caught.value)
    assert "data_fingerprint: it was 'f' and is 'g'" in text
    assert "optimizer.learning_rate: it was 1e-06 and is 0.5" in text
    assert "prompts_per_step: it was 8 and is 3" in text
    assert "group_size" not in text


def test_num_steps_is_fixed_under_a_schedule_that_depends_on_it(tmp_path: Path) -> None:
    def config(steps: int) -> GRPOConfig:
        return GRPOConfig(optimizer=OptimizerConfig(schedule="cosine"), run=RunConfig(num_steps=steps))

    RunFolder(tmp_path).write_config(config(10), model="m", data_fingerprint="f")
    with pytest.raises(CheckpointError, match=r"run\.num_steps: it was 10 and is 20"):
        RunFolder(tmp_path, resume=True).write_config(config(20), model="m", data_fingerprint="f")


# -- JSONL


def test_floats_are_exact_and_lines_valid_json(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    values = {"a": 0.1 + 0.2, "b": 1e-320, "c": math.nan, "d": math.inf, "e": -math.inf, "f": -0.0, "n": 3}
    run.log(4, values)
    line = (tmp_path / "metrics.jsonl").read_text()

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    read = json.loads(line, parse_constant=refuse)
    assert read == {"step": 4, **values, "c": None, "d": "inf", "e": "-inf"}
    assert math.copysign(1, read["f"]) == -1 and isinstance(read["n"], int)


def test_rollout_records(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.log_rollouts(records(3))
    first, second = lines(tmp_path / "rollouts.jsonl")
    assert first == {
        "step": 3,
        "prompt_id": 7,
        "sample": 0,
        "prompt": [{"role": "user", "content": "¿2+2?"}],
        "completion": "4",
        "finish_reason": "stop",
        "rewards": {"correct": 1.0, "format": None},
        "reward": 1.0,
        "advantage": 1.0,
        "n_tokens": 2,
        "policy_version": 3,
    }
    assert second["sample"] == 1 and second["finish_reason"] == "length"
    assert "¿2+2?" in (tmp_path / "rollouts.jsonl").read_text(encoding="utf-8")


def test_half_a_surrogate_pair_is_written_and_read() -> None:
    assert json.loads(json_line({"text": "a\ud83d\u2028\n"})) == {"text": "a\ud83d\u2028\n"}
    assert json_line({"text": "\n"}).count(b"\n") == 1


def run_steps(run: RunFolder, steps: range) -> None:
    for step in steps:
        run.log(step, {"loss": 1 / (step + 1)})
        run.log_rollouts(records(step))
        run.log_timings(step, {"train": 0.5})


def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path: Path) -> None:
    whole = RunFolder(tmp_path / "whole")
    run_steps(whole, range(4))
    whole.close()

    run = RunFolder(tmp_path / "cut")
    run_steps(run, range(2))
    state = run.state_dict()
    run_steps(run, range(2, 3))  # written after the checkpoint, then killed
    with (tmp_path / "cut" / "rollouts.jsonl").open("ab") as file:
        file.write(b'{"half a li')

    resumed = RunFolder(tmp_path / "cut", resume=True)
    resumed.load_state_dict(json.loads(json.dumps(state)))
    assert (tmp_path / "cut" / "rollouts.jsonl").stat().st_size == state["rollouts"]  # at once
    run_steps(resumed, range(2, 4))
    assert resumed.state_dict()["metrics"] == whole.state_dict()["metrics"] > 0
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert [line["step"] for line in lines(tmp_path / "cut" / "timings.jsonl")] == [0, 1, 2, 3]


def test_a_run_resumed_without_a_checkpoint_starts_from_nothing(tmp_path: Path) -> None:
    run_steps(RunFolder(tmp_path), range(2))
    again = RunFolder(tmp_path, resume=True)
    assert again.state_dict() == {"metrics": 0, "rollouts": 0, "timings": 0}
    run_steps(again, range(1))
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [0]


def test_state_survives_close(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run_steps(run, range(2))
    state = run.state_dict()
    run.close()
    assert run.state_dict() == state
    run_steps(run, range(2, 3))
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [0, 1, 2]


def test_a_file_that_lost_lines_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    truncate_jsonl(path, 0)
    path.write_bytes(b"123")
    truncate_jsonl(path, 2)
    assert path.read_bytes() == b"12"
    with pytest.raises(CheckpointError, match="has 2 bytes, and the checkpoint was written when it had 5"):
        truncate_jsonl(path, 5)


# -- time and console


def test_phases_add_up_and_an_exception_is_counted() -> None:
    ticks = iter([0.0, 1.0, 4.0, 9.0, 10.0, 12.0])
    phases = Phases(clock=lambda: next(ticks))
    with phases("train"), phases("update"):
        pass
    with pytest.raises(KeyError), phases("train"):
        raise KeyError
    assert phases.pop() == {"update": 3.0, "train": 6.0 + 2.0}
    assert phases.pop() == {}


def test_samples_show_prompt_completion_and_rewards_unchanged() -> None:
    out = io.StringIO()
    Console(file=out).samples("step 3", records(3))
    text = out.getvalue()
    assert "user: ¿2+2?" in text and "[bold]5[/bold]" in text and "\x1b" not in text
    for expected in ("correct 1", "format abstained", "total 0.5", "advantage -1.00", "[cut off"):
        assert expected in text
    assert max(map(len, text.splitlines())) <= 110


def test_long_texts_keep_both_ends() -> None:
    text = shorten("start" + "x" * 1000 + "42", 100)
    assert text.startswith("start") and text.endswith("42") and "[... 907 characters ...]" in text


def test_metrics_line_is_compact() -> None:
    out = io.StringIO()
    Console(file=out).metrics(7, 100, {"other": 1.0, "loss": 0.123456, "reward": 0.5, "eval/reward": 0.25})
    assert out.getvalue() == "step   7/100  reward 0.5  loss 0.1235  eval/reward 0.25\n"


def test_json_mode_keeps_stdout_for_the_result(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(json_mode=True)
    console.print("hello [red]")
    console.note("careful")
    with console.progress("GRPO", 2) as advance:
        advance()
        advance()
    console.result({"accuracy": 0.5})
    captured = capsys.readouterr()
    assert captured.out == '{"accuracy": 0.5}\n'
    assert "hello [red]" in captured.err and "note: careful" in captured.err and "GRPO 2/2" in captured.err


def test_progress_without_a_terminal_speaks_now_and_then() -> None:
    now = 0.0
    out = io.StringIO()
    with Console(file=out, clock=lambda: now).progress("GRPO", 100) as advance:
        for _ in range(100):
            now += 1.0
            advance()
    said = out.getvalue().splitlines()
    assert said[0] == "GRPO 10/100  elapsed 0:10  left 1:30"
    assert said[-1] == "GRPO 100/100  elapsed 1:40  left 0:00"
    assert len(said) == 10


def test_progress_on_a_terminal_has_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    console = Console(file=out)
    with console.progress("SFT", 3) as advance:
        advance(2)
        console.print("in between")
        advance()
    assert "SFT" in out.getvalue() and "3/3" in out.getvalue() and "left" in out.getvalue()
    assert "in between" in out.getvalue()
