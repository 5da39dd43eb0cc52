"""Every field of TRL's configurations: in the table, in the docs, honoured or refused."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import test_trl_hub
import test_trl_sft
import test_trl_trainer
import torch
from transformers import IntervalStrategy, SchedulerType
from trl_helpers import SMALL, tiny_folder, trainer

from razona.errors import ConfigError
from razona.trl import GRPOConfig, SFTConfig, fields
from razona.trl.fields import COMMON, GRPO, SFT, Field
from razona.trl.translate import grpo_config, sft_config

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "from-trl.md"
TRL = json.loads((HERE / f"trl_{fields.TRL_VERSION.replace('.', '_')}.json").read_text(encoding="utf-8"))
OWN_GRPO = {name: field for name, field in GRPO.items() if COMMON.get(name) is not field}
OWN_SFT = {name: field for name, field in SFT.items() if COMMON.get(name) is not field}
TABLES = {"both": COMMON, "GRPOConfig": OWN_GRPO, "SFTConfig": OWN_SFT}
ACCEPTED = ("same", "other name")


def rows(table: dict[str, Field]) -> str:
    """The table as docs/from-trl.md has it."""
    lines = ["| field | TRL's default | | here |", "|---|---|---|---|"]
    lines += [
        f"| `{name}` | `{field.default!r}` | {field.how} | {field.text} |" for name, field in table.items()
    ]
    return "\n".join(lines)


def written(page: str) -> str:
    """The page with its tables written anew: `python tests/test_trl_fields.py`."""
    for name, table in TABLES.items():
        before, start, rest = page.partition(f"<!-- fields of {name} -->\n")
        _, end, after = rest.partition("<!-- end -->")
        assert start and end, f"docs/from-trl.md has no table for {name}"
        page = f"{before}{start}{rows(table)}\n{end}{after}"
    return page


@pytest.mark.parametrize(("name", "table"), [("GRPOConfig", GRPO), ("SFTConfig", SFT)])
def test_the_table_has_every_field_of_trl_with_its_default(name: str, table: dict[str, Field]) -> None:
    theirs = TRL[name]
    assert set(table) == set(theirs)
    assert {field: table[field].default for field in table} == theirs


def test_the_docs_have_the_table() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == written(page), "run: python tests/test_trl_fields.py"


OTHER_VALUES = {"steps": "epoch", "no": "steps", "none": "wandb", "auto": 64, "random": "sequential", "": "x"}


def another(default: Any) -> Any:
    """A value that is not ``default``."""
    if isinstance(default, bool):
        return not default
    if isinstance(default, (int, float)):
        return default + 1
    return OTHER_VALUES.get(default, "other") if isinstance(default, str) else "something"


@pytest.mark.parametrize(("cls", "table"), [(GRPOConfig, GRPO), (SFTConfig, SFT)], ids=["grpo", "sft"])
def test_what_is_not_supported_is_refused_by_name_with_what_to_do(cls: Any, table: dict[str, Field]) -> None:
    for name, field in table.items():
        if field.how == "not supported":
            with pytest.raises(ConfigError) as refused:
                cls(**{name: another(field.default)})
            assert str(refused.value).startswith(f"{cls.__name__}({name}=")
            assert str(refused.value).endswith(f"is not supported: {field.text}.")
            made = cls(**{name: field.default})
            with pytest.raises(ConfigError, match="is not supported"):
                setattr(made, name, another(field.default))


@pytest.mark.parametrize(("cls", "table"), [(GRPOConfig, GRPO), (SFTConfig, SFT)], ids=["grpo", "sft"])
def test_what_is_not_needed_changes_nothing(cls: Any, table: dict[str, Field]) -> None:
    def translated(args: Any) -> Any:
        return (grpo_config if cls is GRPOConfig else sft_config)(args, num_rows=8)

    plain = translated(cls())
    for name, field in table.items():
        if field.how == "not needed":
            assert translated(cls(**{name: another(field.default)})) == plain, name


def test_unknown_fields_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"no field 'num_generation' .* Did you mean 'num_generations'\?"):
        GRPOConfig(num_generation=4)
    with pytest.raises(ConfigError, match="TRL has dropped it: prompts are never cut"):
        GRPOConfig(max_prompt_length=512)
    args = GRPOConfig()
    with pytest.raises(ConfigError, match="no field 'max_step'"):
        args.max_step = 3
    with pytest.raises(AttributeError, match="GRPOConfig has no field 'max_step'"):
        _ = args.max_step


REFRESH = "objective.refresh_reference_every"
SYNC = {"ref_model_mixup_alpha": 1.0}

# (field, changes beside it, its value, where it goes in razona's configuration, the value there)
GOES_TO: list[tuple[str, dict[str, Any], Any, str, Any]] = [
    ("per_device_train_batch_size", {}, 16, "prompts_per_step", 2),
    ("num_train_epochs", {}, 2, "run.num_steps", 200),
    ("max_steps", {}, 7, "run.num_steps", 7),
    ("gradient_accumulation_steps", {}, 3, "prompts_per_step", 3),
    ("learning_rate", {}, 1e-4, "optimizer.learning_rate", 1e-4),
    ("lr_scheduler_type", {}, "cosine", "optimizer.schedule", "cosine"),
    ("lr_scheduler_type", {}, SchedulerType.CONSTANT, "optimizer.schedule", "constant"),
    ("lr_scheduler_type", {}, "constant_with_warmup", "optimizer.schedule", "constant"),
    ("warmup_steps", {}, 5, "optimizer.warmup_steps", 5),
    ("warmup_steps", {"max_steps": 50}, 0.1, "optimizer.warmup_steps", 5),
    ("optim", {}, "adamw_torch", "optimizer.schedule", "linear"),
    ("weight_decay", {}, 0.1, "optimizer.weight_decay", 0.1),
    ("adam_beta1", {}, 0.8, "optimizer.betas", (0.8, 0.999)),
    ("adam_beta2", {}, 0.95, "optimizer.betas", (0.9, 0.95)),
    ("adam_epsilon", {}, 1e-6, "optimizer.eps", 1e-6),
    ("max_grad_norm", {}, 0.1, "optimizer.max_grad_norm", 0.1),
    ("bf16", {}, False, "model.precision", "fp32"),
    ("bf16", {}, True, "model.precision", "bf16"),
    ("gradient_checkpointing", {}, False, "model.gradient_checkpointing", False),
    ("use_cpu", {}, True, "model.device", "cpu"),
    ("seed", {}, 7, "run.seed", 7),
    ("trust_remote_code", {}, True, "model.trust_remote_code", True),
    ("num_generations", {}, 4, "sampling.group_size", 4),
    ("max_completion_length", {}, 64, "sampling.max_completion_length", 64),
    ("shuffle_dataset", {}, False, "data.shuffle", False),
    ("generation_batch_size", {}, 32, "prompts_per_step", 4),
    ("generation_batch_size", {}, 32, "minibatches_per_rollout", 4),
    ("steps_per_generation", {}, 2, "minibatches_per_rollout", 2),
    ("steps_per_generation", {"gradient_accumulation_steps": 2}, 1, "minibatches_per_rollout", 1),
    ("temperature", {}, 0.7, "sampling.temperature", 0.7),
    ("top_p", {}, 0.9, "sampling.top_p", 0.9),
    ("top_k", {}, 5, "sampling.top_k", 5),
    ("min_p", {}, 0.1, "sampling.min_p", 0.1),
    ("beta", {}, 0.04, "objective.kl_coef", 0.04),
    ("use_bias_correction_kl", {}, False, "objective.kl_estimator", "k3"),
    ("num_iterations", {}, 2, "epochs_per_rollout", 2),
    ("epsilon", {}, 0.1, "objective.clip_low", 0.1),
    ("epsilon", {}, 0.1, "objective.clip_high", 0.1),
    ("epsilon_high", {}, 0.28, "objective.clip_high", 0.28),
    ("epsilon_high", {"loss_type": "cispo"}, 5.0, "objective.clip_high", 4.0),
    ("delta", {}, 3.0, "objective.dual_clip", 3.0),
    ("importance_sampling_level", {"loss_type": "grpo"}, "sequence", "objective.name", "gspo"),
    ("reward_weights", {}, [0.5], "objective.reward_weights", (0.5,)),
    ("scale_rewards", {}, False, "objective.std", "none"),
    ("scale_rewards", {}, "batch", "objective.std", "batch"),
    ("scale_rewards", {}, True, "objective.std", "sample"),
    ("loss_type", {}, "grpo", "objective.weights", "per_sequence"),
    ("loss_type", {}, "dr_grpo", "objective.weights", "fixed_length"),
    ("loss_type", {}, "bnpo", "objective.weights", "per_token"),
    ("mask_truncated_completions", {}, True, "objective.overlong_filter", True),
    ("sync_ref_model", {"beta": 0.1, "ref_model_mixup_alpha": 1.0}, True, REFRESH, 512),
    ("ref_model_mixup_alpha", {"beta": 0.1, "sync_ref_model": True}, 1.0, REFRESH, 512),
    ("ref_model_sync_steps", {"beta": 0.1, **SYNC, "sync_ref_model": True}, 3, REFRESH, 3),
    ("save_strategy", {"save_steps": 7}, "no", "run.save_every", 0),
    ("save_strategy", {"save_steps": 7}, IntervalStrategy.EPOCH, "run.save_every", 100),
    ("save_steps", {}, 20, "run.save_every", 20),
    ("save_steps", {"max_steps": 200}, 0.25, "run.save_every", 50),
    ("save_total_limit", {}, 3, "run.keep_checkpoints", 3),
    ("log_completions", {}, True, "run.print_every", 10),
    ("output_dir", {}, "somewhere", "run.output_dir", "somewhere/run"),
    ("eval_strategy", {"eval_steps": 7}, "steps", "eval.every", 7),
    ("eval_strategy", {}, "epoch", "eval.every", 100),
    ("eval_steps", {"eval_strategy": "steps"}, 5, "eval.every", 5),
    ("num_generations_eval", {"eval_strategy": "steps"}, 3, "eval.samples", 3),
    ("metric_for_best_model", {"eval_strategy": "steps"}, "eval_reward", "eval.best_metric", "eval/reward"),
    ("metric_for_best_model", {"eval_strategy": "steps"}, "rewards/f/mean", "eval.best_metric", "eval/f"),
]  # fmt: skip

SFT_GOES_TO: list[tuple[str, dict[str, Any], Any, str, Any]] = [
    ("per_device_train_batch_size", {}, 16, "rows_per_step", 16),
    ("gradient_accumulation_steps", {}, 3, "rows_per_step", 24),
    ("num_train_epochs", {}, 2, "run.num_steps", 26),
    ("max_length", {}, 64, "max_length", 64),
    ("train_sampling_strategy", {}, "sequential", "data.shuffle", False),
    ("dataset_text_field", {}, "body", "data.text_column", "body"),
    ("eval_strategy", {"eval_steps": 7}, "steps", "eval.every", 7),
    ("eval_strategy", {}, "epoch", "eval.every", 13),
    ("eval_steps", {"eval_strategy": "steps", "max_steps": 50}, 0.1, "eval.every", 5),
    ("metric_for_best_model", {"eval_strategy": "steps"}, "loss", "eval.best_metric", "eval/loss"),
    (
        "metric_for_best_model",
        {"eval_strategy": "steps"},
        "eval_mean_token_accuracy",
        "eval.best_metric",
        "eval/token_accuracy",
    ),
]

RUNS = {
    "logging_strategy": "test_what_is_logged_and_when",
    "logging_steps": "test_what_is_logged_and_when",
    "logging_first_step": "test_what_is_logged_and_when",
    "load_best_model_at_end": "test_the_best_model_is_loaded",
    "greater_is_better": "test_the_best_model_is_loaded",
    "resume_from_checkpoint": "test_resume_equals_a_run_never_stopped",
    "push_to_hub": "test_the_fields_of_an_upload",
    "hub_token": "test_the_fields_of_an_upload",
    "hub_private_repo": "test_the_fields_of_an_upload",
    "hub_model_id": "test_the_fields_of_an_upload",
    "hub_revision": "test_the_fields_of_an_upload",
}
"""Fields whose behaviour is that of the trainer: the test that has it."""


def lands(config: Any, path: str) -> Any:
    for part in path.split("."):
        config = getattr(config, part)
    return config


@pytest.mark.parametrize("case", GOES_TO, ids=lambda case: f"{case[0]}={case[2]}")
def test_a_field_goes_where_the_table_says(case: tuple[str, dict[str, Any], Any, str, Any]) -> None:
    name, beside, value, path, expected = case
    args = GRPOConfig(**beside, **{name: value})
    config = grpo_config(args, num_rows=100, evaluates=args.eval_strategy != "no")
    assert lands(config, path) == expected
    if name != "optim":
        leaf = path.rpartition(".")[2] if path != "prompts_per_step" else path
        assert leaf in GRPO[name].text or name == "output_dir", "the table names another option"


@pytest.mark.parametrize("case", SFT_GOES_TO, ids=lambda case: str(case[0]))
def test_a_field_of_sft_goes_where_the_table_says(case: tuple[str, dict[str, Any], Any, str, Any]) -> None:
    name, beside, value, path, expected = case
    args = SFTConfig(**beside, **{name: value})
    assert lands(sft_config(args, num_rows=100, evaluates=args.eval_strategy != "no"), path) == expected


def test_every_accepted_field_has_a_test() -> None:
    tested = {case[0] for case in GOES_TO} | set(RUNS)
    assert {name for name, field in GRPO.items() if field.how in ACCEPTED} - tested == set()
    own = {name for name, field in OWN_SFT.items() if field.how in ACCEPTED}
    assert own - tested - {case[0] for case in SFT_GOES_TO} == set()
    for field, test in RUNS.items():
        home = test_trl_hub if "upload" in test else test_trl_trainer
        assert field in inspect.getsource(getattr(home, test)), f"{test} does not use {field}"
    for field in ("load_best_model_at_end", "greater_is_better"):
        assert field in inspect.getsource(test_trl_sft.test_the_best_model_is_loaded)


# (changes to SMALL that the field needs beside it, the field's value): what is trained must differ
TRAINS: dict[str, tuple[dict[str, Any], Any]] = {
    "per_device_train_batch_size": ({}, 16),
    "gradient_accumulation_steps": ({}, 2),
    "max_steps": ({}, 1),
    "learning_rate": ({}, 2e-3),
    "lr_scheduler_type": ({}, "constant"),
    "warmup_steps": ({}, 2),
    "weight_decay": ({}, 0.5),
    "adam_beta1": ({}, 0.5),
    "adam_beta2": ({}, 0.5),
    "adam_epsilon": ({}, 1e-2),
    "max_grad_norm": ({"adam_epsilon": 1e-2}, 1e-2),
    "bf16": ({}, False),
    "seed": ({}, 7),
    "num_generations": ({}, 8),
    "max_completion_length": ({}, 4),
    "shuffle_dataset": ({}, False),
    "generation_batch_size": ({}, 16),
    "steps_per_generation": ({}, 2),
    "temperature": ({}, 0.5),
    "top_p": ({}, 0.5),
    "top_k": ({}, 3),
    "min_p": ({}, 0.3),
    "beta": ({}, 1.0),
    "use_bias_correction_kl": ({"beta": 1.0}, False),
    "num_iterations": ({}, 2),
    "epsilon": ({"num_iterations": 2, "learning_rate": 1e-3}, 0.01),
    "epsilon_high": ({"num_iterations": 2, "learning_rate": 1e-3}, 0.01),
    "delta": ({"steps_per_generation": 2, "learning_rate": 1e-2}, 1.01),
    "importance_sampling_level": ({"num_iterations": 2, "loss_type": "grpo", "epsilon": 0.01}, "sequence"),
    "reward_weights": ({}, [-1.0]),
    "scale_rewards": ({}, "none"),
    "loss_type": ({}, "grpo"),
    "mask_truncated_completions": ({}, True),
    "sync_ref_model": ({"beta": 1.0, "max_steps": 3, **SYNC, "ref_model_sync_steps": 1}, True),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("models") / "tiny")


def trained(folder: Path, out: Path, fields: dict[str, Any]) -> torch.Tensor:
    made = trainer(folder, out, fields=fields)
    made.train()
    return torch.cat([p.detach().flatten() for p in made.model.parameters()])


@pytest.mark.parametrize("name", TRAINS)
def test_a_field_changes_what_is_trained(name: str, folder: Path, tmp_path: Path) -> None:
    beside, value = TRAINS[name]
    assert SMALL.get(name, GRPO[name].default) != value
    with_it = trained(folder, tmp_path / "with", {**beside, name: value})
    if name in ("sync_ref_model",):
        beside = {key: v for key, v in beside.items() if not key.startswith("ref_model")}
    assert not torch.equal(with_it, trained(folder, tmp_path / "without", beside))


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
