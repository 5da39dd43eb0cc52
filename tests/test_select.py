"""`razona select`: what it keeps, that a kill costs nothing, what it refuses."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import grpo_config, lines, model_folder, run_grpo

from razona.cli import main
from razona.commands import select
from razona.config import SelectConfig
from razona.config.load import merge
from razona.engines.fake import FakeEngine
from razona.errors import CheckpointError, ConfigError, DataError, RewardError
from razona.rollout.difficulty import wilson
from razona.run.console import Console

WORDS = ("<think>x</think> 1", "<think>x</think> 2")
ROWS = [
    {"prompt": f"Question {i}?", "answer": gold, "source": {"page": i}}
    for i, gold in enumerate(["1", "9", "any", "2", "none", "9", "1", "2"])
]
REWARD = """
import os, time
def right(completions, answer):
    time.sleep(float(os.environ.get("REWARD_SECONDS", "0")))
    return [1.0 if a == "any" else None if a == "none" else float(c.endswith(a))
            for c, a in zip(completions, answer)]
def first(completions):
    return [float(c.endswith("1")) for c in completions]
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With in.jsonl and mine.py, entered; a fake engine that answers 1 or 2."""
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "mine.py").write_text(REWARD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(select, "make_engine", lambda *_: FakeEngine(WORDS, stop_token_ids=()))
    return tmp_path


def config(at: Path, **changes: Any) -> SelectConfig:
    table = {
        "model": {"name": str(at)},
        "data": {"path": "in.jsonl"},
        "sampling": {"group_size": 8, "max_completion_length": 1},
        "pass_reward": "mine.py:right",
        "output": "out.jsonl",
        "prompts_per_chunk": 3,
    }
    return merge(SelectConfig(), {**table, **changes})


def selected(given: SelectConfig) -> tuple[dict[str, Any], str]:
    out = io.StringIO()
    result = select.run(given, console=Console(file=out))
    return result, out.getvalue()


def test_wilson() -> None:
    """Against the values of the usual tables (Wilson, 95 %)."""
    for passes, count, low, high in ((0, 10, 0.0, 0.2775), (5, 10, 0.2366, 0.7634), (10, 10, 0.7225, 1.0)):
        assert wilson(passes, count) == pytest.approx((low, high), abs=1e-4)
    assert wilson(1, 8) == pytest.approx((0.0224, 0.4709), abs=1e-4) and wilson(0, 0) == (0.0, 1.0)
    for count in range(1, 30):
        for passes in range(count + 1):
            low, high = wilson(passes, count)
            assert 0 <= low <= passes / count <= high <= 1
            assert wilson(count - passes, count) == pytest.approx((1 - high, 1 - low))


def test_what_is_kept(model: Path, folder: Path) -> None:
    result, said = selected(config(model))
    rows = lines(folder / "out.jsonl")
    assert [row["prompt"] for row in rows] == [ROWS[i]["prompt"] for i in (0, 3, 6, 7)]
    for row in rows:
        original = next(r for r in ROWS if r["prompt"] == row["prompt"])
        assert {k: v for k, v in row.items() if k in original} == original
        assert row.keys() - original.keys() == {"pass_rate", "pass_rate_interval"}
        assert row["pass_rate"] * 8 in range(2, 7)
        assert row["pass_rate_interval"] == list(wilson(round(row["pass_rate"] * 8), 8))
    counts = ("prompts", "kept", "too_easy", "too_hard", "impossible", "unscored", "samples", "resumed")
    assert [result[name] for name in counts] == [8, 4, 1, 2, 2, 1, 8, 0]
    for words in (
        "4 of 8 prompts kept (pass rate in 0.2..0.8), 1 too easy, 2 too hard, of which 2 impossible (never",
        "1 that the reward cannot score",
        "the 95 % interval (Wilson) of 4 passes is 0.22..0.78",
        "it passes when right is above 0",
        "row 0: 'Question 0?'",
        "4 rows are in out.jsonl",
    ):
        assert words in said.replace("\n", " "), words
    header, *rates = lines(folder / "out.jsonl.rates.jsonl")
    assert [rate["row"] for rate in rates] == list(range(8)) and header["select"][
        "pass_reward"
    ] == "mine.py:right"
    assert (rates[4]["scored"], rates[4]["pass_rate"], rates[4]["pass_rate_interval"]) == (
        0,
        None,
        [0.0, 1.0],
    )
    assert result["truncated"] == 1.0 and 0.3 < result["pass_rate"] < 0.7
    assert [rates[1]["passes"], rates[2]["passes"]] == [0, 8]


def test_the_bounds_are_included_and_the_threshold_is_not(model: Path, folder: Path) -> None:
    _, _ = selected(config(model, by=["pass-rate", "0.0 .. 1"]))
    assert len(lines(folder / "out.jsonl")) == 7  # all that can be judged
    result, _ = selected(config(model, by=["pass_rate", "1..1"], output="easy.jsonl"))
    assert result["kept"] == 1 and result["too_easy"] == 0
    with pytest.raises(DataError, match="0 of 8 prompts kept"):
        selected(config(model, pass_above=1.0, output="none.jsonl"))


@pytest.mark.parametrize("half_a_line", [b"", b'{"row": 7, "pas'])
def test_a_kill_costs_nothing(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, half_a_line: bytes
) -> None:
    """The same bytes as of a run that was not stopped, in chunks of another size; nothing twice."""
    selected(config(model, output="whole.jsonl"))
    original, sampled = select.measure, []

    def measure(engine: Any, prompts: Any, reward: Any, **options: Any) -> Any:
        sampled.extend(prompt.id for prompt in prompts)
        if len(sampled) == 6:
            raise KeyboardInterrupt
        return original(engine, prompts, reward, **options)

    monkeypatch.setattr(select, "measure", measure)
    out = io.StringIO()
    with pytest.raises(KeyboardInterrupt):
        select.run(config(model), console=Console(file=out))
    assert "the same command goes on from there" in out.getvalue()
    rates = folder / "out.jsonl.rates.jsonl"
    assert [rate["row"] for rate in lines(rates)[1:]] == [0, 1, 2] and not (folder / "out.jsonl").exists()
    with rates.open("ab") as file:
        file.write(half_a_line)
    sampled.clear()
    result, said = selected(config(model, prompts_per_chunk=2))
    assert sampled == [3, 4, 5, 6, 7] and result["resumed"] == 3
    assert "going on from out.jsonl.rates.jsonl: 3 of 8 prompts are measured already" in said
    assert (folder / "out.jsonl").read_bytes() == (folder / "whole.jsonl").read_bytes()
    whole = lines(folder / "whole.jsonl.rates.jsonl")
    assert lines(rates)[1:] == whole[1:]


def test_another_range_samples_nothing(model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError) as error:
        selected(config(model, by=["pass-rate", "0.95..0.99"]))
    for words in (
        "No prompt of in.jsonl is of middle difficulty: 0 of 8 prompts kept (pass rate in 0.95..0.99), 1 t",
        "100% of the completions were cut off before they answered",  # the fake engine never stops
        "--by pass-rate 0.1..0.9, is drawn from what is measured",
    ):
        assert words in str(error.value)
    assert not (folder / "out.jsonl").exists()
    monkeypatch.setattr(select, "measure", None)
    result, _ = selected(config(model))
    assert result["kept"] == 4 and result["resumed"] == 8


def test_another_setting_is_refused(model: Path, folder: Path, tmp_path: Path) -> None:
    selected(config(model))
    (folder / "out.jsonl").unlink()
    before = (folder / "out.jsonl.rates.jsonl").read_bytes()
    other = model_folder(tmp_path / "gpt2", "gpt2")
    for changes, message in (
        ({"model": {"name": str(other)}}, r"weights: it was '\w+' and is '\w+'; model.name: it was"),
        (
            {"sampling": {"group_size": 4, "max_completion_length": 1}},
            "sampling.group_size: it was 8 and is 4",
        ),
        ({"pass_reward": "mine.py:first"}, "pass_reward: it was 'mine.py:right'"),
        ({"seed": 1}, "seed: it was 0 and is 1"),
        ({"pass_above": 0.5}, "pass_above: it was 0.0"),
        ({"num_prompts": 3}, "num_prompts: it was 0"),
    ):
        with pytest.raises(CheckpointError, match=message) as error:
            selected(config(model, **changes))
        assert "move the file away to measure anew, or give another --out" in str(error.value)
    (folder / "in.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    with pytest.raises(CheckpointError, match="data_fingerprint: it was"):
        selected(config(model))
    assert (folder / "out.jsonl.rates.jsonl").read_bytes() == before


def test_the_same_folder_with_other_weights_is_another_model(model: Path, folder: Path) -> None:
    """Trained further under the name it had."""
    run_grpo(grpo_config(model, folder / "run"))
    trained = folder / "run/model"
    (folder / "m").symlink_to(model)
    selected(config(Path("m")))
    (folder / "out.jsonl").unlink()
    (folder / "m").unlink()
    (folder / "m").symlink_to(trained)
    with pytest.raises(CheckpointError, match="weights: it was") as error:
        selected(config(Path("m")))
    assert "model.name" not in str(error.value)


@pytest.mark.parametrize(
    "text", [b"my own notes", b"my own notes\n", b'{"a": 1}\n', b'{"select": 1}\n{"x": 2}\n']
)
def test_a_file_of_another_kind_is_left_alone(model: Path, folder: Path, text: bytes) -> None:
    (folder / "out.jsonl.rates.jsonl").write_bytes(text)
    with pytest.raises(CheckpointError, match="is not what razona select writes there"):
        selected(config(model))
    assert (folder / "out.jsonl.rates.jsonl").read_bytes() == text


def test_original_columns_and_the_gold(model: Path, folder: Path) -> None:
    """The gold is for the reward alone: the rows written are those that were read, dropped ones left out."""
    rows = [{"prompt": "a", "answer": "so #### 1", "pass_rate": 0.9}, {"prompt": "b", "answer": "?"},
            {"prompt": "c", "answer": "so #### 2"}]  # fmt: skip
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"path": "in.jsonl", "gold": "answer:after('####')", "no_gold": "drop"}
    _, said = selected(config(model, data=data, pass_reward="exact_answer"))
    written = lines(folder / "out.jsonl")
    assert [(row["prompt"], row["answer"]) for row in written] == [("a", "so #### 1"), ("c", "so #### 2")]
    assert "original_answer" not in written[0] and written[0]["pass_rate"] != 0.9
    assert "has a column 'pass_rate' already; its values are replaced" in said


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"by": ["difficulty", "0..1"]}, ConfigError, "--by difficulty: rows are selected by pass-rate only"),
        ({"by": ["pass-rate", "0.8..0.2"]}, ConfigError, "'0.8..0.2' is no range of rates. Write the lowest"),
        ({"by": ["pass-rate", "20..80"]}, ConfigError, "between 0 and 1, with two dots"),
        ({"by": ["pass-rate", "0.2-0.8"]}, ConfigError, "is no range"),
        ({"by": ["pass-rate", "0.2...0.8"]}, ConfigError, "is no range"),
        ({"by": ["pass-rate", ".....0.8"]}, ConfigError, "is no range"),
        ({"output": ""}, ConfigError, "output is empty: there is nowhere to write. Give --out FILE.jsonl"),
        ({"output": "in.jsonl"}, ConfigError, "is there already, and would be lost"),
        ({"sampling": {"temperature": 0.0}}, ConfigError, "every pass rate would be 0 or 1"),
        ({"pass_reward": "exact"}, RewardError, "Did you mean 'exact_answer'"),
    ],
)
def test_errors_before_the_model_is_loaded(
    folder: Path, changes: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind) as error:
        selected(config(folder / "no-model", **changes))
    assert message in str(error.value)


def test_a_row_that_json_cannot_hold(folder: Path) -> None:
    rows = [{"prompt": "a", "answer": "1", "when": object()}]
    with pytest.raises(
        DataError, match=r"row 0 .* its column 'when' holds a object, which the output, JSON lin"
    ):
        select.run(config(folder / "no-model"), console=Console(file=io.StringIO()), rows=rows)


def test_the_command(model: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As the documentation has it; JSON as the last line."""
    line = (
        f"select --by pass-rate 0.2..0.8 --model {model} --samples 8 --data in.jsonl --out out.jsonl "
        "--reward mine.py:right --max-completion-length 1 --json"
    )
    assert main(line.split()) == 0
    out, err = capsys.readouterr()
    result = json.loads(out.splitlines()[-1])
    assert (result["kept"], result["output"]) == (4, "out.jsonl") and "4 of 8 prompts kept" in err
    assert main(line.split()) == 2
    assert "is there already" in capsys.readouterr().err
    for missing, message in (
        ("--data in.jsonl", "no data: data.path is empty"),
        ("--out out.jsonl", "Give --out"),
    ):
        assert main(line.replace(missing, "").split()) == 2
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_kill_9(model: Path, folder: Path) -> None:
    """A real process with the tiny model, killed between two chunks, and started again."""
    line = (
        f"select --model {model} --data in.jsonl --reward mine.py:right --max-completion-length 2 "
        "--by pass-rate 0..1 --prompts-per-chunk 1 --out"
    )

    def start(out: str, seconds: str) -> subprocess.Popen[str]:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "REWARD_SECONDS": seconds}
        command = [sys.executable, "-m", "razona", *line.split(), out]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)

    assert start("whole.jsonl", "0").wait(120) == 0
    process = start("out.jsonl", "0.5")
    rates = folder / "out.jsonl.rates.jsonl"
    while not rates.exists() or rates.read_bytes().count(b"\n") < 3:
        assert process.poll() is None
    process.kill()
    process.communicate()
    assert not (folder / "out.jsonl").exists()
    again = start("out.jsonl", "0")
    said, _ = again.communicate(timeout=120)
    assert again.returncode == 0 and "of 8 prompts are measured already" in said, said
    assert (folder / "out.jsonl").read_bytes() == (folder / "whole.jsonl").read_bytes()
