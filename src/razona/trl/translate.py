"""TRL's fields become razona's configuration: nothing is decided here, only renamed and counted."""

from __future__ import annotations

import math
from typing import Any, Literal

from razona.config import (
    DataConfig,
    EvalConfig,
    GRPOConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimizerConfig,
    RunConfig,
    SFTConfig,
    SFTEvalConfig,
)
from razona.trl.arguments import Arguments
from razona.trl.batch_sizes import completions_per_rollout, updates_per_rollout
from razona.types import Sampling

ALL = 10**9  # checkpoints to keep where TRL has no limit


def grpo_config(
    args: Arguments, *, num_rows: int, resume: bool = False, evaluates: bool = False
) -> GRPOConfig:
    """What `razona.train.grpo.run` takes. ``num_rows`` of the training data say how long an epoch is."""
    prompts = completions_per_rollout(args) // args.num_generations
    per = updates_per_rollout(args)
    epoch = max(1, num_rows // prompts)
    rollouts = args.max_steps // per if args.max_steps > 0 else math.ceil(args.num_train_epochs * epoch)
    return GRPOConfig(
        model=model_config(args),
        data=DataConfig(shuffle=args.shuffle_dataset),
        sampling=Sampling(
            group_size=args.num_generations,
            max_completion_length=args.max_completion_length,
            temperature=float(args.temperature),
            top_p=float(args.top_p),
            top_k=args.top_k,
            min_p=args.min_p or 0.0,
        ),
        objective=objective_config(args),
        optimizer=optimizer_config(args, total_updates=rollouts * per),
        eval=eval_config(args, per=per, epoch=epoch, total=rollouts) if evaluates else EvalConfig(),
        run=run_config(args, num_steps=rollouts, per=per, epoch=epoch, resume=resume),
        prompts_per_step=prompts,
        minibatches_per_rollout=per // args.num_iterations,
        epochs_per_rollout=args.num_iterations,
    )


def sft_config(args: Arguments, *, num_rows: int, resume: bool = False, evaluates: bool = False) -> SFTConfig:
    """What `razona.train.sft.run` takes."""
    rows = args.per_device_train_batch_size * args.gradient_accumulation_steps
    epoch = math.ceil(num_rows / rows)
    steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * epoch)
    return SFTConfig(
        model=model_config(args),
        data=DataConfig(
            shuffle=args.train_sampling_strategy == "random", text_column=args.dataset_text_field
        ),
        optimizer=optimizer_config(args, total_updates=steps),
        eval=sft_eval_config(args, epoch=epoch, total=steps) if evaluates else SFTEvalConfig(),
        run=run_config(args, num_steps=steps, per=1, epoch=epoch, resume=resume),
        rows_per_step=rows,
        max_length=args.max_length if args.max_length is not None else ALL,
    )


def model_config(args: Arguments) -> ModelConfig:
    """``bf16=True`` is bf16 compute with fp32 masters, on a CPU too."""
    return ModelConfig(
        precision="bf16" if args.bf16 else "fp32",
        device="cpu" if args.use_cpu else "auto",
        trust_remote_code=args.trust_remote_code,
        gradient_checkpointing=args.gradient_checkpointing,
    )


def objective_config(args: Arguments) -> ObjectiveConfig:
    """The loss by its parts: TRL's ``dapo`` is GRPO with another average."""
    high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    options: dict[str, Any] = {
        "name": "grpo",
        "clip_low": float(args.epsilon),
        "clip_high": float(high),
        "dual_clip": None if args.delta is None else float(args.delta),
        "weights": WEIGHTS[args.loss_type],
    }
    if args.loss_type == "cispo":
        options |= {"name": "cispo", "clip_low": None, "clip_high": float(high) - 1.0}
    if args.importance_sampling_level == "sequence":
        options |= {"name": "gspo", "weights": None}
    return ObjectiveConfig(
        std=STD[args.scale_rewards],
        kl_coef=float(args.beta),
        kl_estimator="k3_weighted" if args.use_bias_correction_kl else "k3",
        refresh_reference_every=args.ref_model_sync_steps if args.sync_ref_model else 0,
        overlong_filter=args.mask_truncated_completions,
        reward_weights=tuple(float(w) for w in args.reward_weights or ()),
        **options,
    )


WEIGHTS = {
    "grpo": "per_sequence",
    "dr_grpo": "fixed_length",
    "dapo": "per_token",
    "bnpo": "per_token",
    "cispo": "per_token",
}
STD: dict[Any, Any] = {"group": "sample", True: "sample", "batch": "batch", "none": "none", False: "none"}


def optimizer_config(args: Arguments, *, total_updates: int) -> OptimizerConfig:
    """AdamW. Warm-up steps below 1 are a share of the updates."""
    warmup = args.warmup_steps
    schedules: dict[Any, Any] = {"constant_with_warmup": "constant"}
    schedule = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
    return OptimizerConfig(
        learning_rate=args.learning_rate,
        schedule=schedules.get(schedule, schedule),
        warmup_steps=0
        if schedule == "constant"
        else math.ceil(warmup * total_updates)
        if warmup < 1
        else int(warmup),
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_epsilon,
        weight_decay=float(args.weight_decay),
        max_grad_norm=float(args.max_grad_norm),
    )


def eval_config(args: Arguments, *, per: int, epoch: int, total: int) -> EvalConfig:
    """As in TRL, held-out completions are drawn as the training ones are."""
    metric = args.metric_for_best_model
    return EvalConfig(
        every=every(args.eval_strategy, args.eval_steps or args.logging_steps, per, epoch, total),
        samples=args.num_generations_eval or args.num_generations,
        temperature=float(args.temperature),
        best_metric="" if metric is None else eval_name(metric),
    )


SFT_METRICS: dict[str, Literal["eval/loss", "eval/token_accuracy"]] = {
    "loss": "eval/loss",
    "mean_token_accuracy": "eval/token_accuracy",
}
"""Figures of a held-out evaluation in SFT that can choose the best model: TRL's name -> razona's."""


def sft_eval_config(args: Arguments, *, epoch: int, total: int) -> SFTEvalConfig:
    """Without ``metric_for_best_model`` the loss chooses what is kept in run/best."""
    metric = str(args.metric_for_best_model or "eval_loss").removeprefix("eval_")
    return SFTEvalConfig(
        every=every(args.eval_strategy, args.eval_steps or args.logging_steps, 1, epoch, total),
        best_metric=SFT_METRICS[metric],
    )


def eval_name(metric: str) -> str:
    """``eval_rewards/NAME/mean`` -> ``eval/NAME``, and ``eval_reward`` or ``reward`` -> ``eval/reward``."""
    name = metric.removeprefix("eval_")
    if name.startswith("rewards/"):
        name = name.removeprefix("rewards/").removesuffix("/mean")
    return f"eval/{name}"


def run_config(args: Arguments, *, num_steps: int, per: int, epoch: int, resume: bool) -> RunConfig:
    """An output folder that holds a run is begun anew, as in TRL; the old run is moved aside."""
    printed = args.TABLE.get("log_completions") and args.log_completions
    return RunConfig(
        output_dir=f"{args.output_dir}/run",
        num_steps=num_steps,
        seed=args.seed,
        save_every=every(args.save_strategy, args.save_steps, per, epoch, num_steps),
        keep_checkpoints=args.save_total_limit or ALL,
        print_every=every("steps", args.logging_steps, per, epoch, num_steps) if printed else 0,
        resume=resume,
        overwrite=not resume,
    )


def every(strategy: str, steps: float, per: int, epoch: int, total: int) -> int:
    """Rollouts between two events that TRL counts in updates, or, below 1, in shares of the run, which has
    ``total`` rollouts; 0: never.
    """
    if strategy == "no":
        return 0
    if strategy == "epoch":
        return epoch
    return max(1, round(steps * total if steps < 1 else steps / per))
