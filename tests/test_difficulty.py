"""`razona grpo --min-pass-rate / --max-pass-rate`: which prompts are left out, when, and across a resume."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import ROWS, contents, grpo_config, lines, model_folder, run_grpo

from razona.cli import main
from razona.config import GRPOConfig, PassRule
from razona.config.load import load_config
from razona.data import PromptSource
from razona.engines.fake import FakeEngine
from razona.errors import ConfigError, DataError
from razona.rewards import bind, pass_reward
from razona.rollout.difficulty import Band, PassRate, Tally, make_source
from razona.run.console import Console
from razona.types import Prompt

BAND = {"objective__difficulty": {"min_pass_rate": 0.2, "max_pass_rate": 0.8}}


def right(*, completion_ids: list[list[int]], answer: list[str]) -> list[float | None]:
    """0 is impossible, 1 always right, 2 not to be judged; the others are right by chance."""
    fixed: dict[str, float | None] = {"0": 0.0, "1": 1.0, "2": None}
    return [fixed.get(a, float(sum(ids) % 2)) for ids, a in zip(completion_ids, answer, strict=True)]


def shape(*, completion_ids: list[list[int]]) -> list[float]:
    return [sum(ids) % 97 / 97 for ids in completion_ids]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("models") / "llama")


def options(model: Path, out: Path, *, every: int = 0, samples: int = 6, **changes: Any) -> GRPOConfig:
    difficulty = {
        "min_pass_rate": 0.2,
        "max_pass_rate": 0.8,
        "filter_every": every,
        "filter_samples": samples,
    }
    return grpo_config(model, out, **{"objective__difficulty": difficulty, "prompts_per_step": 3, **changes})


def test_only_prompts_of_middle_difficulty_are_trained_on(model: Path, tmp_path: Path) -> None:
    _, said = run_grpo(options(model, tmp_path / "run", run__num_steps=4), reward_fns=[right])
    said = said.replace("\n", " ")
    first, *others = lines(tmp_path / "run/metrics.jsonl")
    counted = {
        name: first[f"difficulty/{name}"] for name in ("too_easy", "too_hard", "impossible", "unscored")
    }
    assert counted["too_easy"] >= 1 and counted["impossible"] >= 1 and counted["unscored"] == 1
    assert first["difficulty/kept"] + counted["too_easy"] + counted["too_hard"] + 1 == 8
    assert not any(name.startswith("difficulty/") for step in others for name in step)
    trained = {record["prompt_id"] for record in lines(tmp_path / "run/rollouts.jsonl")}
    assert not trained & {0, 1, 2} and len(trained) == first["difficulty/kept"]
    assert "filter" in lines(tmp_path / "run/timings.jsonl")[0]
    for words in (
        "filter: only prompts whose completions pass (right above 0) at a rate in 0.2..0.8; 6 samples of "
        "each of the 8 prompts, once, before step 1",
        "measuring the pass rates of 8 prompts, 6 samples each",
        f"before step 1: {first['difficulty/kept']:.0f} of 8 prompts kept (pass rate in 0.2..0.8)",
        "1 that the reward cannot score",
    ):
        assert words in said, words


def test_the_order_is_that_of_the_whole(model: Path) -> None:
    """What is left out is skipped; every epoch has each of the others once."""
    prompts = [Prompt(10 + i, f"p{i}", (1,), {}) for i in range(7)]
    (reward,) = bind([shape], columns=[])
    config = GRPOConfig(objective=load_config(GRPOConfig, None, ["--max-pass-rate", "0.5"]).objective)
    source = make_source(config, prompts, [reward], Console(file=io.StringIO()))
    source.left_out = frozenset({11, 15})  # type: ignore[attr-defined]
    whole = [p.id for p in PromptSource(prompts, seed=0).take(28)]
    some = [p.id for n in (3, 0, 5, 1, 11) for p in source.take(n)]
    assert some == [i for i in whole if i not in (11, 15)]
    again = make_source(config, prompts, [reward], Console(file=io.StringIO()))
    again.load_state_dict(source.state_dict())
    assert [p.id for p in again.take(9)] == [p.id for p in source.take(9)]


@pytest.mark.parametrize("every", [0, 2, 4])
def test_a_resumed_run_is_the_same_to_the_byte(model: Path, tmp_path: Path, every: int) -> None:
    """Three steps of six: the third is not one that measures, the fifth is, for every 2 and 4."""
    run_grpo(options(model, tmp_path / "whole", every=every, run__num_steps=6), reward_fns=[right])
    run_grpo(options(model, tmp_path / "halves", every=every, run__num_steps=3), reward_fns=[right])
    again = options(model, tmp_path / "halves", every=every, run__num_steps=6, run__resume=True)
    _, said = run_grpo(again, reward_fns=[right])
    assert contents(tmp_path / "halves") == contents(tmp_path / "whole")
    measured = [
        i for i, step in enumerate(lines(tmp_path / "whole/metrics.jsonl")) if "difficulty/kept" in step
    ]
    assert measured == {0: [0], 2: [0, 2, 4], 4: [0, 4]}[every]
    assert said.count("measuring the pass rates") == {0: 0, 2: 1, 4: 1}[every]
    changed = options(model, tmp_path / "halves", every=every + 1, run__num_steps=6, run__resume=True)
    with pytest.raises(ValueError, match=r"objective.difficulty.filter_every: it was"):
        run_grpo(changed, reward_fns=[right])


def test_measuring_changes_nothing_else(model: Path, tmp_path: Path) -> None:
    """A band that leaves out what teaches nothing here: the others' rollouts are those of a run without it,
    and they are not the completions that were measured."""
    seen: list[tuple[int, ...]] = []

    def look(*, completion_ids: list[list[int]]) -> list[float]:
        seen.extend(map(tuple, completion_ids))
        return [float(i % 2) for i in range(len(completion_ids))]

    run_grpo(options(model, tmp_path / "with", samples=4, run__num_steps=1), reward_fns=[look])
    measured, trained = seen[: 8 * 4], seen[8 * 4 :]
    assert len(trained) == 3 * 4 and not set(measured) & set(trained)
    plain = grpo_config(model, tmp_path / "without", prompts_per_step=3, run__num_steps=1)
    run_grpo(plain, reward_fns=[look])
    assert contents(tmp_path / "with")["rollouts.jsonl"] == contents(tmp_path / "without")["rollouts.jsonl"]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("0", ["8 too hard, of which 8 impossible", "They are too hard for this model: take easier prompts"]),
        ("1", ["8 too easy", "They are too easy for this model: take harder prompts"]),
        ("2", ["8 that the reward cannot score", "The reward function abstains: look at the column"]),
    ],
)
def test_nothing_left_talks_about_difficulty(
    model: Path, tmp_path: Path, answer: str, words: list[str]
) -> None:
    rows = [{**row, "answer": answer} for row in ROWS]
    with pytest.raises(DataError) as error:
        run_grpo(options(model, tmp_path / "run"), rows=rows, reward_fns=[right])
    for part in [
        "Before step 1 no prompt is of middle difficulty: 0 of 8",
        "--min-pass-rate and --max-p",
        *words,
    ]:
        assert part in str(error.value)


def test_where_all_is_cut_off_it_is_said() -> None:
    rates = [PassRate(i, passes=0, count=4, cut=3) for i in range(5)]
    tally = Tally.of(rates, Band(0.1, 1.0), samples=4)
    assert tally == Tally(0, 0, 5, 5, 0, 0.0, 0.75)
    assert tally.cure().startswith(
        "75% of the completions were cut off before they answered: raise sampling.max"
    )
    mixed = Tally.of([PassRate(i, passes=i, count=8, cut=0) for i in range(9)], Band(0.25, 0.75), samples=8)
    assert (mixed.too_hard, mixed.impossible, mixed.kept, mixed.too_easy) == (2, 1, 5, 2)
    zero_kept = Tally.of([PassRate(0, 0, 4, 0)], Band(0.0, 0.5), samples=4)
    assert (zero_kept.kept, zero_kept.too_hard, zero_kept.impossible) == (1, 0, 0)
    assert math.isnan(Tally.of([PassRate(0, 0, 0, 0)], Band(0.0, 0.5), samples=4).pass_rate)


def test_few_are_left(model: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}?", "answer": "9" if i == 3 else "0"} for i in range(8)]
    _, said = run_grpo(options(model, tmp_path / "run", samples=12), rows=rows, reward_fns=[right])
    assert "1 prompts are left and a step takes 3: every step sees some of them more than once" in said
    assert {record["prompt_id"] for record in lines(tmp_path / "run/rollouts.jsonl")} == {3}


def test_which_reward_says_what_passes(model: Path, tmp_path: Path) -> None:
    def exact_answer(completions: list[Any]) -> list[float]:
        return [0.0] * len(completions)

    one, two, exact = bind([shape, right, exact_answer], columns=["answer"])
    assert (
        pass_reward([one], "", option="o") is one and pass_reward([one, exact, two], "", option="o") is exact
    )
    assert pass_reward([one, two], "right", option="o") is two
    with pytest.raises(ConfigError, match=r"none is named. Give --o one of: shape, r"):
        pass_reward([one, two], "", option="o")
    with pytest.raises(ConfigError, match=r"'rigt' is none of the reward functions. Did you mean 'right'\?"):
        pass_reward([one, two], "rigt", option="o")
    config = options(model, tmp_path / "run", objective__difficulty__pass_above=0.5)
    run_grpo(config, reward_fns=[shape])
    figures = lines(tmp_path / "run/metrics.jsonl")[0]
    assert 0.2 < figures["difficulty/pass_rate"] < 0.8


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--min-pass-rate 0.8 --max-pass-rate 0.2", "min_pass_rate = 0.8 is above max_pass_rate = 0.2"),
        ("--filter-every 5", "leaves out no prompt: every pass rate lies in 0..1. Give --min-pass-rate"),
        (
            "--min-pass-rate 20",
            "objective.difficulty.min_pass_rate = 20.0 cannot work: it must be at least 0 and",
        ),
        ("--min-pass-rate 0.1 --objective.difficulty.filter-samples 1", "it must be at least 2"),
        ("--min-pass-rate 0.1 --reward length", "which reward function says so? none is named"),
    ],
)
def test_options_that_cannot_work(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: str, message: str
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "1"}\n')
    run = [
        "--model",
        str(model),
        "--data",
        str(tmp_path / "rows.jsonl"),
        "--output-dir",
        str(tmp_path / "run"),
    ]
    assert main(["grpo", *run, "--reward", "format", *flags.split()]) == 2
    assert message in capsys.readouterr().err


def test_a_fake_engine_is_measured_as_it_is(tmp_path: Path) -> None:
    """An engine that is right half of the time: rates of a prompt do not depend on its neighbours."""
    from razona.rollout.difficulty import measure
    from razona.types import Sampling

    engine = FakeEngine(("1", "2"), stop_token_ids=())
    (reward,) = bind([lambda completions: [float(c == "1") for c in completions]], columns=[])
    prompts = [Prompt(i, f"p{i}", (1,), {}) for i in range(40)]
    given: dict[str, Any] = {
        "sampling": Sampling(group_size=16, max_completion_length=1),
        "rule": PassRule(),
        "seed": 0,
        "step": -2,
        "reward_timeout": 60.0,
    }
    rates = measure(engine, prompts, reward, **given)
    assert 0.4 < sum(rate.rate for rate in rates) / 40 < 0.6 and {rate.count for rate in rates} == {16}
    assert rates[7:8] == measure(engine, prompts[7:8], reward, **given)
    assert {rate.cut for rate in rates} == {16}


def test_every_measurement_draws_anew(model: Path, tmp_path: Path) -> None:
    """Where the weights stay as they are, too: two measurements know more than one."""
    seen: list[tuple[int, ...]] = []

    def look(*, completion_ids: list[list[int]]) -> list[float]:
        seen.extend(map(tuple, completion_ids))
        return [float(i % 2) for i in range(len(completion_ids))]

    config = options(model, tmp_path / "run", every=1, samples=4, optimizer__learning_rate=0.0)
    run_grpo(config, reward_fns=[look])
    per_step = 8 * 4 + 3 * 4
    assert len(seen) == 2 * per_step and not set(seen[: 8 * 4]) & set(seen[per_step : per_step + 8 * 4])
