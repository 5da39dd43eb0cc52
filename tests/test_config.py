"""Configuration: three spellings that mean the same, and errors that say what to do."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from razona.config import (
    DataConfig,
    DemoConfig,
    EvalConfig,
    EvaluateConfig,
    GenerateConfig,
    GRPOConfig,
    ImportanceConfig,
    ObjectiveConfig,
    OptimizerConfig,
    RunConfig,
    SelectConfig,
    SFTConfig,
    SFTEvalConfig,
)
from razona.config.check import validate
from razona.config.load import load_config, merge
from razona.config.options import SHORT_FLAGS
from razona.errors import ConfigError
from razona.types import Sampling

COMMANDS = (GRPOConfig, SFTConfig, GenerateConfig, EvaluateConfig, SelectConfig, DemoConfig)
# Where "another value of the type" would be out of range.
OTHER = {
    "top_p": 0.9,
    "min_p": 0.05,
    "best_metric": "eval/token_accuracy",
    "betas": (0.8, 0.95),
    "clip_low": 0.1,
    "clip_high": 0.3,
    "dual_clip": 3.0,
    "by": ("pass_rate", "0.1..0.9"),
}
# What an option needs beside it, to have anything to act on.
LEVEL = (("objective", "importance", "level"), "token")
RATE = (("objective", "difficulty", "min_pass_rate"), 0.125)
BESIDE: dict[str, tuple[tuple[str, ...], Any]] = {
    **dict.fromkeys((f"objective.importance.{name}" for name in ("outside", "low", "high")), LEVEL),
    **dict.fromkeys(
        (
            f"objective.difficulty.{name}"
            for name in ("filter_every", "filter_samples", "pass_reward", "pass_above")
        ),
        RATE,
    ),
    "objective.refresh_reference_every": (("measure_kl_every",), 5),
}


def leaves(config: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """(path, type, default) of every option."""
    hints = get_type_hints(type(config))
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from leaves(value, (*path, field.name))
        else:
            yield (*path, field.name), hints[field.name], value


def other_value(name: str, hint: Any, default: Any) -> Any:
    """A valid value of the type that is not the default."""
    if name in OTHER:
        return OTHER[name]
    kinds = [arg for arg in get_args(hint) if arg is not type(None)]
    if kinds and all(isinstance(kind, str) for kind in kinds):  # Literal
        return next(kind for kind in kinds if kind != default)
    if kinds and type(None) in get_args(hint):
        return other_value(name, kinds[0], default)
    if isinstance(default, tuple):
        return {str: ("one", "two"), int: (3, 4), float: (0.5, 2.0)}[kinds[0]]
    if isinstance(default, dict):
        return {"question": "prompt", "answer": "label"}
    return {
        bool: lambda: not default,
        int: lambda: (default or 0) + 3,
        float: lambda: default / 2 + 0.125,
    }.get(hint, lambda: "another")()


def replaced(config: Any, path: tuple[str, ...], value: Any) -> Any:
    head, *rest = path
    return dataclasses.replace(
        config, **{head: replaced(getattr(config, head), tuple(rest), value) if rest else value}
    )


def as_toml(path: tuple[str, ...], value: Any, within: tuple[str, ...] = ()) -> str:
    """Without its heading where that table is open already."""
    text = json.dumps(value)
    if isinstance(value, dict):
        text = "{" + ", ".join(f"{key} = {json.dumps(item)}" for key, item in value.items()) + "}"
    *table, name = path
    return ("" if tuple(table) == within else f"[{'.'.join(table)}]\n") + f"{name} = {text}\n"


def as_flags(path: tuple[str, ...], value: Any) -> list[str]:
    *table, name = path
    prefix = ".".join(table) + "." if table else ""
    if isinstance(value, bool):
        return [f"--{prefix}{'' if value else 'no-'}{name}".replace("_", "-")]
    items = value if isinstance(value, tuple) else [value]
    if isinstance(value, dict):
        items = [f"{old}={new}" for old, new in value.items()]
    return [f"--{prefix}{name}".replace("_", "-"), *map(str, items)]


@pytest.mark.parametrize("cls", COMMANDS, ids=lambda cls: cls.__name__)
def test_python_toml_and_flags_mean_the_same_for_every_option(cls: type, tmp_path: Path) -> None:
    count = 0
    for path, hint, default in leaves(cls()):
        value = other_value(path[-1], hint, default)
        assert value != default, path
        base, toml, flags, within = cls(), "", [], ()
        if ".".join(path) in BESIDE:
            beside = BESIDE[".".join(path)]
            base, toml, flags = replaced(base, *beside), as_toml(*beside), as_flags(*beside)
            within = beside[0][:-1]
        in_python = replaced(base, path, value)
        file = tmp_path / "run.toml"
        file.write_text(toml + as_toml(path, value, within))
        from_toml, from_flags = load_config(cls, file), load_config(cls, None, flags + as_flags(path, value))
        assert in_python == from_toml == from_flags != cls(), path
        assert type(from_toml) is type(from_flags) is cls
        assert repr(in_python) == repr(from_toml) == repr(from_flags), (
            path
        )  # 1 == 1.0, but it prints otherwise
        count += 1
    assert count >= 5


def test_flags_lie_over_toml_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        'rewards = ["format"]\n[optimizer]\nschedule = "linear"\n[sampling]\ngroup_size = 4\ntop_p = 1\n'
    )
    config = load_config(GRPOConfig, file, ["--sampling.group-size", "6"])
    assert (config.sampling.group_size, config.sampling.top_p, config.rewards) == (6, 1.0, ("format",))
    assert load_config(SFTConfig, None, ["--optimizer.schedule", "linear"]).optimizer.learning_rate == 2e-5
    file.write_text('[optimizer]\nschedule = "linear"\n')
    assert load_config(SFTConfig, file).optimizer == OptimizerConfig(learning_rate=2e-5, schedule="linear")


def test_short_spellings() -> None:
    short = (
        "--model m --data d --prompt-column q --system=S --reward format --objective dr_grpo --reward length"
    )
    config = load_config(
        GRPOConfig, None, [*short.split(), "--steps", "7", "--lr=1e-5", "--group_size", "4", "--seed", "3"]
    )
    assert (config.model.name, config.data.path, config.data.prompt_column) == ("m", "d", "q")
    assert (config.data.system, config.rewards, config.objective.name) == (
        "S",
        ("format", "length"),
        "dr_grpo",
    )
    assert (config.run.num_steps, config.optimizer.learning_rate, config.run.seed) == (7, 1e-5, 3)
    assert load_config(DemoConfig, None, ["--seed", "2", "--output-dir", "x"]) == DemoConfig(
        seed=2, output_dir="x"
    )
    assert load_config(GenerateConfig, None, ["--prompt", "a b", "--prompt", "c"]).prompts == ("a b", "c")
    known = {"--" + ".".join(path).replace("_", "-") for path, _, _ in leaves(GRPOConfig())}
    assert set(SHORT_FLAGS.values()) <= known


def test_a_flag_given_twice_is_gathered_or_refused() -> None:
    """Where an option has many values all spellings are gathered, in order; elsewhere one would be lost."""
    for args in (
        "--rewards A --rewards B",
        "--reward A --rewards B",
        "--rewards A --steps 3 --reward=B",
        "--rewards A --reward B",
    ):
        assert load_config(GRPOConfig, None, args.split()).rewards == ("A", "B"), args
    args = "--eval.rewards A --eval.rewards B --sampling.stop-token-ids 1 --sampling.stop_token_ids 2 3"
    config = load_config(GRPOConfig, None, [*args.split(), "--data.rename", "a=b", "--data.rename=c=d"])
    assert (config.eval.rewards, config.sampling.stop_token_ids) == (("A", "B"), (1, 2, 3))
    assert config.data.rename == {"a": "b", "c": "d"}
    for args, message in (
        ("--lr 1 --lr 2", "--lr is given twice, .* Give optimizer.learning-rate once"),
        ("--lr 1 --optimizer.learning_rate=2", "--lr and --optimizer.learning_rate are both given"),
        ("--steps 1 --num-steps 1", "--steps and --num-steps are both given, .* Give run.num-steps once"),
        ("--resume --run.no-resume", "--resume and --run.no-resume are both given"),
        ("--optimizer.betas 0.9 0.9 --optimizer.betas 0.8 0.9", "--optimizer.betas is given twice"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_config(GRPOConfig, None, args.split())
    with pytest.raises(SystemExit):  # tyro says what was expected
        load_config(GRPOConfig, None, ["--data.rename", "a=b", "--data.rename", "a=c"])


def test_words_that_end_like_a_toml_file_are_values_where_a_value_stands() -> None:
    assert load_config(GenerateConfig, None, ["--prompt", "a.toml", "--output=b.toml"]).prompts == ("a.toml",)


def test_held_out_loss_without_held_out_rows_is_refused() -> None:
    config = SFTConfig(eval=SFTEvalConfig(every=5))
    validate(config, eval_rows=True)
    with pytest.raises(ConfigError, match=r"eval.every = 5: but eval.data is empty, nothing"):
        validate(config, eval_rows=False)


def test_evaluation_without_held_out_rows_is_refused() -> None:
    """When it is known that there are none: Python may give them beside the configuration."""
    validate(GRPOConfig(), eval_rows=False)
    for changes in (
        {"every": 5},
        {"samples": 2},
        {"rewards": ("format",)},
        {"temperature": 0.0},
        {"best_metric": "eval/reward"},
    ):
        config = GRPOConfig(eval=EvalConfig(**changes))  # type: ignore[arg-type]
        validate(config)
        validate(config, eval_rows=True)
        validate(dataclasses.replace(config, eval=EvalConfig(data="x", **changes)), eval_rows=False)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=f"eval.{next(iter(changes))} = .* eval.data is empty, nothing"):
            validate(config, eval_rows=False)


def refused(toml: str, tmp_path: Path, cls: type = GRPOConfig) -> str:
    file = tmp_path / "run.toml"
    file.write_text(toml)
    with pytest.raises(ConfigError) as error:
        load_config(cls, file)
    return str(error.value)


def test_unknown_keys_name_the_nearest(tmp_path: Path) -> None:
    assert "unknown key 'group_siz' in table [sampling]. Did you mean 'group_size'?" in refused(
        "[sampling]\ngroup_siz = 4", tmp_path
    )
    assert "Did you mean 'group_size'?" in refused("[sampling]\ngroup-size = 4", tmp_path)
    assert "unknown key 'num_steps' outside any table. It belongs in [run]." in refused(
        "num_steps = 4", tmp_path
    )
    assert "It belongs in [optimizer]" in refused("[run]\nlearning_rate = 4", tmp_path)
    assert "Known are: model, lora, data, rewards" in refused("[zzz]\nx = 1", tmp_path)


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ('[run]\nnum_steps = "ten"', "run.num_steps = 'ten' is text, expected a whole number"),
        ("[run]\nnum_steps = 2.5", "run.num_steps = 2.5 is a number, expected a whole number"),
        ("[run]\nnum_steps = true", "run.num_steps = True is a truth value, expected a whole number"),
        ("[data]\nshuffle = 1", "data.shuffle = 1 is a whole number, expected true or false"),
        ("[data]\nsystem = 1", "data.system = 1 is a whole number, expected text"),
        ('rewards = "format"', "rewards = 'format' is text, expected a list of texts"),
        ("rewards = [1]", "rewards[0] = 1 is a whole number, expected text"),
        ("[optimizer]\nbetas = [0.9]", "optimizer.betas = [0.9] is a list, expected a list of 2 numbers"),
        ("[optimizer]\nlearning_rate = nan", "optimizer.learning_rate = nan is not a finite number"),
        ("[data.rename]\na = 1", "data.rename.a = 1 is a whole number, expected text"),
        ('[objective]\nname = "dr-grpo"', "'rloo', 'gspo', 'cispo'. Did you mean 'dr_grpo'?"),
        ("model = 3", "model is a table of options, not 3. Write [model] and its options below it"),
        ("[run\n", "is not valid TOML"),
    ],
)
def test_wrong_values_name_key_value_and_type(toml: str, message: str, tmp_path: Path) -> None:
    text = refused(toml, tmp_path)
    assert message in text
    assert str(tmp_path / "run.toml") in text


def test_a_missing_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none.toml cannot be read: No such file"):
        load_config(GRPOConfig, tmp_path / "none.toml")


def objective(**options: Any) -> GRPOConfig:
    return GRPOConfig(objective=ObjectiveConfig(**options))


def importance(**options: Any) -> GRPOConfig:
    return objective(importance=ImportanceConfig(**options))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GRPOConfig(sampling=Sampling(group_size=1)), "always has advantage 0"),
        (GRPOConfig(sampling=Sampling(temperature=0.0)), "deviation is 0, every advantage is 0"),
        (GRPOConfig(sampling=Sampling(temperature=-1.0)), "at least 0"),
        (GRPOConfig(sampling=Sampling(top_p=0.0)), "above 0 and at most 1"),
        (GRPOConfig(minibatches_per_rollout=9), "whole groups stay together"),
        (
            GRPOConfig(rewards=("a", "b"), objective=ObjectiveConfig(reward_weights=(1.0,))),
            "1 values for 2 rewards",
        ),
        (GRPOConfig(objective=ObjectiveConfig(reward_weights=(0.0, 0.0))), "all 0"),
        (GRPOConfig(objective=ObjectiveConfig(clip_low=1.5)), "above 0 and at most 1"),
        (GRPOConfig(objective=ObjectiveConfig(name="ppo")), "'ppo' is none of 'grpo', 'dr_grpo', 'dapo'"),  # type: ignore
        (objective(name="gspo", weights="per_token"), "one term per completion, whatever its length"),
        (objective(name="rloo", weights="fixed_length"), "RLOO has one term per completion"),
        (
            objective(name="rloo", std="sample"),
            "objective.std = 'sample' cannot work with objective.name = 'rloo'",
        ),
        (objective(name="gspo", dual_clip=3.0), "a mean over the completion"),
        (objective(name="rloo", dual_clip=3.0), "the dual clip is of a token's"),
        (objective(name="cispo", dual_clip=3.0), "bounds every token's weight already. Leave it out"),
        (objective(dual_clip=1.0), "objective.dual_clip = 1.0 cannot work: it must be above 1"),
        (objective(clip_high=0.0), "objective.clip_high = 0.0 cannot work: it must be above 0"),
        (objective(refresh_reference_every=9), "refresh_reference_every = 9: there is nothing to refresh"),
        (objective(soft_overlong=257), "soft_overlong = 257 is more than a completion has, sampling.max_com"),
        (importance(high=5.0), "importance.high = 5.0 has nothing to act on: importance.level is none"),
        (importance(outside="mask"), "importance.outside = 'mask' has nothing to act on"),
        (importance(level="token", low=1.5), "at most 1, the ratio of equals"),
        (importance(level="token", high=0.5), "at least 1, the ratio of equals"),
        (importance(level="tokens"), "Did you mean 'token'?"),
        (GRPOConfig(rewards=["format"]), r"is a list, expected a tuple: write ('format',)"),  # type: ignore
        (GRPOConfig(run=None), "run = None is a NoneType, expected a RunConfig"),  # type: ignore
        (GRPOConfig(run=RunConfig(num_steps=0)), "run.num_steps = 0 cannot work: it must be at least 1"),
        (GRPOConfig(run=RunConfig(resume=True, overwrite=True)), "exclude each other"),
        (
            GRPOConfig(eval=EvalConfig(samples=4, temperature=0.0)),
            "greedy completions of a prompt are all the same",
        ),
        (GRPOConfig(eval=EvalConfig(best_metric="accuracy")), "the name of an eval/... series"),
        (SFTConfig(optimizer=OptimizerConfig(warmup_steps=101)), "would never be reached"),
        (SFTConfig(data=DataConfig(max_prompt_length=0)), "at least 1"),
        (GenerateConfig(prompts=("hi",), data=DataConfig(path="x")), "are both given, and one would be left"),
    ],
)
def test_values_that_cannot_work_are_refused_in_python_too(config: Any, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        validate(config)
    assert message in str(error.value)


def test_defaults_are_valid_and_survive_json() -> None:
    for cls in COMMANDS:
        config = cls()
        validate(config)
        assert merge(cls(), json.loads(json.dumps(dataclasses.asdict(config)))) == config
    greedy = EvaluateConfig(sampling=Sampling(group_size=1, temperature=0.0))
    validate(greedy)  # greedy is for evaluation
