"""The command line: what goes to stdout and stderr, exit codes, and the explained table."""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import subprocess
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

from razona.cli import COMMANDS, main
from razona.commands import explain
from razona.config import DemoConfig, GRPOConfig
from razona.config.options import options
from razona.errors import DataError

RUN = ["grpo", "--data", "x.jsonl", "--reward", "format"]


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable[..., dict[str, Any]]], None]:
    """Put ``run`` in the place of a command's module, so that no torch is needed."""

    def place(command: str, run: Callable[..., dict[str, Any]]) -> None:
        module = types.ModuleType(COMMANDS[command][0])
        module.run = run  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, COMMANDS[command][0], module)

    return place


def test_every_command_has_its_module() -> None:
    for module, _, _ in COMMANDS.values():
        assert importlib.util.find_spec(module) is not None, module


@pytest.mark.parametrize("args", [["--help"], ["grpo", "--help"]])
def test_help_answers_at_once(args: list[str]) -> None:
    seconds = []
    for _ in range(3):  # processor time, the best of three: neighbours do not count
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [sys.executable, "-m", "razona", *args], capture_output=True, text=True, check=True
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(seconds) < 0.5
    assert "usage: razona" in done.stdout and "--json" in done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_a_line_for_each_option_that_people_use(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit:
        main([command, "--help"])
    out = capsys.readouterr().out
    assert exit.value.code == 0 and out.startswith(f"usage: razona {command}")
    flags = [line for line in out.splitlines() if line.startswith("  --")]
    assert len(flags) <= 33
    for line in flags:
        assert len(line.split("  ")) > 2, line
    assert all(len(line) <= 100 for line in out.splitlines())
    if command == "grpo":
        for words in ("--group-size INT ", "--objective NAME ", "dr_grpo,", "--reward TEXT ...", "[8]"):
            assert words in out
        assert "--help-all" in out and "betas" not in out


def test_help_all_lists_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["grpo", "--help-all"])
    out = capsys.readouterr().out
    assert exit.value.code == 0
    for option in options(GRPOConfig()):
        assert option.flag in out


def test_json_is_the_last_line_and_progress_goes_to_stderr(
    stand_in: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(config: GRPOConfig, *, dry_run: bool, console: Any) -> dict[str, Any]:
        console.print("step 1")
        print("from a library")
        return {"reward": 0.5, "kl": float("nan"), "dry_run": dry_run, "rewards": config.rewards}

    stand_in("grpo", run)
    assert main([*RUN, "--json", "--dry-run"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == {"reward": 0.5, "kl": None, "dry_run": True, "rewards": ["format"]}
    assert out.count("\n") == 1
    assert "step 1" in err and "from a library" in err

    assert main(RUN) == 0
    out, err = capsys.readouterr()
    assert "step 1" in out and "reward" not in out and err == ""


def test_toml_comes_first_and_flags_lie_over_it(stand_in: Any, tmp_path: Any, capsys: Any) -> None:
    seen: list[GRPOConfig] = []
    stand_in("grpo", lambda config, **_: seen.append(config) or {})
    file = tmp_path / "run.toml"
    file.write_text('rewards = ["format"]\n[data]\npath = "x.jsonl"\n[sampling]\ngroup_size = 4\n')
    assert main(["grpo", str(file), "--group-size", "6"]) == 0
    assert seen[0].sampling.group_size == 6 and seen[0].data.path == "x.jsonl"


def test_demo_takes_its_options(stand_in: Any) -> None:
    seen: list[DemoConfig] = []
    stand_in("demo", lambda config, console: seen.append(config) or {})
    assert main(["demo", "--seed", "2"]) == 0
    assert seen == [DemoConfig(seed=2)]


def test_refusals_exit_with_2_and_no_traceback(
    stand_in: Any, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    def run(config: GRPOConfig, **_: Any) -> dict[str, Any]:
        raise DataError("x.jsonl has no column 'prompt'.")

    stand_in("grpo", run)
    assert main(RUN) == 2
    assert capsys.readouterr().err == "razona: x.jsonl has no column 'prompt'.\n"
    with pytest.raises(DataError):
        main([*RUN, "--traceback"])
    monkeypatch.setenv("RAZONA_TRACEBACK", "1")
    with pytest.raises(DataError):
        main(RUN)


def test_interruption_exits_with_130(stand_in: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(config: GRPOConfig, **_: Any) -> dict[str, Any]:
        raise KeyboardInterrupt

    stand_in("grpo", interrupted)
    assert main(RUN) == 130
    stand_in(
        "grpo", lambda config, **_: {"interrupted": True}
    )  # the loop saved a checkpoint and ended cleanly
    assert main([*RUN, "--json"]) == 130
    assert json.loads(capsys.readouterr().out) == {"interrupted": True}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["grop"], "unknown command 'grop'. Did you mean 'grpo'?"),
        (["grpo"], "razona grpo has no data: data.path is empty. Give --data FILE"),
        (["grpo", "--data", "x"], "no reward function: rewards is empty. Give --reward NAME"),
        (["sft"], "razona sft has no data"),
        (["generate"], 'no prompts. Give --prompt "TEXT"'),
        (["demo", "--dry-run"], "--dry-run belongs to grpo, sft, push"),
        ([*RUN, "--eval.every", "5"], "eval.every = 5: but eval.data is empty, nothing to evaluate on"),
        ([*RUN, "--eval.samples", "2"], "eval.samples = 2: but eval.data is empty"),
        (
            ["generate", "--prompt", "hi", "--data", "x.jsonl"],
            "prompts (1) and data.path = 'x.jsonl' are both",
        ),
        ([*RUN, "--lr", "1", "run.toml"], "'run.toml' stands where no configuration file can"),
        ([*RUN, "--run.resume", "run.toml"], "it comes first, before every flag: razona COMMAND run.toml"),
        ([*RUN, "run.toml"], "'run.toml' stands where"),
        (
            [*RUN, "--lr", "1", "--lr", "1"],
            "--lr is given twice, and only one of them could count. Give optimizer.learning",
        ),
        ([*RUN, "--temperature", "0"], "sampling.temperature = 0"),
        (["grpo", "none.toml"], "none.toml cannot be read"),
        (["explain", "kl"], "can explain 'advantage', given was 'kl'"),
        (["explain", "advantage", "1"], "at least two rewards to be compared, given were 1"),
        (["explain", "advantage", "1", "x"], "reward 'x' is not a finite number"),
        (["explain", "advantage", "1", "nan"], "reward 'nan' is not a finite number"),
        (["explain", "advantage", "1", "2", "--eps", "1", "--eps=2"], "--eps is given twice"),
        (["explain", "advantage", "1", "2", "--eps"], "--eps '' is not a finite number"),
        (["explain", "advantage", "1", "2", "--eps", "-1"], "a negative eps"),
    ],
)
def test_errors_by_their_text(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(args) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err


@pytest.mark.parametrize("args", [["--help"], ["-h"], ["advantage", "--help"], ["advantage", "1", "-h"]])
def test_explain_help(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", *args]) == 0
    assert capsys.readouterr().out.startswith("usage: razona explain advantage REWARD")


def test_an_error_of_the_system_names_the_path(
    stand_in: Any, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    (tmp_path / "file").touch()

    def run(config: GRPOConfig, **_: Any) -> dict[str, Any]:
        (tmp_path / "file" / "run").mkdir(parents=True)
        return {}

    stand_in("grpo", run)
    assert main(RUN) == 2
    out, err = capsys.readouterr()
    assert (out, err.startswith(f"razona: {tmp_path}/file/run: Not a directory.")) == ("", True)
    with pytest.raises(NotADirectoryError):
        main([*RUN, "--traceback"])


def test_an_unknown_flag_exits_with_2_and_names_near_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["grpo", "--sampling.group-siz", "4"])
    assert exit.value.code == 2
    assert "--sampling.group-size" in capsys.readouterr().err


def test_closed_pipe_is_no_traceback() -> None:
    command = f"{sys.executable} -m razona grpo --help | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, env={**os.environ})
    assert "Traceback" not in done.stderr and "usage: razona grpo" in done.stdout


def test_explain_prints_the_texts_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "advantage", "3", "1", "0", "3"]) == 0
    rows = {line.split()[0]: line.split()[1:5] for line in capsys.readouterr().out.splitlines() if line}
    assert rows["population"] == ["+0.96", "-0.58", "-1.35", "+0.96"]
    assert rows["sample"] == ["+0.83", "-0.50", "-1.17", "+0.83"]
    assert rows["batch"] == rows["population"]  # no other group is known
    assert rows["none"] == ["+1.25", "-0.75", "-1.75", "+1.25"]
    assert rows["leave_one_out"] == ["+1.67", "-1.00", "-2.33", "+1.67"]


def test_explain_a_deviation_over_the_batch(capsys: pytest.CaptureFixture[str]) -> None:
    others = ["--others", "0", "-1", "0", "6"]
    assert main(["explain", "advantage", "3", "1", "0", "3", *others, "--eps", "0", "--json"]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert "2.179 with the 4 others" in err and result["others"] == [0, -1, 0, 6]
    assert result["advantages"]["batch"] == pytest.approx([a / 4.75**0.5 for a in (1.25, -0.75, -1.75, 1.25)])


def test_explain_other_groups(capsys: pytest.CaptureFixture[str]) -> None:
    assert [round(a, 2) for a in explain.advantages([3, 0, 0, 0])["population"]] == [
        1.73,
        -0.58,
        -0.58,
        -0.58,
    ]
    assert list(explain.advantages([3.0] * 4).values()) == [[0.0] * 4] * 5
    ten, one = (explain.advantages([3 * s, s, 0, 3 * s])["population"] for s in (10, 1))
    assert [round(a, 3) for a in ten] == pytest.approx([round(a, 3) for a in one], abs=2e-3)
    assert main(["explain", "advantage", "1", "1", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["advantages"]["sample"] == [0.0, 0.0]
    assert "teaches nothing" in err


def test_explain_agrees_with_the_trainer() -> None:
    import torch

    from razona.advantages import group_centered, group_normalized, leave_one_out

    for rewards, eps in (
        ([3, 1, 0, 3], 1e-4),
        ([0.1, 0.7, -2], 1e-6),
        ([1, 1, 1], 1e-4),
        ([5, 5 + 1e-12], 1e-4),
    ):
        tensor = torch.tensor([rewards], dtype=torch.float64)
        table = explain.advantages(rewards, eps=eps)
        for name, want in {
            "population": group_normalized(tensor, std="population", eps=eps),
            "sample": group_normalized(tensor, std="sample", eps=eps),
            "none": group_centered(tensor),
            "leave_one_out": leave_one_out(tensor),
        }.items():
            assert table[name] == pytest.approx(want[0].tolist(), abs=1e-6), name
        others = [2.0, -1.0, 0.5, 4.0][: len(rewards)]
        wanted = group_normalized(torch.tensor([rewards, others], dtype=torch.float64), std="batch", eps=eps)
        table = explain.advantages(rewards, eps=eps, others=others)
        assert table["batch"] == pytest.approx(wanted[0].tolist(), abs=1e-6)
