"""Names that are not options here, and what they are called: other libraries' and razona's own old ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from razona.config.options import options, shortest_flag

RENAMED = {
    "objective.refill.reward": "objective.dynamic_sampling.pass_reward",
    "objective.refill.above": "objective.dynamic_sampling.pass_above",
    "objective.refill": "objective.dynamic_sampling",
    "objective.dynamic_sampling.reward": "objective.dynamic_sampling.pass_reward",
    "objective.dynamic_sampling.above": "objective.dynamic_sampling.pass_above",
    "reward": "pass_reward",
}
"""Old name -> new one, of an option or of a table."""

OTHERS: dict[str, tuple[str, str]] = {
    # model and adapter
    "model_name": ("model.name", ""),
    "model_name_or_path": ("model.name", ""),
    "bf16": ("model.precision", "a name such as bf16 or fp32, not a switch"),
    "fp16": ("model.precision", "bf16 or fp32: there is no fp16"),
    "dtype": ("model.precision", ""),
    "torch_dtype": ("model.precision", ""),
    "use_peft": ("lora.r", "a rank above 0 makes an adapter"),
    "lora_rank": ("lora.r", ""),
    "lora_r": ("lora.r", ""),
    "lora_alpha": ("lora.alpha", ""),
    "lora_target_modules": ("lora.target_modules", ""),
    "use_rslora": ("lora.rslora", ""),
    "lora_dropout": ("", "Every dropout is 0 in every pass: leave it out."),
    # data and rewards
    "dataset": ("data.path", ""),
    "dataset_name": ("data.path", "a file or a hub id"),
    "dataset_text_field": ("data.text_column", ""),
    "max_prompt_length": ("data.max_prompt_length", "a longer prompt is left out and counted, not cut"),
    "max_seq_length": ("max_length", "a longer row is left out and counted, not cut"),
    "max_seq_len": ("max_length", "a longer row is left out and counted, not cut"),
    "reward_funcs": ("rewards", ""),
    # sampling
    "num_generations": ("sampling.group_size", ""),
    "rollout_n": ("sampling.group_size", ""),
    "max_new_tokens": ("sampling.max_completion_length", ""),
    "max_response_length": ("sampling.max_completion_length", ""),
    "use_vllm": ("", "The model that is trained samples for itself, without a server: leave it out."),
    # objective
    "beta": ("objective.kl_coef", "the weight of the KL term in the loss; 0 loads no reference"),
    "kl_loss_coef": ("objective.kl_coef", ""),
    "epsilon": ("objective.clip_low", "the lower side only; the upper is objective.clip_high"),
    "clip_ratio": ("objective.clip_low", "the lower side only; the upper is objective.clip_high"),
    "clip_ratio_low": ("objective.clip_low", ""),
    "epsilon_high": ("objective.clip_high", "with cispo the largest weight is 1 + clip_high"),
    "clip_ratio_high": ("objective.clip_high", ""),
    "delta": ("objective.dual_clip", ""),
    "loss_type": (
        "objective.name",
        "dapo is --objective dapo, which samples dynamically too. TRL's says only how tokens are averaged, "
        "which is objective.weights: grpo per_sequence, dapo and bnpo per_token, dr_grpo fixed_length",
    ),
    "loss_agg_mode": ("objective.weights", "seq-mean-token-mean is per_sequence, token-mean per_token"),
    "scale_rewards": ("objective.std", "group is sample, batch is batch, none is none"),
    "importance_sampling_level": ("objective.name", "sequence is gspo"),
    "num_iterations": ("epochs_per_rollout", ""),
    "ppo_epochs": ("epochs_per_rollout", ""),
    "steps_per_generation": ("minibatches_per_rollout", "optimizer updates, not micro-batches"),
    "mask_truncated_completions": ("objective.overlong_filter", ""),
    "ref_model_sync_steps": ("objective.refresh_reference_every", ""),
    # optimizer
    "lr_scheduler_type": ("optimizer.schedule", ""),
    "warmup_ratio": ("optimizer.warmup_steps", "in updates, not a share of them"),
    "adam_beta1": ("optimizer.betas", "both numbers at once"),
    "adam_beta2": ("optimizer.betas", "both numbers at once"),
    "adam_epsilon": ("optimizer.eps", ""),
    # batches and the run
    "per_device_train_batch_size": (
        "prompts_per_step rows_per_step",
        "{} per step, not per device and not completions",
    ),
    "train_batch_size": ("prompts_per_step rows_per_step", "{} per step"),
    "gradient_accumulation_steps": (
        "tokens_per_microbatch",
        "tokens per pass: it changes memory, never the gradient; rows per update are {}",
    ),
    "num_train_epochs": ("run.num_steps", "in steps: epochs * rows / {}"),
    "max_steps": ("run.num_steps", "a step may be several updates: minibatches_per_rollout"),
    "save_steps": ("run.save_every", ""),
    "save_total_limit": ("run.keep_checkpoints", ""),
    "eval_steps": ("eval.every", ""),
    "logging_steps": ("", "Every step is in metrics.jsonl of run.output_dir: leave it out."),
    "report_to": (
        "",
        "Every step is in metrics.jsonl of run.output_dir, which any tracker reads: leave it out.",
    ),
    "resume_from_checkpoint": ("run.resume", ""),
    "overwrite_output_dir": ("run.overwrite", "the old run is moved aside, not deleted"),
}
"""Name in TRL, verl, Unsloth or transformers -> option (the first that the configuration has), and how its
meaning differs."""


def other_name(config: Any, name: str) -> str:
    """What the dotted ``name``, no option of ``config``, is called here, in a sentence; "" where unknown."""
    known = {option.name for option in options(config)}
    if new := renamed(name, config):
        return f"It is {new} now."
    option, note = OTHERS.get(name.rpartition(".")[2], ("", ""))
    found = next((one for one in option.split() if one in known), "")
    if found:
        batch = next((one for one in ("prompts_per_step", "rows_per_step") if one in known), "")
        return f"It is {_spelled(config, found)} here{note and ': ' + note.format(batch)}."
    return note if not option else ""


def home_of(config: Any, name: str) -> str:
    """As `other_name`, for the last word of options that ``config`` has."""
    homes = [option.name for option in options(config) if option.name.endswith(f".{name}")]
    return f"It is {' or '.join(_spelled(config, home) for home in homes)} here." if homes else ""


def renamed(name: str, config: Any) -> str:
    """The present name of an option or table of ``config`` that an older razona called ``name``, or ""."""
    known = {option.name for option in options(config)}
    for old, new in RENAMED.items():
        if name == old or name.startswith(f"{old}."):
            now = new + name[len(old) :]
            if any(one == now or one.startswith(f"{now}.") for one in known):
                return now
    return ""


def other_version(stored: Mapping[str, Any], config: Any) -> str:
    """What in a ``stored`` configuration, as JSON has it, another version of razona must have written; "" if
    nothing. An option that is missing there counts when it would have to be alike on a resume.
    """
    return ", ".join(_of_other_versions(stored, config, config, ""))


def _of_other_versions(stored: Mapping[str, Any], config: Any, whole: Any, table: str) -> Iterator[str]:
    fields = {field.name: field for field in dataclasses.fields(config)}
    for key in stored.keys() - fields.keys():
        new = renamed(f"{table}{key}", whole)
        yield f"it has {table}{key}" + (f", which is {new} now" if new else ", which is no option here")
    for key, field in fields.items():
        value = getattr(config, key)
        if dataclasses.is_dataclass(value) and isinstance(stored.get(key), Mapping):
            yield from _of_other_versions(stored[key], value, whole, f"{table}{key}.")
        elif key not in stored and value is not None and not field.metadata.get("resume"):
            yield f"it lacks {table}{key}"


def _spelled(config: Any, name: str) -> str:
    return f"{name} ({shortest_flag(config, name)})"
