"""Gold answers out of any column, and GSM8K as the course trains it."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import grpo_config, lines, model_folder, run_grpo

from razona.build.data import load_table
from razona.cli import main
from razona.config import DataConfig, EvaluateConfig, GenerateConfig, GRPOConfig, ObjectiveConfig
from razona.config.check import validate
from razona.config.load import load_config, merge, read_toml
from razona.data import load_rows, parse_gold, with_gold
from razona.errors import ConfigError, DataError
from razona.run.console import Console
from razona.tasks import gsm8k, with_task

NATALIA = (
    "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n"
    "Natalia sold 48+24 = <<48+24=72>>72 clips altogether in April and May.\n#### 72"
)
ROWS = [
    {"question": "How many clips did Natalia sell altogether?", "answer": NATALIA},
    {"question": "How much is a house?", "answer": "It is 1,000 + 234 = 1,234 dollars.\n#### 1,234"},
    {"question": "How much does he owe?", "answer": "He lost it.\n####-5 "},
]
EXAMPLE = Path(__file__).parents[1] / "examples/gsm8k_lora.toml"
REAL = Path(__file__).parents[2] / "shared/data/gsm8k/train.jsonl"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


@pytest.mark.parametrize(
    ("expression", "cell", "gold"),
    [
        ("answer:after('####')", NATALIA, "72"),
        ('answer:after("####")', ROWS[1]["answer"], "1,234"),
        ("answer:after('####'):number", ROWS[1]["answer"], "1234"),
        ("answer:after('####'):number", "#### $1,234.50", "1234.50"),
        ("answer:after('####'):number", "#### -5", "-5"),
        ("answer:after('####'):number", "#### about 5", None),
        ("answer:after('####'):number", "#### 5 6", None),
        ("answer:after('####')", "it is 72", None),
        ("answer:after('####')", "it is 72 ####  ", None),
        ("answer:after('####')", None, None),
        ("answer:after('####')", "#### 1 #### 2", "2"),
        ("answer : after('=') : after('is ')", "x = it is 3", "3"),
        ("answer:after(':')", "so: 7", "7"),
        ("answer", "  7 ", "7"),
        ("answer", 7.0, "7"),
        ("answer:number", 0, "0"),
    ],
)
def test_gold_of_a_cell(expression: str, cell: Any, gold: str | None) -> None:
    assert parse_gold(expression).of(cell) == gold


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("", "names no column"),
        (":after('#')", "names no column"),
        (
            "answer:before('#')",
            r"cannot be read from \":before\('#'\)\" on. Write \[NAME=\]COLUMN, then any of",
        ),
        ("answer:after(#)", r"cannot be read from ':after\(#\)' on"),
        ("answer:after('')", "cannot be read from"),
        ("answer:after('#').upper()", r"cannot be read from '.upper\(\)' on"),
        (
            "answer:after('#'):strip",
            "cannot be read from ':strip' on. Space around the result is taken off wi",
        ),
        ("__import__('os').system('x')", r"cannot be read from \"\('os'\)"),
        ("my label=answer", "'my label' cannot be the name of a reward function's parameter"),
    ],
)
def test_what_is_no_expression_is_refused(expression: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_gold(expression)


def test_rows_with_their_gold() -> None:
    """The gold takes the name that the verifier reads; what stood there stays, and it is said."""
    rows, said = with_gold(load_rows(ROWS), "answer:after('####')")
    assert rows.columns == ("question", "original_answer", "answer")
    assert [row["answer"] for row in rows] == ["72", "1,234", "-5"]
    assert rows[0]["original_answer"] == NATALIA and rows.fingerprint == load_rows(ROWS).fingerprint
    assert "'answer' is answer:after('####')" in said[0] and "'72' in its first row" in said[0]
    assert "stays as 'original_answer'" in said[0]
    assert len(said) == 2 and "1 golds are numbers with commas, such as '1,234'" in said[1]
    assert "answer:after('####'):number takes them out" in said[1]
    rows, said = with_gold(load_rows(ROWS), "label=answer:after('####'):number")
    assert [row["label"] for row in rows] == ["72", "1234", "-5"] and len(said) == 1
    assert rows.columns == ("question", "answer", "label") and rows[0]["answer"] == NATALIA


def test_a_row_without_a_gold() -> None:
    """Refused, or dropped, counted and said; the others keep their numbers."""
    table = load_rows([ROWS[0], {"question": "Why?", "answer": "Nobody knows."}, ROWS[2]])
    with pytest.raises(DataError) as error:
        with_gold(table, gsm8k.GOLD)
    for words in (
        "row 1 (the first is 0) has no gold",
        "no '####'",
        "'Nobody knows.'",
        "--data.no-gold drop",
    ):
        assert words in str(error.value)
    rows, said = with_gold(table, gsm8k.GOLD, no_gold="drop")
    assert [row["answer"] for row in rows] == ["72", "-5"]
    assert rows.where(1).endswith("row 2 (the first is 0)")
    assert rows.renamed({"answer": "gold"}).number(1) == 2
    assert with_gold(rows, "label=answer")[0].number(1) == 2
    assert said[1].startswith("1 of 3 rows dropped: no gold (no '####' with something after it or no number")
    with pytest.raises(
        DataError, match=r"none of the 3 rows .* has a gold; row 0 has '.*#### 72' in its 'answ"
    ):
        with_gold(table, "answer:after('@@')", no_gold="drop")


def test_a_column_that_is_not_there() -> None:
    with pytest.raises(
        DataError, match=r"no column 'anser'. Its columns: question, answer. Did you mean 'ans"
    ):
        with_gold(load_rows(ROWS), "anser:after('####')")
    kept, _ = with_gold(load_rows(ROWS), "answer:after('####')")
    with pytest.raises(DataError, match=r"kept as 'original_answer', and a column .* NAME=answer:number"):
        with_gold(kept, "answer:number")


def test_a_task_fills_in_what_is_left_out() -> None:
    bare = with_task(GRPOConfig(data=DataConfig(task="gsm8k")))
    assert bare.data == DataConfig(
        path="openai/gsm8k:main",
        task="gsm8k",
        prompt_column="question",
        gold="answer:after('####'):number",
        system=gsm8k.SYSTEM,
    )
    assert bare.rewards == ("format", "exact_answer") and bare.objective.reward_weights == (1.0, 2.0)
    assert with_task(bare) == bare and with_task(GRPOConfig()) == GRPOConfig()
    own = GRPOConfig(
        data=DataConfig(path="x", task="gsm8k", prompt_column="q", gold="a", system="Think."),
        rewards=("length",),
        objective=ObjectiveConfig(reward_weights=(3.0,)),
    )
    assert with_task(own) == own
    python = with_task(GRPOConfig(data=DataConfig(task="gsm8k")), own_rewards=True)
    assert python.rewards == () and python.objective.reward_weights == ()
    assert with_task(EvaluateConfig(data=DataConfig(task="gsm8k"))).rewards == ("format", "exact_answer")
    asked = with_task(GenerateConfig(prompts=("2 + 2?",), data=DataConfig(task="gsm8k")))
    assert asked.data.path == "" and asked.data.system == gsm8k.SYSTEM


def test_without_data_and_without_a_hub(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    assert main(["grpo", "--task", "gsm8k", "--model", str(model), "--dry-run"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("razona: --task gsm8k was given no --data, so the hub was asked")
    assert "--data train.jsonl" in error and "openai/gsm8k" in error
    with pytest.raises(DataError, match=r"^'owner/other' is no file here"):
        load_table("owner/other", DataConfig(task="gsm8k"), Console(file=io.StringIO()))


def test_sft_has_no_use_for_a_gold(capsys: pytest.CaptureFixture[str], data: Path) -> None:
    for flags, name in ((["--task", "gsm8k"], "task = 'gsm8k'"), (["--gold", "answer"], "gold = 'answer'")):
        assert main(["sft", "--data", str(data), *flags]) == 2
        assert f"data.{name} belongs to commands that sample and score" in capsys.readouterr().err


def small(model: Path, out: Path) -> list[str]:
    sizes = "--group-size 2 --max-completion-length 6 --steps 1 --prompts-per-step 2"
    return ["--model", str(model), "--output-dir", str(out), *sizes.split()]


def test_grpo_on_gsm8k(model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        "--task",
        "gsm8k",
        "--data",
        str(data),
        "--eval-data",
        str(data),
        *small(model, tmp_path / "run"),
    ]
    assert main(["grpo", *flags]) == 0
    said = capsys.readouterr().out
    assert "optimises: 1 x format + 2 x exact_answer" in said and "3 prompts" in said
    (record, *_) = lines(tmp_path / "run/rollouts.jsonl")
    question = ROWS[record["prompt_id"]]["question"]
    assert record["prompt"] == [
        {"role": "system", "content": gsm8k.SYSTEM},
        {"role": "user", "content": question},
    ]
    assert record["rewards"].keys() == {"format", "exact_answer"}
    assert "eval/exact_answer" in lines(tmp_path / "run/metrics.jsonl")[0]
    stored = json.loads((tmp_path / "run/config.json").read_text())["config"]
    assert stored["data"]["gold"] == gsm8k.GOLD and stored["rewards"] == ["format", "exact_answer"]
    assert main(["grpo", *flags, "--resume"]) == 0
    capsys.readouterr()
    assert main(["grpo", *flags, "--resume", "--gold", "answer:after('####')"]) == 2
    assert "data.gold: it was" in capsys.readouterr().err


def test_a_reward_reads_the_gold_and_the_numbers_of_the_rows_stay(model: Path, tmp_path: Path) -> None:
    """By the name of the text's own reward function, with a row dropped in front."""
    seen: dict[str, str] = {}

    def reward_correctitud(completions: list[Any], respuesta_correcta: list[str], **_: Any) -> list[float]:
        seen.update(dict.fromkeys(respuesta_correcta, ""))
        return [float(i) for i in range(len(completions))]

    rows = [{"question": "Why?", "answer": "Nobody knows."}, *ROWS]
    config = grpo_config(
        model,
        tmp_path / "run",
        data__prompt_column="question",
        data__gold="respuesta_correcta=answer:after('####')",
        data__no_gold="drop",
        prompts_per_step=3,
        run__num_steps=1,
    )
    _, said = run_grpo(config, rows=rows, reward_fns=[reward_correctitud])
    assert seen.keys() == {"72", "1,234", "-5"} and "1 of 4 rows dropped: no gold" in said
    ids = {record["prompt"]: record["prompt_id"] for record in lines(tmp_path / "run/rollouts.jsonl")}
    assert ids == {row["question"]: i for i, row in enumerate(ROWS, start=1)}


def test_held_out_rows_have_their_gold_too_and_rewards_of_ones_own_stand(model: Path, tmp_path: Path) -> None:
    def mine(completions: list[Any], answer: list[str]) -> list[float]:
        seen.update(answer)
        return [float(i) for i in range(len(completions))]

    seen: set[str] = set()
    held_out = [{"question": "And?", "answer": "So #### 1,001"}]
    config = grpo_config(model, tmp_path / "run", data__task="gsm8k", run__num_steps=1, prompts_per_step=3)
    _, said = run_grpo(config, rows=ROWS, eval_rows=held_out, reward_fns=[mine])
    assert seen == {"72", "1234", "-5", "1001"} and "optimises: 1 x mine" in said


def test_eval_and_generate_on_gsm8k(model: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--task", "gsm8k", "--model", str(model), "--max-completion-length", "4", "--json"]
    assert main(["eval", *flags, "--data", str(data)]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["prompts"] == 3 and "eval/exact_answer" in result
    assert main(["generate", *flags, "--data", str(data)]) == 0
    assert len(json.loads(capsys.readouterr().out)["completions"]) == 3
    assert main(["generate", *flags, "--prompt", "2 + 2?"]) == 0
    (record,) = json.loads(capsys.readouterr().out)["completions"]
    assert record["prompt"][0] == {"role": "system", "content": gsm8k.SYSTEM}


@pytest.mark.skipif(not REAL.is_file(), reason="the real GSM8K is not here (../shared/data/gsm8k)")
def test_the_real_gsm8k() -> None:
    rows, said = with_gold(load_rows(REAL), gsm8k.GOLD)
    assert len(rows) == 7473 and rows[0]["answer"] == "72" and len(said) == 1
    assert not any("," in row["answer"] for row in rows)
    _, said = with_gold(load_rows(REAL), "answer:after('####')")
    assert "79 golds are numbers with commas" in said[1]


def test_the_example_is_the_courses_exercise() -> None:
    table = read_toml(EXAMPLE)
    assert table.pop("lora") == {"r": 16, "alpha": 16, "target_modules": ["q_proj", "v_proj"]}
    config = with_task(merge(GRPOConfig(), table))
    validate(config, eval_rows=False)
    assert config.sampling.group_size == 8 and config.rewards == gsm8k.REWARDS
    assert "-1b-" in config.model.name and config.data.path == gsm8k.HUB_ID


def test_the_example_loads_as_it_is() -> None:
    assert load_config(GRPOConfig, EXAMPLE).lora.r == 16
