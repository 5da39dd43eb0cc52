"""The GRPO loop on a tiny model: what it writes, what must not change its gradient, and that it learns."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import is_on_policy
from tiny_runs import CHATS, ROWS, distance, even, grpo_config, lines, model_folder, run_grpo, varied, weights

from razona.advantages import zero_std_groups
from razona.batch import Batch
from razona.build.model import load_model
from razona.build.precision import resolved
from razona.config.load import merge
from razona.engines.native import NativeEngine
from razona.errors import CheckpointError, ConfigError, RewardError
from razona.losses.kl import KL_ESTIMATORS
from razona.objective import grpo
from razona.policy import Policy


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("models") / "llama")


def test_smoke(model: Path, tmp_path: Path) -> None:
    """bf16, messages, unequal lengths: files, figures, header, and a model that transformers loads."""
    config = grpo_config(model, tmp_path / "run", sampling__group_size=8, run__print_every=1)
    result, printed = run_grpo(config, rows=CHATS, reward_fns=[varied, even])
    assert result["step"] == 2 and not result["interrupted"] and result["run"] == str(tmp_path / "run")
    steps = lines(tmp_path / "run/metrics.jsonl")
    assert [step["step"] for step in steps] == [1, 2]
    for step in steps:
        assert is_on_policy(step)
        assert step["ratio"] == 1.0 and step["clip/low"] == step["clip/high"] == 0.0
        assert step["grad_norm"] > 0 and step["lr"] == 1e-3 and step["tokens"] == step["trained_tokens"]
        assert 1 <= step["completion_length/min"] < step["completion_length"] < 12
        assert step["reward"] == pytest.approx(step["reward/varied"] + step["reward/even"])
        assert "kl" not in step
    records = lines(tmp_path / "run/rollouts.jsonl")
    assert len(records) == 2 * 4 * 8 and records[0]["rewards"].keys() == {"varied", "even"}
    group = records[:8]
    assert sum(record["advantage"] for record in group) == pytest.approx(0, abs=1e-5)
    assert {record["policy_version"] for record in records[32:]} == {1}
    for words in (
        "optimises: 1 x varied + 1 x even, by GRPO",
        "it cannot act: one update per rollout",
        "KL not measured (measure_kl_every = 0)",
        "bf16 compute, fp32 masters",
        "4 prompts x 8 completions of at most 12 tokens = 32 completions",
        "step 2: completions of one prompt",
        "done after step 2",
    ):
        assert words in printed
    assert {"config.json", "timings.jsonl"} <= {path.name for path in (tmp_path / "run").iterdir()}
    timings = lines(tmp_path / "run/timings.jsonl")[0]
    assert {"generate", "reward", "train", "optimizer"} <= timings.keys()
    assert weights(tmp_path / "run").keys() and (tmp_path / "run/checkpoints/step-000002/COMPLETE").is_file()


def test_a_string_prompt_rewards_strings(model: Path, tmp_path: Path) -> None:
    seen: list[Any] = []

    def look(*, prompts: list[Any], completions: list[Any], answer: list[str]) -> list[float]:
        seen.append((prompts[0], completions[0], answer[0]))
        return [float(len(c)) for c in completions]

    run_grpo(grpo_config(model, tmp_path / "run", run__num_steps=1), reward_fns=[look])
    prompt, completion, answer = seen[0]
    assert isinstance(completion, str) and prompt.endswith(f"{answer}:")


def test_every_step_is_on_policy_in_bf16(model: Path, tmp_path: Path) -> None:
    config = grpo_config(model, tmp_path / "run", run__num_steps=6, tokens_per_microbatch=40)
    run_grpo(config)
    assert [is_on_policy(step) for step in lines(tmp_path / "run/metrics.jsonl")] == [True] * 6


def test_the_micro_batch_budget_changes_nothing(model: Path, tmp_path: Path) -> None:
    """fp32: metrics and weights after three steps agree to 1e-6, whatever the budget."""
    for name, budget in (("all", 4096), ("few", 60), ("one", 1)):
        config = grpo_config(
            model, tmp_path / name, model__precision="fp32", run__num_steps=3, tokens_per_microbatch=budget,
            optimizer__eps=1e-3,
        )  # fmt: skip
        run_grpo(config)
    for name in ("few", "one"):
        assert distance(tmp_path / "all", tmp_path / name) < 1e-6
        for a, b in zip(
            lines(tmp_path / "all/metrics.jsonl"), lines(tmp_path / name / "metrics.jsonl"), strict=True
        ):
            apart = ("mismatch/exact_share", "mismatch/mean_abs", "mismatch/max_abs")
            for key in a.keys() - set(apart):
                assert a[key] == pytest.approx(b[key], abs=1e-6, rel=1e-6), key


def test_several_updates_per_rollout(model: Path, tmp_path: Path) -> None:
    """The ratio is 1 in the first update only; minibatches are whole groups; an epoch sees each once."""
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    objective = grpo()

    def spy(logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor) -> Any:
        seen.append(((logprobs.detach() - old)[mask].abs(), advantages[:, 0]))
        return objective.loss_fn(logprobs, old, advantages, mask)

    config = grpo_config(
        model, tmp_path / "run", run__num_steps=1, minibatches_per_rollout=2, epochs_per_rollout=2
    )
    run_grpo(config, objective=objective._replace(loss_fn=spy))
    del seen[0]  # made-up rows, tried before the first step
    assert len(seen) == 4
    assert seen[0][0].max() == 0
    assert all(moved.mean() > 1e-4 for moved, _ in seen[1:])
    for _, advantages in seen:
        assert advantages.shape == (8,) and (advantages != 0).all()
        assert advantages.reshape(2, 4).sum(1).abs().max() < 1e-5
    halves = [frozenset(advantages.tolist()) for _, advantages in seen]
    assert halves[0] | halves[1] == halves[2] | halves[3] and not halves[0] & halves[1]
    step = lines(tmp_path / "run/metrics.jsonl")[0]
    assert is_on_policy(step) and step["ratio/max"] > 1.0


@pytest.mark.parametrize("estimator", sorted(KL_ESTIMATORS))
def test_kl_in_the_loss(model: Path, tmp_path: Path, estimator: str) -> None:
    """It is 0 at step 1, where policy and reference are one, and pulls back afterwards."""
    config = grpo_config(
        model, tmp_path / "run", objective__kl_coef=0.1, objective__kl_estimator=estimator, run__num_steps=3
    )
    _, printed = run_grpo(config)
    kl = [step["kl"] for step in lines(tmp_path / "run/metrics.jsonl")]
    assert kl[0] == 0 and kl[1] > 0 and kl[2] > 0
    assert f"0.1 x {estimator} to the starting policy" in printed
    assert ("holds the policy nowhere" in printed) == (estimator == "k1")


def test_kl_holds_the_policy_back(model: Path, tmp_path: Path) -> None:
    last = {}
    for coefficient in (1e-9, 3.0):
        config = grpo_config(
            model, tmp_path / f"{coefficient}", objective__kl_coef=coefficient, run__num_steps=8,
            model__precision="fp32",
        )  # fmt: skip
        run_grpo(config, reward_fns=[even])
        last[coefficient] = lines(tmp_path / f"{coefficient}/metrics.jsonl")[-1]["kl"]
    assert last[3.0] < 0.5 * last[1e-9]


@pytest.mark.parametrize("arch", ["llama", "qwen2"])  # qwen2: the head is the embedding
def test_the_reference_stays_what_it_was(arch: str, tmp_path: Path) -> None:
    config = grpo_config(model_folder(tmp_path / arch, arch), tmp_path / "run", measure_kl_every=1)
    before: list[torch.Tensor] = []
    original = Batch.with_reference

    def spy(self: Batch, reference: Any, **options: Any) -> Batch:
        found = original(self, reference, **options)
        present = reference.policy.logprobs(self, temperature=1.0)
        before.append((present - found.ref_logprobs).abs().max().detach())
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Batch, "with_reference", spy)
        run_grpo(config)
    assert before[0] == 0 and before[1] > 0


def test_measuring_kl_changes_no_gradient(model: Path, tmp_path: Path) -> None:
    run_grpo(grpo_config(model, tmp_path / "plain", run__num_steps=4))
    _, printed = run_grpo(grpo_config(model, tmp_path / "measured", run__num_steps=4, measure_kl_every=2))
    assert distance(tmp_path / "plain", tmp_path / "measured") == 0
    plain, measured = (lines(tmp_path / name / "metrics.jsonl") for name in ("plain", "measured"))
    assert ["kl" in step for step in measured] == [True, False, True, False]
    assert measured[0]["kl"] == 0 and measured[2]["kl"] > 0
    assert [{k: v for k, v in step.items() if not k.startswith("kl")} for step in measured] == plain
    assert "measured every 2 steps" in printed


def test_no_reference_is_kept_when_none_is_needed(model: Path, tmp_path: Path) -> None:
    run_grpo(grpo_config(model, tmp_path / "run", run__num_steps=1))
    assert not (tmp_path / "run/reference.safetensors").exists()


def partly_zero_std(*, completion_ids: list[list[int]], answer: list[str], **_: Any) -> list[float]:
    """Half of the prompts have one reward for all completions."""
    return [1.0 if int(a) % 2 else sum(ids) % 7.0 for ids, a in zip(completion_ids, answer, strict=True)]


def test_zero_std_groups_are_skipped_and_change_nothing(model: Path, tmp_path: Path) -> None:
    options = {"model__precision": "fp32", "run__num_steps": 3, "optimizer__eps": 1e-3, "prompts_per_step": 8}
    run_grpo(grpo_config(model, tmp_path / "skipped", **options), reward_fns=[partly_zero_std])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Batch, "with_signal", lambda self: self)
        run_grpo(grpo_config(model, tmp_path / "kept", **options), reward_fns=[partly_zero_std])
    assert distance(tmp_path / "skipped", tmp_path / "kept") < 1e-6
    skipped, kept = (lines(tmp_path / name / "metrics.jsonl") for name in ("skipped", "kept"))
    for a, b in zip(skipped, kept, strict=True):
        assert a["frac_zero_std"] == b["frac_zero_std"] == 0.5
        assert a["trained_tokens"] < b["trained_tokens"] == a["tokens"]
        assert (a["loss"], a["grad_norm"]) == pytest.approx((b["loss"], b["grad_norm"]), abs=1e-6, rel=1e-5)


def test_only_zero_std_groups_change_no_weight(model: Path, tmp_path: Path) -> None:
    run_grpo(
        grpo_config(model, tmp_path / "run", model__precision="fp32"), reward_fns=[lambda **_: [1.0] * 16]
    )
    steps = lines(tmp_path / "run/metrics.jsonl")
    assert [step["grad_norm"] for step in steps] == [0.0, 0.0] and steps[0]["frac_zero_std"] == 1.0
    start = weights(tmp_path / "run")
    loaded = load_model(grpo_config(model, tmp_path).model, _quiet()).model.state_dict()
    assert all(torch.equal(start[name], loaded[name].float()) for name in start)


def _quiet() -> Any:
    import io

    from razona.run.console import Console

    return Console(file=io.StringIO())


def test_abstentions(model: Path, tmp_path: Path) -> None:
    """None is not 0: it enters no mean. All None: nothing to learn, nan in the figures, null in the file."""

    def some(*, completion_ids: list[list[int]], **_: Any) -> list[float | None]:
        return [None if i % 4 == 0 else 5.0 + sum(ids) % 7 for i, ids in enumerate(completion_ids)]

    def none(*, completion_ids: list[list[int]], **_: Any) -> list[None]:
        return [None] * len(completion_ids)

    run_grpo(grpo_config(model, tmp_path / "some"), reward_fns=[some])
    first, *_ = lines(tmp_path / "some/metrics.jsonl")
    assert first["reward"] >= 5 and first["reward/some/abstained"] == 0.25 and first["grad_norm"] > 0
    records = lines(tmp_path / "some/rollouts.jsonl")
    assert [r["rewards"]["some"] is None for r in records[:8]] == [True, False, False, False] * 2
    assert all(r["advantage"] == 0.0 and r["reward"] is None for r in records[:8:4])
    assert sum(r["advantage"] for r in records[:4]) == pytest.approx(0, abs=1e-5)

    run_grpo(grpo_config(model, tmp_path / "none"), reward_fns=[none])
    first, *_ = lines(tmp_path / "none/metrics.jsonl")
    assert first["reward"] is None and first["grad_norm"] == 0.0 and first["reward/none/abstained"] == 1.0

    run_grpo(grpo_config(model, tmp_path / "both"), reward_fns=[none, some, varied])
    first, *_ = lines(tmp_path / "both/metrics.jsonl")
    assert first["reward"] == pytest.approx(first["reward/some"] * 0.75 + first["reward/varied"])


def test_fewer_prompts_than_a_step_takes(model: Path, tmp_path: Path) -> None:
    """Every prompt comes again with other seeds, and it is said."""
    _, printed = run_grpo(grpo_config(model, tmp_path / "run", prompts_per_step=8), rows=ROWS[:3])
    assert "3 usable prompts and a step takes 8: every step sees each of them 2 to 3 times" in printed
    records = lines(tmp_path / "run/rollouts.jsonl")
    assert len(records) == 2 * 8 * 4
    texts = {(r["prompt"], r["completion"], r["n_tokens"], r["reward"]) for r in records[:32]}
    assert len(texts) > 24, "a prompt that stands twice in a step got the same completions twice"


def test_every_step_draws_anew(model: Path, tmp_path: Path) -> None:
    """The same prompts under the same weights: other completions."""
    config = grpo_config(model, tmp_path / "run", optimizer__learning_rate=0.0)
    run_grpo(config, rows=ROWS[:4])
    records = lines(tmp_path / "run/rollouts.jsonl")
    first, second = (
        {(r["prompt"], r["completion"]) for r in records if r["step"] == step} for step in (1, 2)
    )
    assert len(first & second) < 4


def test_dr_grpo_and_every_aggregation_run(model: Path, tmp_path: Path) -> None:
    seen = set()
    for name in ("grpo", "dr_grpo"):
        for how in ("per_sequence", "per_token", "sequence_sum", "fixed_length"):
            out = tmp_path / f"{name}-{how}"
            config = grpo_config(model, out, objective__name=name, objective__weights=how, run__num_steps=1)
            _, printed = run_grpo(config)
            assert ("by Dr. GRPO" if name == "dr_grpo" else "by GRPO") in printed
            seen.add(round(lines(out / "metrics.jsonl")[0]["grad_norm"], 6))
    assert len(seen) == 8


def test_weights_of_rewards(model: Path, tmp_path: Path) -> None:
    config = grpo_config(model, tmp_path / "run", objective__reward_weights=[2.0, 0.5])
    _, printed = run_grpo(config, reward_fns=[varied, even])
    assert "2 x varied + 0.5 x even" in printed
    first, *_ = lines(tmp_path / "run/metrics.jsonl")
    assert first["reward"] == pytest.approx(2 * first["reward/varied"] + 0.5 * first["reward/even"])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_it_learns(model: Path, tmp_path: Path, precision: str) -> None:
    """The share of even tokens rises from a half to over 0.9."""
    config = grpo_config(
        model, tmp_path / "run", model__precision=precision, run__num_steps=40, sampling__group_size=8,
        optimizer__learning_rate=5e-3,
    )  # fmt: skip
    run_grpo(config, reward_fns=[even])
    rewards = [step["reward"] for step in lines(tmp_path / "run/metrics.jsonl")]
    assert 0.35 < rewards[0] < 0.65
    assert sum(rewards[-5:]) / 5 > 0.9, [round(reward, 2) for reward in rewards]


def test_dry_run_writes_nothing(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("razona.train.grpo.train", None)
    result, printed = run_grpo(grpo_config(model, tmp_path / "run", objective__kl_coef=0.1), dry_run=True)
    assert result["dry_run"] and "nothing was sampled, trained or written" in printed
    assert "optimises" in printed and not list(tmp_path.iterdir())


def unfed(*, completions: list[str], anwser: list[str]) -> list[float]:
    raise AssertionError("never called")


@pytest.mark.parametrize("where", ["reward_fns", "eval_reward_fns"])
def test_a_parameter_no_column_feeds_is_refused_before_anything(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr(NativeEngine, "generate", None)
    parts = {where: [unfed], "eval_rows": ROWS[:2]}
    with pytest.raises(RewardError, match=r"'unfed'.*'anwser'.*prompt, answer.*Did you mean 'answer'\?"):
        run_grpo(grpo_config(model, tmp_path / "run"), **parts)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (lambda **k: [0.0, math.nan] + [1.0] * 14, r"returned nan"),
        (lambda **k: [0.0, math.inf] + [1.0] * 14, r"returned inf"),
        (lambda **k: [1.0], r"1 .*16"),
        (lambda **k: 1 / 0, r"ZeroDivisionError: division by zero"),
        (lambda **k: __import__("time").sleep(5), r"0\.2 s"),
    ],
    ids=["nan", "inf", "length", "exception", "time-out"],
)
def test_reward_failures_are_told(model: Path, tmp_path: Path, bad: Any, text: str) -> None:
    config = grpo_config(model, tmp_path / "run", reward_timeout=0.2)
    with pytest.raises(RewardError, match=text) as caught:
        run_grpo(config, reward_fns=[bad])
    assert "'lambda'" in str(caught.value)


def test_a_bad_number_names_row_and_completion(model: Path, tmp_path: Path) -> None:
    def bad(*, completions: list[str], answer: list[str]) -> list[float]:
        return [math.nan if i == 6 else 1.0 for i in range(len(completions))]

    with pytest.raises(RewardError) as caught:
        run_grpo(grpo_config(model, tmp_path / "run"), reward_fns=[bad])
    text = str(caught.value)
    assert "Reward function 'bad' returned nan" in text and "Row " in text and ", completion " in text


def test_another_config_or_data_set_is_refused_on_resume(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    run_grpo(grpo_config(model, out), eval_rows=ROWS[:2])
    again = {"run__resume": True, "run__num_steps": 3}
    with pytest.raises(CheckpointError, match=r"sampling\.temperature: it was 1\.0 and is 0\.9"):
        run_grpo(grpo_config(model, out, **again, sampling__temperature=0.9), eval_rows=ROWS[:2])
    with pytest.raises(CheckpointError, match=r"data_fingerprint: it was"):
        run_grpo(grpo_config(model, out, **again), rows=ROWS[1:], eval_rows=ROWS[:2])
    with pytest.raises(CheckpointError, match=r"data_fingerprint: it was"):
        run_grpo(grpo_config(model, out, **again), eval_rows=ROWS[:3])
    with pytest.raises(ConfigError, match=r"already holds a run"):
        run_grpo(grpo_config(model, out), eval_rows=ROWS[:2])
    before = (out / "metrics.jsonl").read_bytes()
    _, printed = run_grpo(grpo_config(model, out, **again), eval_rows=ROWS[:2])
    assert "resumed from step-000002" in printed
    assert (out / "metrics.jsonl").read_bytes().startswith(before)


def test_the_config_is_written_as_it_was_given(model: Path, tmp_path: Path) -> None:
    config = grpo_config(model, tmp_path / "run", run__num_steps=1)
    run_grpo(config)
    stored = json.loads((tmp_path / "run/config.json").read_text())["config"]
    assert merge(type(config)(), stored) == replace(config, model=resolved(config.model))


def test_zero_std_groups_are_counted_as_the_advantages_see_them() -> None:
    rewards = torch.tensor([[1.0, 1.0], [1.0, 2.0], [torch.nan, 1.0], [torch.nan, torch.nan]])
    assert zero_std_groups(rewards).tolist() == [True, False, True, True]


def test_policy_masters_are_what_is_updated(model: Path, tmp_path: Path) -> None:
    """bf16: an update too small for bf16 is kept in the fp32 masters, and sums up."""
    loaded = load_model(grpo_config(model, tmp_path).model, _quiet())
    config = grpo_config(model, tmp_path, optimizer__learning_rate=1e-6).optimizer
    policy = Policy(loaded.model, loaded.tokenizer, optimizer=config)
    master, compute = policy.masters[1], policy.compute[1]
    start, shown = master.detach().clone(), compute.detach().clone()
    for _ in range(3):
        compute.sum().backward()
        policy.update()
    assert (master - start).abs().max() > 0 and torch.equal(compute, master.to(torch.bfloat16))
    assert (compute == shown).float().mean() > 0.9
