"""The family through the loop: objectives, importance weights, overlong answers, a refreshed reference."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import (
    ROWS,
    contents,
    distance,
    grpo_config,
    lines,
    model_folder,
    run_grpo,
)

from razona.batch import Batch, collate
from razona.build.objective import objective_from
from razona.objective import Objective, cispo, grpo, gspo, rloo, with_importance
from razona.rollout.metrics import UpdateMeter
from razona.run.checkpoint import newest_checkpoint
from razona.types import Completion, Group, Prompt

SEVERAL = {"minibatches_per_rollout": 2, "run__num_steps": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("models") / "llama")


HEADERS = {
    "grpo": ("by GRPO", "mean over the tokens of a completion", "ratio of a token in [0.8, 1.2]"),
    "dr_grpo": ("by Dr. GRPO", "not divided by a deviation", "* 12) (TRL: dr_grpo)"),
    "dapo": ("by DAPO", "mean over all completion tokens", "ratio of a token in [0.8, 1.28]"),
    "rloo": ("by RLOO", "leave one out", "one term per completion", "of a whole completion in [0.8, 1.2]"),
    "gspo": ("by GSPO", "one term per completion", "ratio of a completion in [0.9997, 1.0004]"),
    "cispo": ("by CISPO", "mean over all completion tokens", "weight of a token, its ratio, at most 5"),
}  # fmt: skip


def test_every_objective_runs_and_says_what_it_does(model: Path, tmp_path: Path) -> None:
    seen = set()
    for name, words in HEADERS.items():
        config = grpo_config(
            model,
            tmp_path / name,
            objective__name=name,
            objective__dynamic_sampling__pass_above=0.5,
            **SEVERAL,
        )
        _, printed = run_grpo(config)
        for text in (*words, "none in the loss; KL not measured"):
            assert text in printed, name
        assert "importance:" not in printed and "overlong:" not in printed
        step, *_ = lines(tmp_path / name / "metrics.jsonl")
        assert step["grad_norm"] > 0 and not any(key.startswith("importance") for key in step)
        seen.add(round(step["grad_norm"], 6))
    assert len(seen) == len(HEADERS)


@pytest.mark.parametrize("name", ["rloo", "gspo", "cispo"])
def test_the_micro_batch_budget_changes_nothing(model: Path, tmp_path: Path, name: str) -> None:
    for folder, budget in (("all", 4096), ("one", 1)):
        run_grpo(
            grpo_config(
                model,
                tmp_path / folder,
                objective__name=name,
                model__precision="fp32",
                optimizer__eps=1e-3,
                tokens_per_microbatch=budget,
                **SEVERAL,
            )
        )
    assert distance(tmp_path / "all", tmp_path / "one") < 1e-6
    for a, b in zip(
        lines(tmp_path / "all/metrics.jsonl"), lines(tmp_path / "one/metrics.jsonl"), strict=True
    ):
        for key in a.keys() - {"mismatch/exact_share", "mismatch/mean_abs", "mismatch/max_abs"}:
            assert a[key] == pytest.approx(b[key], abs=1e-6, rel=1e-4), key


def measured(objective: Objective, new: list[float], old: list[float]) -> dict[str, float]:
    """What the meter says of one completion with these log-probs, and advantage 1."""
    completion = Completion((3,) * len(new), tuple(old), "", "stop", 0)
    batch = collate([Group(Prompt(0, "", (1,), {}), (completion,))])
    batch = replace(batch, advantages=torch.ones(1, 1))
    meter = UpdateMeter(objective)
    meter.add(batch, torch.tensor([new]), torch.tensor([old]), torch.tensor(0.5))
    meter.updated(2.0)
    return meter.metrics()


def test_the_clip_is_counted_on_the_ratio_it_bounds() -> None:
    old, apart, drifted = [-1.0, -1.0], [-0.5, -1.5], [-0.9, -0.9]
    for build, words in ((grpo, (0.5, 0.0)), (gspo, (0.0, 1.0)), (rloo, (0.0, 1.0)), (cispo, (0.0, 0.0))):
        found = measured(build(), apart, old)["clip/high"], measured(build(), drifted, old)["clip/high"]
        assert found == words, build
    assert measured(grpo(), apart, old)["ratio/max"] == pytest.approx(math.exp(0.5))
    assert measured(gspo(), apart, old)["ratio/max"] == pytest.approx(1.0)
    assert measured(rloo(), drifted, old)["ratio"] == pytest.approx(math.exp(0.2))


def test_bounds_too_wide_for_gspo_are_told(model: Path, tmp_path: Path) -> None:
    for high in (4e-4, 0.2):
        options: dict[str, Any] = {"objective__clip_high": high, "minibatches_per_rollout": 2}
        config = grpo_config(model, tmp_path / "run", objective__name="gspo", **options)
        _, printed = run_grpo(config, dry_run=True)
        assert ("so wide that it hardly ever acts" in printed) == (high == 0.2)


def test_dual_clip_reaches_the_loss(model: Path, tmp_path: Path) -> None:
    config = grpo_config(model, tmp_path / "run", objective__dual_clip=3.0, **SEVERAL)
    _, printed = run_grpo(config)
    assert "in [0.8, 1.2], and a loss of at most 3 |A| where A < 0 (dual clip)" in printed
    tensors = [torch.tensor([[x]]) for x in (0.0, -3.0, -1.0)]
    mask = torch.ones(1, 1, dtype=torch.bool)
    assert objective_from(config).loss_fn(*tensors, mask).item() == 3.0


def test_options_left_out_are_the_papers() -> None:
    config = grpo_config(Path("m"), Path("o"), objective__name="cispo", objective__clip_high=0.5)
    assert objective_from(config).clip == (None, 0.5)
    assert objective_from(grpo_config(Path("m"), Path("o"), objective__name="dapo")).clip == (0.2, 0.28)


# Importance weights.


def test_where_sampler_and_trainer_agree_the_correction_changes_no_bit(model: Path, tmp_path: Path) -> None:
    run_grpo(grpo_config(model, tmp_path / "plain"))
    for level in ("token", "sequence", "geometric"):
        config = grpo_config(
            model, tmp_path / level, objective__importance={"level": level, "outside": "mask", "high": 3.0}
        )
        _, printed = run_grpo(config)
        assert "importance: trainer / sampler probability per" in printed and "0 outside [0, 3]" in printed
        kept = [
            {k: v for k, v in step.items() if not k.startswith("importance")}
            for step in lines(tmp_path / level / "metrics.jsonl")
        ]
        assert kept == lines(tmp_path / "plain/metrics.jsonl")
        assert contents(tmp_path / level).items() >= {
            (name, data) for name, data in contents(tmp_path / "plain").items() if name != "metrics.jsonl"
        }
        step, *_ = lines(tmp_path / level / "metrics.jsonl")
        names = (
            "importance",
            "importance/min",
            "importance/max",
            "importance/masked",
            "importance/truncated",
        )
        assert [step[name] for name in names] == [1.0, 1.0, 1.0, 0.0, 0.0]
        assert step["mismatch/kl"] == 0.0


def test_what_the_sampler_cut_off_is_corrected_and_measured(model: Path, tmp_path: Path) -> None:
    """top_p 0.5: the sampler's tokens are likelier to it than to the trainer, so every ratio is below 1."""
    runs = {
        "none": {},
        "tis": {"level": "token"},
        "masked": {"level": "token", "outside": "mask", "low": 0.6, "high": 2.0},
        "sequence": {"level": "sequence", "low": 0.1},
    }
    steps = {}
    for name, importance in runs.items():
        config = grpo_config(
            model, tmp_path / name, sampling__top_p=0.5, objective__importance=importance, run__num_steps=1
        )
        _, printed = run_grpo(config)
        steps[name], *_ = lines(tmp_path / name / "metrics.jsonl")
        assert ("(TIS)" in printed) == (name == "tis") and ("(IcePop)" in printed) == (name == "masked")
    assert len({step["grad_norm"] for step in steps.values()}) == 4
    tis, masked, sequence = (steps[name] for name in ("tis", "masked", "sequence"))
    assert steps["none"]["mismatch/kl"] == tis["mismatch/kl"] > 0.01
    assert 0 < tis["importance/min"] < tis["importance"] < 1 and tis["importance/max"] <= 1.001
    assert tis["importance/masked"] == tis["importance/truncated"] == 0
    assert 0 < masked["importance/masked"] < 1 and masked["importance/min"] == 0
    assert masked["importance/truncated"] == 0
    assert sequence["importance/min"] == pytest.approx(0.1) and sequence["importance/truncated"] > 0


def test_the_kl_is_not_weighted(model: Path, tmp_path: Path) -> None:
    """Every policy term is masked away, and a KL term that pulls on every token stays."""
    nothing: dict[str, Any] = {"level": "token", "outside": "mask", "low": 1.0, "high": 1.0}
    plain: dict[str, Any] = {"sampling__top_p": 0.5, "run__num_steps": 1}
    for coefficient in (0.0, 0.5):
        pull = with_importance(grpo(kl_coef=coefficient), **nothing)._replace(
            kl_fn=lambda lp, ref, old, mask: torch.where(mask, lp, 0.0)
        )
        run_grpo(grpo_config(model, tmp_path / f"{coefficient}", **plain), objective=pull)
        step, *_ = lines(tmp_path / f"{coefficient}/metrics.jsonl")
        assert step["importance/masked"] > 0.95
        assert (step["grad_norm"] > 1.0) == (coefficient > 0)


# Completions that were cut off.


def test_the_overlong_filter(model: Path, tmp_path: Path) -> None:
    """Cut-off completions get no loss; their rewards stay in the group, their rows among the sequences."""
    seen: list[Batch] = []
    original = Batch.weighted

    def spy(self: Batch, weight_fn: Any) -> Batch:
        seen.append(original(self, weight_fn))
        return seen[-1]

    config = grpo_config(model, tmp_path / "run", objective__overlong_filter=True, run__num_steps=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Batch, "weighted", spy)
        _, printed = run_grpo(config)
    assert "overlong: no loss for completions that are cut off; their rewards count in their group" in printed
    records = lines(tmp_path / "run/rollouts.jsonl")
    cut = torch.tensor([record["finish_reason"] == "length" for record in records])
    assert 0 < cut.sum() < len(records)
    batch = seen[0]
    assert torch.equal(batch.loss_mask.any(1), ~cut)
    assert batch.weights is not None and batch.advantages is not None
    sums = batch.weights.sum(1)
    assert (sums[cut] == 0).all() and sums[~cut].tolist() == pytest.approx([1 / 16] * int((~cut).sum()))
    assert batch.advantages.reshape(4, 4).sum(1).abs().max() < 1e-5 and (batch.advantages[cut] != 0).any()
    step, *_ = lines(tmp_path / "run/metrics.jsonl")
    assert (
        step["truncated"] == cut.float().mean()
        and step["trained_tokens"] == batch.num_tokens < step["tokens"]
    )


def test_filtered_rows_are_not_computed_and_change_nothing(model: Path, tmp_path: Path) -> None:
    options = {"objective__overlong_filter": True, "model__precision": "fp32", "optimizer__eps": 1e-3}
    run_grpo(grpo_config(model, tmp_path / "skipped", **options))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Batch, "with_signal", lambda self: self)
        run_grpo(grpo_config(model, tmp_path / "kept", **options))
    assert distance(tmp_path / "skipped", tmp_path / "kept") < 1e-6


@pytest.mark.parametrize("options", [{}, {"objective__kl_coef": 0.1}, {"minibatches_per_rollout": 2},
                                     {"tokens_per_microbatch": 1, "objective__name": "gspo"}])  # fmt: skip
def test_when_every_completion_was_cut_off_nothing_happens_and_it_is_said(
    model: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    config = grpo_config(
        model, tmp_path / "run", sampling__max_completion_length=1, sampling__stop_token_ids=[],
        objective__overlong_filter=True, run__num_steps=1, model__precision="fp32", **options,
    )  # fmt: skip
    _, printed = run_grpo(config)
    step, *_ = lines(tmp_path / "run/metrics.jsonl")
    assert step["truncated"] == 1.0 and step["trained_tokens"] == step["grad_norm"] == step["loss"] == 0.0
    assert "step 1: every completion was cut off" in printed and "nothing was trained" in printed
    run_grpo(grpo_config(model, tmp_path / "still", model__precision="fp32", optimizer__learning_rate=0.0))
    assert distance(tmp_path / "run", tmp_path / "still") == 0


def test_soft_overlong_is_a_reward_of_its_own(model: Path, tmp_path: Path) -> None:
    config = grpo_config(
        model, tmp_path / "run", objective__soft_overlong=6, objective__reward_weights=[2.0], run__num_steps=1
    )
    _, printed = run_grpo(config, eval_rows=ROWS[:2])
    assert "2 x varied + 1 x soft_overlong" in printed
    assert "overlong: soft_overlong falls from 0 at 6 tokens to -1 at 12" in printed
    records = lines(tmp_path / "run/rollouts.jsonl")
    for record in records:
        punished = record["rewards"]["soft_overlong"]
        assert punished == pytest.approx(min(0.0, (6 - record["n_tokens"]) / 6))
        assert record["reward"] == pytest.approx(2 * record["rewards"]["varied"] + punished)
    assert {-1.0, 0.0} <= {record["rewards"]["soft_overlong"] for record in records}
    step, *_ = lines(tmp_path / "run/metrics.jsonl")
    assert "eval/varied" in step and "eval/soft_overlong" not in step


# The reference.


def test_the_reference_is_replaced_by_the_policy(model: Path, tmp_path: Path) -> None:
    config = grpo_config(
        model, tmp_path / "run", objective__refresh_reference_every=2, objective__kl_coef=0.1,
        run__num_steps=5, run__save_every=1, run__keep_checkpoints=9,
    )  # fmt: skip
    _, printed = run_grpo(config)
    kl = [step["kl"] for step in lines(tmp_path / "run/metrics.jsonl")]
    assert [value == 0 for value in kl] == [True, False, True, False, True]
    assert "0.1 x k3 to a reference that the policy replaces every 2 steps, in the loss" in printed
    newest, _ = newest_checkpoint(tmp_path / "run/checkpoints")
    assert newest is not None and (newest / "reference.safetensors").is_file()


def test_a_reference_that_stays_is_not_in_the_checkpoint(model: Path, tmp_path: Path) -> None:
    run_grpo(grpo_config(model, tmp_path / "run", objective__kl_coef=0.1, run__num_steps=1))
    assert not list(tmp_path.glob("run/checkpoints/*/reference*"))


def test_measured_kl_may_be_to_a_refreshed_reference(model: Path, tmp_path: Path) -> None:
    options = {"objective__refresh_reference_every": 2, "measure_kl_every": 1, "run__num_steps": 3}
    _, printed = run_grpo(grpo_config(model, tmp_path / "run", **options))
    assert [step["kl"] == 0 for step in lines(tmp_path / "run/metrics.jsonl")] == [True, False, True]
    assert "measured every 1 steps against a reference that the policy replaces every 2 steps" in printed
