"""`razona generate` and `razona eval` with a tiny model: what they sample, write, say and refuse."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from conftest import is_on_policy
from tiny_runs import CHATS, ROWS, grpo_config, lines, model_folder, run_grpo, run_sft, sft_config

from razona.cli import main
from razona.commands import evaluate, generate
from razona.config import EvaluateConfig, GenerateConfig
from razona.config.load import merge
from razona.errors import ConfigError, DataError
from razona.run.console import Console

REWARD = """
def half(completion_ids, **kwargs):
    return [None if i == 0 else i / 8 for i, _ in enumerate(completion_ids)]
"""
NOTE = (
    "the list of rows: prompts are plain text and go to the model as they are; this model has a chat template"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def config_of(cls: type, model: Path, **values: Any) -> Any:
    sampling = {"group_size": 1, "max_completion_length": 4}
    return merge(cls(), {"model": {"name": str(model)}, "sampling": sampling, **values})


def generated(config: GenerateConfig, **rows: Any) -> tuple[list[dict[str, Any]], str]:
    out = io.StringIO()
    result = generate.run(config, console=Console(file=out), **rows)
    return result["completions"], out.getvalue()


@pytest.mark.parametrize("arch", ["gpt2", "gpt_neox", "opt"])
def test_models_without_key_value_heads_sample_and_train(arch: str, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m", arch)
    flags = ["--sampling.max-completion-length", "4", "--output", str(tmp_path / "o.jsonl")]
    assert main(["generate", "--model", str(folder), "--prompt", "hi", *flags]) == 0
    (record,) = lines(tmp_path / "o.jsonl")
    assert record["prompt"] == [{"role": "user", "content": "hi"}] and record["n_tokens"] == 4
    run_grpo(grpo_config(folder, tmp_path / "run"))
    steps = lines(tmp_path / "run/metrics.jsonl")
    assert [is_on_policy(step) for step in steps] == [True, True] and steps[0]["grad_norm"] > 0


def test_a_random_choice_of_prompts(model: Path) -> None:
    """data.shuffle: the same ones with the same seed, others with another; without it the first ones."""

    def chosen(**values: Any) -> list[int]:
        records, _ = generated(config_of(GenerateConfig, model, **values), rows=ROWS)
        return [record["prompt_id"] for record in records]

    assert chosen(num_prompts=3) == [0, 1, 2] and chosen(num_prompts=99) == list(range(8))
    mixed = chosen(num_prompts=3, data={"shuffle": True})
    assert mixed == chosen(num_prompts=3, data={"shuffle": True}) != [0, 1, 2]
    assert mixed != chosen(num_prompts=3, data={"shuffle": True}, seed=1)
    assert sorted(chosen(data={"shuffle": True})) == list(range(8)) != chosen(data={"shuffle": True})


def test_evaluation_writes_valid_json(model: Path, data: Path, tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text(REWARD)
    output = tmp_path / "new/folder/scores.jsonl"
    config = config_of(
        EvaluateConfig,
        model,
        data={"path": str(data), "shuffle": True},
        rewards=[f"{tmp_path / 'r.py'}:half"],
        num_prompts=3,
        output=str(output),
    )
    evaluate.run(config, console=Console(file=io.StringIO()))
    text = output.read_text()
    assert "NaN" not in text
    records = [json.loads(line) for line in text.splitlines()]
    assert [record["rewards"]["half"] for record in records] == [None, 1 / 8, 2 / 8]
    assert not {"step", "advantage"} & records[0].keys()
    assert [record["prompt_id"] for record in records] != [0, 1, 2]


@pytest.mark.parametrize("command", ["generate", "eval"])
def test_an_output_that_cannot_be_is_refused_before_the_model_is_loaded(command: str, tmp_path: Path) -> None:
    """The model does not exist: to come that far would be another error."""
    there, folder = tmp_path / "there.jsonl", tmp_path / "folder"
    there.write_text("precious")
    folder.mkdir()
    for output, message in (
        (there, "is there already, and would be lost"),
        (folder, "is there already"),
        (there / "o.jsonl", "cannot be written: (Not a directory|File exists)"),
    ):
        with pytest.raises(ConfigError, match=message) as error:
            if command == "generate":
                generated(config_of(GenerateConfig, tmp_path / "none", prompts=["hi"], output=str(output)))
            else:
                config = config_of(EvaluateConfig, tmp_path / "none", rewards=["length"], output=str(output))
                evaluate.run(config, console=Console(file=io.StringIO()), rows=ROWS)
        assert f"output = '{output}'" in str(error.value)
    assert there.read_text() == "precious" and sorted(tmp_path.iterdir()) == [folder, there]


def test_prompts_beside_rows_are_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match="prompts and rows are both given"):
        generated(config_of(GenerateConfig, model, prompts=["hi"]), rows=ROWS)


def test_plain_prompts_that_bypass_a_chat_template_are_said(model: Path, tmp_path: Path) -> None:
    completion = {"completion": "Done."}
    for rows, count in ((ROWS, 1), (CHATS, 0)):
        _, said = generated(config_of(GenerateConfig, model), rows=rows)
        assert said.replace("\n", " ").count(NOTE) == count
        _, said = run_grpo(grpo_config(model, tmp_path / "none"), rows=rows, dry_run=True)
        assert said.replace("\n", " ").count(NOTE) == count
        demonstrations = [{**row, **completion} for row in rows]
        if rows is CHATS:
            answer = [{"role": "assistant", "content": "Done."}]
            demonstrations = [{**row, "completion": answer} for row in rows]
        _, said = run_sft(sft_config(model, tmp_path / "none"), rows=demonstrations, dry_run=True)
        assert said.replace("\n", " ").count(NOTE) == count
    _, said = generated(config_of(GenerateConfig, model, data={"system": "Be brief."}), rows=ROWS)
    assert NOTE not in said
    _, said = generated(config_of(GenerateConfig, model, prompts=["hi"]))
    assert NOTE not in said


def test_held_out_rows_are_of_the_split_asked_for(model: Path, tmp_path: Path) -> None:
    import datasets

    parts = {"train": ROWS[:4], "test": ROWS[4:6]}
    splits = datasets.DatasetDict({name: datasets.Dataset.from_list(rows) for name, rows in parts.items()})
    config = grpo_config(model, tmp_path / "run", data__split="test", run__num_steps=1)
    run_grpo(config, rows=ROWS, eval_rows=splits)
    assert "eval/varied" in lines(tmp_path / "run/metrics.jsonl")[0]
    with pytest.raises(DataError, match="no split 'validation'"):
        config = grpo_config(model, tmp_path / "other", data__split="validation")
        run_grpo(config, rows=ROWS, eval_rows=splits)
