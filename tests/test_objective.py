"""An objective is what its parts are: words, clip, reference and skipped rows follow what is there."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROUNDING, bf16_is_exact
from tiny_runs import distance, grpo_config, lines, model_folder, run_grpo, varied
from torch import Tensor

from razona.batch import Batch
from razona.errors import ConfigError
from razona.losses import policy
from razona.losses.kl import kl_k3_weighted
from razona.losses.policy import ppo_clip
from razona.losses.weights import per_token
from razona.objective import (
    OBJECTIVES,
    Objective,
    cispo,
    dr_grpo,
    group_advantages,
    grpo,
    gspo,
    is_zero_at_zero_advantage,
    rloo,
    with_importance,
    without_kl,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("models") / "llama")


def surprise(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """The clipped surrogate, and a term that does not ask for the advantage."""
    clipped = ppo_clip(logprobs, old, advantages, mask, clip_low=0.2, clip_high=0.2)
    return clipped + torch.where(mask, 0.01 * logprobs, 0.0)


def uneven(
    rewards: Tensor, *, reward_weights: tuple[float, ...], loss_mask: Tensor, kl: Tensor | None = None
) -> Tensor:
    """[B, T]: a token's advantage is its place; masked ones would be seen in a mean."""
    return torch.where(loss_mask, torch.arange(loss_mask.shape[1]).float(), 1e6)


def halves(loss_mask: Tensor) -> Tensor:
    return loss_mask / 2


def test_words_are_those_of_the_parts() -> None:
    usual = grpo()
    assert usual.clip == (0.2, 0.2) and usual.description["kl"] == "k3"
    assert usual.description["advantage"].startswith("(reward - group mean) / population")
    assert (
        dr_grpo(max_tokens=7).description["aggregation"].startswith("sum over all tokens / (completions * 7)")
    )
    ours = usual._replace(
        advantage_fn=partial(group_advantages, std="none"),
        loss_fn=partial(ppo_clip, clip_low=0.1, clip_high=0.3),
        weight_fn=per_token,
        kl_fn=kl_k3_weighted,
    )
    assert ours.clip == (0.1, 0.3) and ours.description["kl"] == "k3_weighted"
    assert ours.description["aggregation"] == grpo(weights="per_token").description["aggregation"]
    assert ours.description["advantage"] == grpo(std="none").description["advantage"]
    own = usual._replace(
        advantage_fn=uneven, loss_fn=surprise, weight_fn=partial(halves), kl_fn=lambda *_: torch.zeros(())
    )
    assert own.clip is None and own.description == {
        "advantage": "custom: uneven",
        "loss": "custom: surprise",
        "aggregation": "custom: halves",
        "kl": "custom: <lambda>",
    }


def flat_weights(old: Tensor, sampler: Tensor, mask: Tensor) -> Tensor:
    return 0.5 * mask


def test_the_words_of_the_family_follow_its_parts() -> None:
    """Whatever is replaced, the rest stays as it was, and nothing is said of what is gone."""
    own = gspo()._replace(advantage_fn=uneven)
    assert own.description == {**gspo().description, "advantage": "custom: uneven"}
    assert own.clip == (3e-4, 4e-4) and own.ratio_fn is policy.mean_ratio
    assert own.description["aggregation"] == "one term per completion, mean over completions"
    for whole in (gspo(), rloo()):
        by_tokens = whole._replace(weight_fn=per_token)
        assert by_tokens.description == {
            **whole.description,
            "aggregation": grpo(weights="per_token").description["aggregation"],
        }
        tokens = whole._replace(loss_fn=partial(ppo_clip, clip_low=0.1, clip_high=0.3, dual_clip=3.0))
        assert tokens.ratio_fn is policy.ratio and tokens.clip == (0.1, 0.3)
        assert tokens.description["aggregation"] == grpo().description["aggregation"]
        assert (
            tokens.description["ratio"] == "ratio of a token" and "3 |A|" in tokens.description["dual_clip"]
        )
        lost = whole._replace(loss_fn=surprise)
        assert lost.clip is None and lost.ratio_fn is policy.ratio and "ratio" not in lost.description
    assert grpo()._replace(loss_fn=gspo().loss_fn).description == gspo().description
    assert "dual_clip" not in grpo(dual_clip=3.0)._replace(loss_fn=cispo().loss_fn).description
    assert (
        cispo()._replace(advantage_fn=rloo().advantage_fn).description["advantage"]
        == rloo().description["advantage"]
    )
    assert cispo().clip == (None, 4.0) and grpo()._replace(loss_fn=policy.reinforce).clip is None


def test_the_words_of_a_correction_follow_it() -> None:
    plain = dr_grpo(max_tokens=7)
    corrected = with_importance(plain, level="token", outside="mask", low=0.5, high=5.0)
    assert "(IcePop)" in corrected.description["importance"] and corrected.importance_bounds == (0.5, 5.0)
    own = corrected._replace(importance_fn=flat_weights)
    assert own.description["importance"] == "custom: flat_weights" and own.importance_bounds is None
    assert own._replace(importance_fn=plain.importance_fn).description == plain.description


def test_the_words_have_the_names_that_peers_give() -> None:
    for objective, names in (
        (grpo(), ("TRL and verl divide by the sample deviation", "TRL: grpo, verl: seq-mean-token-mean")),
        (grpo(weights="sequence_sum"), ("verl: seq-mean-token-sum",)),
        (grpo(weights="per_token"), ("TRL: dapo, verl: token-mean",)),
        (dr_grpo(max_tokens=7), ("TRL: dr_grpo", "TRL: scale_rewards none")),
    ):
        assert all(name in " ".join(objective.description.values()) for name in names)


def test_the_header_says_what_is_there(model: Path, tmp_path: Path) -> None:
    own = grpo()._replace(advantage_fn=uneven, loss_fn=surprise, weight_fn=halves)
    config = grpo_config(model, tmp_path / "run", run__num_steps=1, minibatches_per_rollout=2)
    _, printed = run_grpo(config, objective=own)
    for words in ("advantage: custom: uneven", "averages: custom: halves", "the loss is custom: surprise"):
        assert words in printed
    assert "population" not in printed and "in [0.8, 1.2]" not in printed
    step = lines(tmp_path / "run/metrics.jsonl")[0]
    assert "clip/low" not in step and "clip/high" not in step and "ratio" in step


def test_the_header_of_the_family_says_what_is_there(model: Path, tmp_path: Path) -> None:
    config = grpo_config(model, tmp_path / "run", run__num_steps=1, minibatches_per_rollout=2)
    own = gspo()._replace(advantage_fn=uneven, importance_fn=flat_weights)
    _, printed = run_grpo(config, objective=own)
    for words in (
        "advantage: custom: uneven",
        "averages: one term per completion",
        "length-normalised ratio of a completion in [0.9997, 1.0004]",
        "importance: custom: flat_weights",
    ):
        assert words in printed
    step = lines(tmp_path / "run/metrics.jsonl")[0]
    assert step["importance"] == 0.5 and "importance/truncated" not in step
    _, printed = run_grpo(config, objective=grpo()._replace(loss_fn=policy.reinforce), dry_run=True)
    assert "clip: none: the loss is -A log pi" in printed


def test_the_reference_follows_the_objective(model: Path, tmp_path: Path) -> None:
    _, printed = run_grpo(grpo_config(model, tmp_path / "kl"), objective=grpo(kl_coef=0.1))
    assert "0.1 x k3 to the starting policy" in printed and "the reference's weights lie on disk" in printed
    assert lines(tmp_path / "kl/metrics.jsonl")[1]["kl"] > 0
    named = grpo_config(model, tmp_path / "named", objective__kl_coef=0.1)
    run_grpo(named)
    assert distance(tmp_path / "kl", tmp_path / "named") == 0

    _, printed = run_grpo(grpo_config(model, tmp_path / "none"), objective=grpo())
    assert "KL not measured" in printed and "lie on disk" not in printed
    assert not (tmp_path / "none/reference.safetensors").exists()

    refreshed = grpo_config(model, tmp_path / "refreshed", objective__refresh_reference_every=1)
    _, printed = run_grpo(refreshed, objective=grpo(kl_coef=0.1))
    assert "that the policy replaces every 1 steps" in printed
    with pytest.raises(ConfigError, match="there is nothing to refresh"):
        run_grpo(refreshed, objective=grpo())


@pytest.mark.parametrize(
    "options",
    [
        {"name": "dapo"},
        {"kl_coef": 0.1, "overlong_filter": True},
        {"clip_high": 0.3},
        {"importance": {"level": "token"}},
    ],
    ids=str,
)
def test_options_that_an_objective_from_python_replaces(tmp_path: Path, options: dict[str, Any]) -> None:
    config = grpo_config(tmp_path, tmp_path / "run", objective=options)
    given = " and ".join(f"objective.{name} = " + ".*" for name in options)
    with pytest.raises(
        ConfigError, match=rf"^{given}: but objective= is given from Python, a GRPO with parts"
    ):
        run_grpo(config, objective=grpo())


def test_a_negative_kl_coef_is_a_kl_term_too(model: Path, tmp_path: Path) -> None:
    run_grpo(grpo_config(model, tmp_path / "run"), objective=grpo(kl_coef=-0.1))
    assert lines(tmp_path / "run/metrics.jsonl")[1]["kl"] > 0


def test_which_losses_are_silent_where_the_advantage_is_0() -> None:
    def steps_over(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        raise ValueError("not these rows")

    assert is_zero_at_zero_advantage(grpo().loss_fn)
    assert is_zero_at_zero_advantage(partial(ppo_clip, clip_low=0.2, clip_high=0.2, dual_clip=3.0))
    for build in OBJECTIVES.values():
        assert is_zero_at_zero_advantage(build(max_tokens=8).loss_fn)
    assert is_zero_at_zero_advantage(policy.reinforce)
    assert is_zero_at_zero_advantage(partial(policy.gspo_token, clip_low=0.2, clip_high=0.2))
    assert is_zero_at_zero_advantage(lambda logprobs, old, advantages, mask: -logprobs * advantages)
    assert is_zero_at_zero_advantage(lambda logprobs, old, advantages, mask: torch.zeros(2, 3))
    assert not is_zero_at_zero_advantage(surprise)
    assert not is_zero_at_zero_advantage(lambda logprobs, old, advantages, mask: logprobs / advantages)
    assert not is_zero_at_zero_advantage(steps_over)


def partly_flat(*, completion_ids: list[list[int]], answer: list[str], **_: Any) -> list[float]:
    """Half of the prompts have one reward for all completions."""
    return [1.0 if int(a) % 2 else sum(ids) % 7.0 for ids, a in zip(completion_ids, answer, strict=True)]


def test_a_term_without_advantage_is_trained_on_every_row(model: Path, tmp_path: Path) -> None:
    parts = {"objective": grpo()._replace(loss_fn=surprise), "reward_fns": [partly_flat]}
    run_grpo(grpo_config(model, tmp_path / "run", prompts_per_step=8), **parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Batch, "with_signal", lambda self: self)
        run_grpo(grpo_config(model, tmp_path / "all", prompts_per_step=8), **parts)
    assert distance(tmp_path / "run", tmp_path / "all") == 0
    for step in lines(tmp_path / "run/metrics.jsonl"):
        assert step["frac_zero_std"] == 0.5 and step["trained_tokens"] == step["tokens"]


def test_advantages_of_tokens_are_logged_as_their_mean(model: Path, tmp_path: Path) -> None:
    config = grpo_config(model, tmp_path / "run", run__num_steps=1)
    run_grpo(config, objective=grpo()._replace(advantage_fn=uneven))
    records = lines(tmp_path / "run/rollouts.jsonl")
    assert [r["advantage"] for r in records] == [(r["n_tokens"] - 1) / 2 for r in records]
    assert len({r["n_tokens"] for r in records}) > 2


@pytest.mark.parametrize("updates", [1, 2])
def test_advantages_see_the_kl_where_there_is_one(model: Path, tmp_path: Path, updates: int) -> None:
    seen: list[Tensor | None] = []

    def spy(rewards: Tensor, *, loss_mask: Tensor, kl: Tensor | None = None, **rest: Any) -> Tensor:
        seen.append(kl)
        assert kl is None or (kl.shape == loss_mask.shape and not kl[~loss_mask].any())
        return group_advantages(rewards, loss_mask=loss_mask, kl=kl, std="none", **rest)

    objective = grpo(kl_coef=0.1)._replace(advantage_fn=spy)
    run_grpo(grpo_config(model, tmp_path / "kl", epochs_per_rollout=updates), objective=objective)
    run_grpo(grpo_config(model, tmp_path / "none"), objective=objective._replace(kl_coef=0.0))
    first, second, *without = seen
    assert first is not None and second is not None and second.any()
    assert not first.any() if bf16_is_exact() else first.abs().mean() < ROUNDING
    assert without == [None, None]


def test_advantages_that_ask_for_no_kl_get_none(model: Path, tmp_path: Path) -> None:
    def mine(rewards: Tensor, *, reward_weights: tuple[float, ...], loss_mask: Tensor) -> Tensor:
        return group_advantages(rewards, reward_weights=reward_weights, loss_mask=loss_mask, std="none")

    config = grpo_config(model, tmp_path / "run", measure_kl_every=1)
    _, printed = run_grpo(config, objective=grpo()._replace(advantage_fn=mine))
    run_grpo(grpo_config(model, tmp_path / "ours", measure_kl_every=1), objective=grpo(std="none"))
    assert lines(tmp_path / "run/metrics.jsonl")[1]["kl"] > 0 and "advantage: custom: mine" in printed
    assert distance(tmp_path / "run", tmp_path / "ours") == 0
    for takes_it in (grpo().advantage_fn, rloo().advantage_fn, lambda rewards, **rest: rewards):
        assert without_kl(takes_it) is takes_it


@pytest.mark.parametrize("objective", [rloo(kl_coef=0.1), gspo(kl_coef=0.1), cispo(kl_coef=0.1)])
def test_the_family_has_a_kl_term_too(model: Path, tmp_path: Path, objective: Objective) -> None:
    run_grpo(grpo_config(model, tmp_path / "run", minibatches_per_rollout=2), objective=objective)
    assert lines(tmp_path / "run/metrics.jsonl")[1]["kl"] > 0


def test_resume_compares_what_python_gave(model: Path, tmp_path: Path) -> None:
    from razona.errors import CheckpointError

    out = tmp_path / "run"
    run_grpo(grpo_config(model, out), objective=grpo(), eval_rows=[{"prompt": "And 1?"}], reward_fns=[varied])
    parts: dict[str, Any] = {"objective": grpo(), "eval_rows": [{"prompt": "And 1?"}], "reward_fns": [varied]}
    again = grpo_config(model, out, run__resume=True, run__num_steps=3)

    def even(*, completions: list[str]) -> list[float]:
        return [0.0] * len(completions)

    for change, text in (
        ({"reward_fns": [even], "eval_reward_fns": [varied]}, r"rewards\.varied: it was 1\.0 and is None"),
        ({"eval_reward_fns": [even]}, r"eval_rewards\.even: it was None and is 1\.0"),
        ({"objective": grpo(clip_high=0.3)}, r"objective\.clip: it was \[0\.2, 0\.2\] and is \[0\.2, 0\.3\]"),
        ({"objective": grpo(kl_coef=0.1)}, r"objective\.kl_coef: it was 0\.0 and is 0\.1"),
        (
            {"objective": grpo()._replace(advantage_fn=uneven)},
            r"objective\.advantage: .* is 'custom: uneven'",
        ),
        ({"objective": dr_grpo(max_tokens=12)}, r"objective\.name: it was 'GRPO' and is 'Dr\. GRPO'"),
        ({"objective": grpo(overlong_filter=True)}, r"objective\.overlong_filter: it was False and is True"),
        ({"objective": grpo(dual_clip=3.0)}, r"objective\.dual_clip: it was None and is .*3 \|A\|"),
        (
            {"objective": grpo()._replace(loss_fn=gspo(clip_low=0.2, clip_high=0.2).loss_fn)},
            r"objective\.ratio: it was 'ratio of a token' and is 'length-normalised",
        ),
        (
            {"objective": with_importance(grpo(), level="token", outside="truncate", high=2.0)},
            r"objective\.importance: it was None and is .*\(TIS\)",
        ),
    ):
        with pytest.raises(CheckpointError, match=text):
            run_grpo(again, **{**parts, **change})
    result, _ = run_grpo(again, **parts)
    assert result["step"] == 3
