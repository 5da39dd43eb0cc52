"""Dynamic sampling: a step's batch is full of groups that are neither all right nor all wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import is_on_policy
from tiny_runs import ROWS, grpo_config, lines, model_folder, run_grpo, weights
from torch import Tensor

from razona.batch import collate
from razona.config import (
    DifficultyConfig,
    DynamicSamplingConfig,
    GRPOConfig,
    ObjectiveConfig,
    SelectConfig,
)
from razona.data import PromptSource
from razona.errors import CheckpointError, ConfigError, DifficultyError
from razona.objective import Objective, dapo, grpo
from razona.rewards import bind, soft_overlong
from razona.rollout.collect import collect, passes
from razona.rollout.dynamic_sampling import DynamicSampling, make_dynamic_sampling
from razona.run.checkpoint import load_checkpoint, save_checkpoint
from razona.run.folder import Phases
from razona.types import Completion, Group, Prompt, Sampling


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"))


def prompts_of(count: int) -> list[Prompt]:
    return [Prompt(id=i, input=f"p{i + 1}", token_ids=(i + 1,), columns={}) for i in range(count)]


def right(*, completions: list[str], **_: Any) -> list[float]:
    return [float(text == "1") for text in completions]


def rounds_of(digits: list[str], per_round: int) -> Iterator[tuple[list[Group], Tensor]]:
    """One group per string of digits, "0100": its second completion is right."""
    prompts = prompts_of(len(digits))
    for start in range(0, len(digits), per_round):
        groups = [
            Group(prompt, tuple(Completion((7, 9), (-0.5, -0.25), d, "stop", 0) for d in row))
            for prompt, row in zip(prompts[start:], digits[start : start + per_round], strict=False)
        ]
        yield groups, torch.tensor([[[float(c.text)] for c in g.completions] for g in groups]).double()


SEVEN_PROMPTS = ["1111", "0100", "0000", "1011", "0110", "1111", "0010"]


def dynamic_sampling_of(**options: Any) -> DynamicSampling:
    return DynamicSampling(DynamicSamplingConfig(**options), bind([right], columns=["prompt"]), prompts_of(9))


def names(groups: list[Group]) -> list[Any]:
    return [group.prompt.input for group in groups]


def test_dynamic_sampling_golden() -> None:
    """docs/algorithms/advantages.md#dynamic-sampling: p2, then p4 and p5 are kept; 6 prompts are consumed."""
    dynamic_sampling, rounds = dynamic_sampling_of(), rounds_of(SEVEN_PROMPTS, 3)
    groups, rewards, figures = dynamic_sampling(lambda: next(rounds), 3)
    assert names(groups) == ["p2", "p4", "p5"] and rewards.shape == (3, 4, 1)
    assert rewards.sum((1, 2)).tolist() == [1, 3, 2]
    assert figures["dynamic_sampling/rounds"] == 2 and figures["dynamic_sampling/sampled_groups"] == 6
    assert figures["dynamic_sampling/sampled_tokens"] == 6 * 4 * 2
    assert figures["dynamic_sampling/extra_completions"] == 12 and figures["dynamic_sampling/surplus"] == 0
    assert figures["dynamic_sampling/pass_rate/before"] == pytest.approx(14 / 24)
    assert figures["dynamic_sampling/pass_rate/after"] == figures["dynamic_sampling/reward/after"] == 0.5
    assert figures["dynamic_sampling/all_right"] == pytest.approx(1 / 3)
    assert figures["dynamic_sampling/all_wrong"] == pytest.approx(1 / 6)


def test_the_cap_talks_about_difficulty() -> None:
    rounds = rounds_of(SEVEN_PROMPTS, 3)
    with pytest.raises(DifficultyError, match=r"1 rounds, 3 prompts of 4 completions, gave 1 mixed groups"):
        dynamic_sampling_of(max_rounds=1)(lambda: next(rounds), 3)
    for digits, word in (("0000", "too hard"), ("1111", "too easy")):
        rounds = rounds_of([digits] * 6, 2)
        with pytest.raises(DifficultyError, match=word):
            dynamic_sampling_of(max_rounds=3)(lambda rounds=rounds: next(rounds), 2)  # type: ignore[misc]


def test_surplus_waits_for_the_next_step_and_survives_a_checkpoint(tmp_path: Path) -> None:
    dynamic_sampling, rounds = (
        dynamic_sampling_of(),
        rounds_of(["0100", "0000", "1011", "0110", "0001", "1111", "0010"], 3),
    )
    first, _, figures = dynamic_sampling(lambda: next(rounds), 3)
    assert names(first) == ["p1", "p3", "p4"] and figures["dynamic_sampling/surplus"] == 1
    save_checkpoint(tmp_path, "step-1", {"dynamic_sampling": dynamic_sampling}, meta={})
    again = dynamic_sampling_of()
    load_checkpoint(tmp_path / "step-1", {"dynamic_sampling": again})
    assert again.surplus[0][0] == dynamic_sampling.surplus[0][0]
    assert torch.equal(again.surplus[0][1], dynamic_sampling.surplus[0][1])
    second, _, figures = again(lambda: next(rounds), 2)
    assert names(second) == ["p5", "p7"] and figures["dynamic_sampling/waiting"] == 1
    other = DynamicSampling(DynamicSamplingConfig(), bind([right], columns=["prompt"]), prompts_of(2))
    with pytest.raises(CheckpointError, match="completions of prompt 4"):
        load_checkpoint(tmp_path / "step-1", {"dynamic_sampling": other})


def test_right_is_what_one_reward_says() -> None:
    """A punishment of length makes the sums of right completions differ; the group stays all right."""
    bound = bind([right, soft_overlong(8, 4)], columns=["prompt"])
    dynamic_sampling = DynamicSampling(DynamicSamplingConfig(), bound, prompts_of(1))
    assert dynamic_sampling.right(torch.tensor([[[1.0, -0.5], [1.0, 0.0], [0.0, -1.0]]])).tolist() == [
        [True, True, False]
    ]
    assert not dynamic_sampling.right(torch.tensor([[torch.nan, 1.0]])).any()
    bound = bind([right, lambda completions: [0.0] * len(completions)], columns=["prompt"])
    with pytest.raises(
        ConfigError, match=r"none is named\. Give --objective\.dynamic-sampling\.pass-reward one of: "
    ):
        DynamicSampling(DynamicSamplingConfig(), bound, prompts_of(1))
    with pytest.raises(ConfigError, match=r"'rigth' is none of .* Did you mean 'right'"):
        DynamicSampling(DynamicSamplingConfig(pass_reward="rigth"), bound, prompts_of(1))
    assert DynamicSampling(DynamicSamplingConfig(pass_reward="lambda"), bound, prompts_of(1)).pass_index == 1


def test_a_prompt_of_two_rounds_gets_other_seeds() -> None:
    seen: list[int] = []

    class Engine:
        def generate(self, prompts: Any, sampling: Any, *, seeds: Any) -> list[Group]:
            seen.extend(seed for row in seeds for seed in row)
            digits = "01" if len(seen) > 4 else "00"
            texts = [Completion((7,), (-0.5,), d, "stop", 0) for d in digits]
            return [Group(prompt, tuple(texts)) for prompt in prompts]

    groups, _, figures = collect(
        Engine(),  # type: ignore[arg-type]
        PromptSource(prompts_of(2), seed=0),
        bind([right], columns=["prompt"]),
        num_prompts=2,
        sampling=Sampling(group_size=2),
        seed=0,
        step=0,
        reward_timeout=9.0,
        phases=Phases(),
        dynamic_sampling=dynamic_sampling_of(),
    )
    assert len(groups) == 2 and figures["dynamic_sampling/rounds"] == 2
    assert len(set(seen)) == 8


def odd(*, completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Right by chance, rarely."""
    return [float(sum(ids) % 5 == 0) for ids in completion_ids]


def test_stale_rows_are_anchored_to_what_they_were_sampled_with() -> None:
    groups = next(rounds_of(["01", "10"], 2))[0]
    batch = collate(groups)

    class Scorer:
        def logprobs(self, micro: Any, *, temperature: float) -> Tensor:
            return torch.full(micro.token_ids.shape, -9.0)

    old = batch.with_old(Scorer(), temperature=1.0, budget=0, stale=[True, False, False, True]).old_logprobs
    assert old is not None and old.tolist() == [[-0.5, -0.25], [-9, -9], [-9, -9], [-0.5, -0.25]]


@pytest.mark.parametrize("objective", ["dapo", "grpo"])
def test_every_batch_is_full(model: Path, tmp_path: Path, objective: str) -> None:
    mode = {"dapo": "auto", "grpo": "on"}[objective]
    config = grpo_config(
        model,
        tmp_path / "run",
        objective__name=objective,
        objective__dynamic_sampling__mode=mode,
        run__num_steps=4,
    )
    _, printed = run_grpo(config, reward_fns=[odd])
    steps = lines(tmp_path / "run/metrics.jsonl")
    assert all(step["frac_zero_std"] == 0 for step in steps)
    assert (
        max(step["dynamic_sampling/rounds"] for step in steps) > 1
        and max(s["dynamic_sampling/waiting"] for s in steps) > 0
    )
    for step in steps:
        assert 0 < step["dynamic_sampling/pass_rate/after"] < 1 and is_on_policy(step)
        extra = (step["dynamic_sampling/sampled_groups"] - 4) * 4
        assert step["dynamic_sampling/extra_completions"] == extra
    assert len(lines(tmp_path / "run/rollouts.jsonl")) == 4 * 16
    assert "trains on: groups that are neither all right nor all wrong (right: odd > 0)" in printed


def test_off_and_not_asked_for(model: Path, tmp_path: Path) -> None:
    for name, mode in (("dapo", "off"), ("grpo", "auto")):
        config = grpo_config(
            model,
            tmp_path / name,
            objective__name=name,
            objective__dynamic_sampling__mode=mode,
            run__num_steps=1,
        )
        _, printed = run_grpo(config, reward_fns=[odd])
        assert "trains on" not in printed
        assert not any(key.startswith("refill") for key in lines(tmp_path / name / "metrics.jsonl")[0])


def test_resume_with_a_surplus(model: Path, tmp_path: Path) -> None:
    """Stopped where groups wait and resumed equals one never stopped, byte for byte."""

    def part(name: str, steps: int, **more: Any) -> None:
        changes = {"objective__name": "dapo", "run__num_steps": steps, "run__save_every": 1, **more}
        run_grpo(grpo_config(model, tmp_path / name, **changes), reward_fns=[odd])

    part("whole", 4)
    waiting = [step["dynamic_sampling/surplus"] for step in lines(tmp_path / "whole/metrics.jsonl")]
    part("parts", 1 + next(index for index in range(3) if waiting[index] > 0))
    part("parts", 4, run__resume=True)
    assert weights(tmp_path / "whole").keys() == weights(tmp_path / "parts").keys()
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "parts" / name).read_bytes()
    for key, value in weights(tmp_path / "whole").items():
        assert torch.equal(value, weights(tmp_path / "parts")[key])


def test_prompts_that_teach_nothing_end_the_run_and_keep_the_weights(model: Path, tmp_path: Path) -> None:
    config = grpo_config(
        model,
        tmp_path / "run",
        objective__name="dapo",
        objective__dynamic_sampling__max_rounds=2,
        run__num_steps=4,
    )
    with pytest.raises(DifficultyError, match=r"step 1: 2 rounds, 8 prompts .* too hard .* weights before"):
        run_grpo(config, rows=ROWS, reward_fns=[lambda completions: [0.0] * len(completions)])
    assert (tmp_path / "run/model/config.json").exists()


def test_it_is_a_field_of_the_objective_and_the_mode_has_the_last_word() -> None:
    """Under whatever name: a DAPO with another loss is one still."""
    bound = bind([right], columns=["prompt"])

    def made(objective: Objective, mode: Any) -> bool:
        options = ObjectiveConfig(dynamic_sampling=DynamicSamplingConfig(mode=mode))
        config = GRPOConfig(objective=options)
        return make_dynamic_sampling(config, objective, bound, prompts_of(1)) is not None

    mine = dapo()._replace(name="mine")
    assert made(mine, "auto") and not made(mine, "off") and mine.fingerprint["dynamic_sampling"]
    assert not made(grpo(), "auto") and made(grpo(), "on")


def test_one_rule_says_what_passes() -> None:
    rewards = torch.tensor([0.0, 0.5, 1.0, torch.nan])
    for rule in (
        DynamicSamplingConfig(pass_above=0.5),
        DifficultyConfig(pass_above=0.5, min_pass_rate=0.1),
        SelectConfig(pass_above=0.5),
    ):
        assert passes(rewards, rule).tolist() == [False, False, True, False]
