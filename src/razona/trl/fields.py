"""Every field of TRL 1.16.0's GRPOConfig and SFTConfig: its default there, and what becomes of it here.

docs/from-trl.md is written from these tables. A field that is "not supported" is refused when it is set to
anything but its default; its text says what to do instead.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from razona.errors import ConfigError, nearest

TRL_VERSION = "1.16.0"
How = Literal["same", "other name", "not needed", "not supported"]


class Field(NamedTuple):
    """``text``: the option's name here and what differs; why it is not needed; or what to do instead."""

    default: Any
    how: How
    text: str


def same(default: Any, text: str) -> Field:
    return Field(default, "same", text)


def other(default: Any, text: str) -> Field:
    return Field(default, "other name", text)


def not_needed(default: Any, text: str) -> Field:
    return Field(default, "not needed", text)


def refused(default: Any, text: str) -> Field:
    return Field(default, "not supported", text)


LOADER = "rows are in memory, there is no loader"
ONE_PROCESS = "one process, one device"
MORE_GPUS = "razona runs in one process on one device"
TOKENS = "micro-batches are cut by tokens (tokens_per_microbatch), which bounds memory"
OTHER_NUMBERS = "leave it out and choose with bf16: True (bf16 compute, fp32 masters) or False (fp32)"
TRACKERS = "leave it out: log with callbacks=[...], or read trainer.state.log_history or run/metrics.jsonl"
NO_LABELS = "there are no label tensors"
RUN_STATE = (
    "a checkpoint always holds the whole state, which resuming needs; delete OUTPUT_DIR/run to save space"
)

COMMON: dict[str, Field] = {
    # Length of the run, batches, learning rate.
    "output_dir": same(None, "OUTPUT_DIR/run is the run folder; save_model writes to OUTPUT_DIR"),
    "per_device_train_batch_size": other(8, "prompts_per_step, counted in completions; SFT: rows_per_step"),
    "num_train_epochs": other(3.0, "run.num_steps, from the number of rows"),
    "max_steps": other(-1, "run.num_steps: a rollout here is one or more updates there"),
    "gradient_accumulation_steps": other(1, "times the batch: prompts_per_step, SFT rows_per_step"),
    "learning_rate": same(5e-5, "optimizer.learning_rate"),
    "lr_scheduler_type": other("linear", "optimizer.schedule: linear, cosine, constant(_with_warmup)"),
    "lr_scheduler_kwargs": refused(None, "leave it out: the schedules have no further options"),
    "warmup_steps": same(0, "optimizer.warmup_steps, below 1 a share; the first update has 1/n, not 0"),
    "optim": other("adamw_torch_fused", "AdamW, the only one; adamw_torch is the same"),
    "optim_args": refused(None, "leave it out: set adam_beta1, adam_beta2, adam_epsilon"),
    "optim_target_modules": refused(None, "leave it out: all trainable weights are updated"),
    "weight_decay": same(0.0, "optimizer.weight_decay, on every trained weight"),
    "adam_beta1": other(0.9, "optimizer.betas"),
    "adam_beta2": other(0.999, "optimizer.betas"),
    "adam_epsilon": other(1e-8, "optimizer.eps"),
    "max_grad_norm": same(1.0, "optimizer.max_grad_norm"),
    "label_smoothing_factor": refused(0.0, "leave it out: the loss has no smoothing"),
    "neftune_noise_alpha": refused(None, "leave it out: embeddings get no noise"),
    "auto_find_batch_size": refused(False, "leave it out: " + TOKENS),
    "average_tokens_across_devices": not_needed(True, ONE_PROCESS),
    # Numbers, memory, speed.
    "bf16": other(None, "model.precision: bf16 compute with fp32 masters, on a CPU too; False: fp32"),
    "fp16": refused(False, OTHER_NUMBERS),
    "bf16_full_eval": refused(False, "leave it out: evaluation computes as training does"),
    "fp16_full_eval": refused(False, "leave it out: evaluation computes as training does"),
    "tf32": refused(None, "set torch.backends.cuda.matmul.allow_tf32 yourself"),
    "gradient_checkpointing": same(True, "model.gradient_checkpointing; False is about a third faster"),
    "gradient_checkpointing_kwargs": not_needed(None, "it is not reentrant, always"),
    "activation_checkpointing": refused(None, "set gradient_checkpointing"),
    "activation_checkpointing_kwargs": refused(None, "set gradient_checkpointing"),
    "torch_compile": refused(False, "leave it out: the model runs uncompiled"),
    "torch_compile_backend": refused(None, "leave it out: the model runs uncompiled"),
    "torch_compile_mode": refused(None, "leave it out: the model runs uncompiled"),
    "use_liger_kernel": refused(False, "leave it out: logits of a whole batch are never made here either"),
    "liger_kernel_config": refused(None, "leave it out: logits of a whole batch are never made here either"),
    "use_cache": not_needed(False, "training uses no cache, sampling always does"),
    "torch_empty_cache_steps": not_needed(None, TOKENS),
    "use_cpu": other(False, "model.device = cpu"),
    "seed": same(42, "run.seed"),
    "data_seed": refused(None, "set seed: it orders the rows too"),
    "full_determinism": not_needed(False, "runs on a CPU are the same to the bit"),
    # Logging.
    "logging_strategy": other("steps", "steps, epoch or no: what trainer.state.log_history holds"),
    "logging_steps": other(10, "means over so many steps; run/metrics.jsonl holds every step"),
    "logging_first_step": other(False, "one more entry in log_history"),
    "logging_nan_inf_filter": not_needed(True, "a loss that is not finite stops the run"),
    "log_on_each_node": not_needed(True, ONE_PROCESS),
    "log_level": not_needed("passive", "there is no log level: notes are printed"),
    "log_level_replica": not_needed("warning", ONE_PROCESS),
    "disable_tqdm": not_needed(None, "there is no tqdm; progress is a line per step"),
    "include_num_input_tokens_seen": refused("no", "read tokens of each step in run/metrics.jsonl"),
    "report_to": refused("none", TRACKERS),
    "run_name": not_needed(None, "only trackers show it"),
    "project": not_needed("huggingface", "only trackers show it"),
    "trackio_space_id": refused(None, TRACKERS),
    "trackio_bucket_id": refused(None, TRACKERS),
    "trackio_static_space_id": refused(None, TRACKERS),
    "debug": refused("", "leave it out"),
    "skip_memory_metrics": refused(True, "leave it out: memory is not measured"),
    # Evaluation.
    "eval_strategy": other("no", "eval.every: no, steps or epoch; and after the last step"),
    "eval_steps": other(None, "eval.every; None: logging_steps"),
    "eval_delay": refused(0, "leave it out: call trainer.evaluate() yourself"),
    "eval_on_start": refused(False, "call trainer.evaluate() before trainer.train()"),
    "per_device_eval_batch_size": not_needed(8, TOKENS),
    "prediction_loss_only": not_needed(False, "evaluation returns figures, never logits"),
    "eval_do_concat_batches": not_needed(True, "evaluation returns figures, never logits"),
    "eval_use_gather_object": not_needed(False, ONE_PROCESS),
    "eval_accumulation_steps": not_needed(None, "evaluation returns figures, never logits"),
    "include_for_metrics": refused([], "leave it out: evaluation has reward functions, no compute_metrics"),
    "batch_eval_metrics": refused(False, "leave it out: evaluation has reward functions, no compute_metrics"),
    "load_best_model_at_end": other(False, "the weights of OUTPUT_DIR/run/best are loaded after training"),
    "metric_for_best_model": other(None, "eval.best_metric: eval_reward or eval_rewards/NAME/mean"),
    "greater_is_better": other(None, "True only: a reward is better when it is higher"),
    # Saving.
    "save_strategy": other("steps", "run.save_every: steps, epoch or no; and always at the end"),
    "save_steps": other(500, "run.save_every"),
    "save_total_limit": other(None, "run.keep_checkpoints; None: all"),
    "save_only_model": refused(False, RUN_STATE),
    "save_on_each_node": not_needed(False, ONE_PROCESS),
    "enable_jit_checkpoint": refused(False, "press Ctrl-C: the step ends and is saved"),
    "resume_from_checkpoint": other(None, "what trainer.train() takes when it is not told"),
    "ignore_data_skip": refused(False, "leave it out: a resumed run goes on with the rows where it stopped"),
    "restore_callback_states_from_checkpoint": refused(False, "keep the state of your callbacks yourself"),
    "push_to_hub": other(False, "uploads once, after training; token and rights are tried before it"),
    "hub_token": other(None, "the token of the upload"),
    "hub_private_repo": other(None, "the repository is made private; one that is public is refused"),
    "hub_model_id": other(None, "the repository; None: the last part of output_dir"),
    "hub_strategy": not_needed("every_save", "the model is uploaded once, after training"),
    "hub_always_push": not_needed(False, "the model is uploaded once, after training"),
    "hub_revision": other(None, "the branch of the upload, made where it is not there"),
    # Loaders, processes, labels.
    "accelerator_config": refused(None, MORE_GPUS),
    "parallelism_config": refused(None, MORE_GPUS),
    "fsdp": refused(None, MORE_GPUS),
    "fsdp_config": refused(None, MORE_GPUS),
    "deepspeed": refused(None, MORE_GPUS),
    "ddp_find_unused_parameters": not_needed(None, ONE_PROCESS),
    "ddp_bucket_cap_mb": not_needed(None, ONE_PROCESS),
    "ddp_broadcast_buffers": not_needed(None, ONE_PROCESS),
    "ddp_static_graph": not_needed(None, ONE_PROCESS),
    "ddp_backend": not_needed(None, ONE_PROCESS),
    "ddp_timeout": not_needed(1800, ONE_PROCESS),
    "local_rank": not_needed(-1, ONE_PROCESS),
    "dataloader_drop_last": not_needed(False, "batches are always full: they go on into the next epoch"),
    "dataloader_num_workers": not_needed(0, LOADER),
    "dataloader_pin_memory": not_needed(True, LOADER),
    "dataloader_persistent_workers": not_needed(False, LOADER),
    "dataloader_prefetch_factor": not_needed(None, LOADER),
    "dataloader_multiprocessing_context": not_needed(None, LOADER),
    "dataloader_in_order": not_needed(True, LOADER),
    "remove_unused_columns": not_needed(True, "SFT reads the columns it needs"),
    "label_names": not_needed(None, NO_LABELS),
    "length_column_name": not_needed("length", "rows are not grouped by length"),
    "train_sampling_strategy": refused("random", "set shuffle_dataset"),
    "do_train": not_needed(False, "call trainer.train()"),
    "do_eval": not_needed(False, "call trainer.evaluate()"),
    "do_predict": not_needed(False, "there is no trainer.predict()"),
}  # fmt: skip

VLLM = "there is no vLLM engine yet: leave use_vllm out, the trained model itself samples"
ONLY_VLLM = "an option of vLLM, which is off"
ENTROPY = "leave it out: the loss has no entropy term; entropy is measured"
SAPO = "an option of the SAPO loss, which is refused"
VESPO = "an option of the VESPO loss, which is refused"
HUB_TABLE = "all completions are in OUTPUT_DIR/run/rollouts.jsonl"
CACHE = "the native engine has its own cache"

GRPO: dict[str, Field] = COMMON | {
    "learning_rate": same(1e-6, "optimizer.learning_rate"),
    "remove_unused_columns": refused(False, "leave it at False: rewards need the columns"),
    # Model.
    "model_init_kwargs": refused(None, "load the model yourself and pass it, with processing_class"),
    "trust_remote_code": same(False, "model.trust_remote_code"),
    "router_aux_loss_coef": refused(None, "leave it out: there is no load-balancing term"),
    "disable_dropout": not_needed(False, "every dropout is 0 in every pass"),
    "cast_lm_head_to_fp32": refused(False, "set bf16=False: everything computes in fp32"),
    # Sampling.
    "num_generations": other(8, "sampling.group_size"),
    "num_generations_eval": other(None, "eval.samples; None: num_generations"),
    "max_completion_length": same(512, "sampling.max_completion_length"),
    "ds3_gather_for_generation": not_needed(True, ONE_PROCESS),
    "shuffle_dataset": other(True, "data.shuffle, a new order in every epoch"),
    "pad_to_multiple_of": not_needed("auto", "rows are not padded"),
    "generation_batch_size": other(None, "prompts_per_step, minibatches_per_rollout"),
    "steps_per_generation": other(None, "minibatches_per_rollout, counted in micro-batches"),
    "temperature": same(1.0, "sampling.temperature; above 0"),
    "top_p": same(1.0, "sampling.top_p"),
    "top_k": same(0, "sampling.top_k"),
    "min_p": same(None, "sampling.min_p"),
    "generation_kwargs": refused(None, "set temperature, top_p, top_k, min_p, max_completion_length"),
    "chat_template_kwargs": refused(None, "change processing_class.chat_template"),
    "repetition_penalty": refused(1.0, "leave it out: the trainer could not follow"),
    "cache_implementation": refused(None, "leave it out: " + CACHE),
    "use_transformers_continuous_batching": refused(False, "leave it out: the native engine does so"),
    "transformers_continuous_batching_config": not_needed(None, "continuous batching of transformers is off"),
    "use_transformers_paged": refused(False, "leave it out: the native engine does so"),
    "max_tool_calling_iterations": refused(None, "leave it out: completions call no tools"),
    # vLLM.
    "use_vllm": refused(False, VLLM),
    "vllm_mode": not_needed("colocate", ONLY_VLLM),
    "vllm_model_impl": not_needed("vllm", ONLY_VLLM),
    "vllm_enable_sleep_mode": not_needed(False, ONLY_VLLM),
    "vllm_structured_outputs_regex": refused(None, VLLM),
    "vllm_server_base_url": not_needed(None, ONLY_VLLM),
    "vllm_server_host": not_needed("0.0.0.0", ONLY_VLLM),
    "vllm_server_port": not_needed(8000, ONLY_VLLM),
    "vllm_server_timeout": not_needed(240.0, ONLY_VLLM),
    "vllm_group_port": not_needed(51216, ONLY_VLLM),
    "vllm_gpu_memory_utilization": not_needed(0.3, ONLY_VLLM),
    "vllm_max_model_length": not_needed(None, ONLY_VLLM),
    "vllm_tensor_parallel_size": not_needed(1, ONLY_VLLM),
    "vllm_importance_sampling_correction": not_needed(True, "nothing to correct: the trained model samples"),
    "vllm_importance_sampling_mode": not_needed("sequence_mask", ONLY_VLLM),
    "vllm_importance_sampling_clip_max": not_needed(3.0, ONLY_VLLM),
    "vllm_importance_sampling_clip_min": not_needed(None, ONLY_VLLM),
    "vllm_importance_sampling_cap": not_needed(None, ONLY_VLLM),
    "off_policy_mask_threshold": refused(None, "leave it out: the trained model samples"),
    # Objective.
    "beta": other(0.0, "objective.kl_coef"),
    "use_bias_correction_kl": other(True, "objective.kl_estimator: True is k3_weighted, False k3"),
    "num_iterations": other(1, "epochs_per_rollout"),
    "epsilon": other(0.2, "objective.clip_low, clip_high"),
    "epsilon_high": other(None, "objective.clip_high; None: epsilon. With cispo the largest weight, above 1"),
    "delta": other(None, "objective.dual_clip"),
    "sapo_temperature_neg": not_needed(1.05, SAPO),
    "sapo_temperature_pos": not_needed(1.0, SAPO),
    "vespo_k_pos": not_needed(2.0, VESPO),
    "vespo_lambda_pos": not_needed(3.0, VESPO),
    "vespo_k_neg": not_needed(3.0, VESPO),
    "vespo_lambda_neg": not_needed(2.0, VESPO),
    "importance_sampling_level": other("token", "objective.name: sequence, with loss_type grpo, is gspo"),
    "reward_weights": same(None, "objective.reward_weights"),
    "multi_objective_aggregation": refused("sum_then_normalize", "leave it out: scale the rewards"),
    "scale_rewards": other("group", "objective.std: group is sample; batch (population here)"),
    "loss_type": other("dapo", "objective.weights: grpo, dr_grpo, dapo, bnpo; objective.name: cispo"),
    "mask_truncated_completions": other(False, "objective.overlong_filter"),
    "sync_ref_model": other(False, "objective.refresh_reference_every; with ref_model_mixup_alpha=1.0 only"),
    "ref_model_mixup_alpha": other(0.6, "1.0 only, with objective.refresh_reference_every"),
    "ref_model_sync_steps": other(512, "objective.refresh_reference_every, in rollouts"),
    "top_entropy_quantile": refused(1.0, "leave it out: all completion tokens are trained"),
    "entropy_coef": refused(0.0, ENTROPY),
    "use_adaptive_entropy": refused(False, ENTROPY),
    "entropy_coef_min": not_needed(0.0, "there is no entropy term"),
    "entropy_coef_max": not_needed(1.0, "there is no entropy term"),
    "entropy_coef_delta": not_needed(0.005, "there is no entropy term"),
    "entropy_target": not_needed(0.2, "there is no entropy term"),
    # Completions in the log.
    "log_completions": other(False, "run.print_every; in any case all are in OUTPUT_DIR/run/rollouts.jsonl"),
    "log_multimodal": not_needed(True, "prompts are text"),
    "num_completions_to_print": refused(None, "read them where you like: " + HUB_TABLE),
    "log_unique_prompts": not_needed(False, "only trackers show it"),
    "log_completions_hub_repo": refused(None, "upload them yourself: " + HUB_TABLE),
}  # fmt: skip

SFT: dict[str, Field] = COMMON | {
    "learning_rate": same(2e-5, "optimizer.learning_rate"),
    "train_sampling_strategy": other("random", "data.shuffle: random or sequential"),
    "metric_for_best_model": other(None, "eval.best_metric: eval_loss or eval_mean_token_accuracy"),
    "greater_is_better": other(None, "False for eval_loss, True for eval_mean_token_accuracy"),
    "model_init_kwargs": GRPO["model_init_kwargs"],
    "trust_remote_code": GRPO["trust_remote_code"],
    "router_aux_loss_coef": GRPO["router_aux_loss_coef"],
    "chat_template_path": refused(None, "set processing_class.chat_template"),
    "dataset_text_field": other("text", "data.text_column, where there is no completion and no messages"),
    "dataset_kwargs": refused(None, "leave it out"),
    "dataset_num_proc": not_needed(None, "rows are tokenised in one process"),
    "eos_token": refused(None, "set processing_class.eos_token"),
    "pad_token": refused(None, "leave it out: rows are not padded"),
    "max_length": same(1024, "max_length; a longer row is left out and counted, not cut"),
    "truncation_mode": refused("keep_start", "leave it out: rows are not cut"),
    "shuffle_dataset": not_needed(False, "rows have a new order in every epoch; see train_sampling_strategy"),
    "packing": not_needed(False, "rows are always packed without seeing each other"),
    "packing_strategy": not_needed("bfd", "rows are packed whole"),
    "padding_free": not_needed(False, "rows are never padded"),
    "pad_to_multiple_of": not_needed("auto", "rows are never padded"),
    "eval_packing": not_needed(None, "rows are always packed without seeing each other"),
    "completion_only_loss": refused(None, "leave it out: of prompt and completion the completion is trained"),
    "assistant_only_loss": not_needed(False, "always so: the assistant's turns are trained, and no others"),
    "loss_type": refused("nll", "leave it out: the loss is nll"),
    "activation_offloading": refused(False, "set gradient_checkpointing"),
}  # fmt: skip

NOTHING: tuple[Any, ...] = (None, "", "none", [], {}, ["none"])
"""Ways to say that something is off."""


def check_field(table: dict[str, Field], config: str, name: str, value: Any) -> None:
    """ConfigError for a name that TRL's ``config`` does not have, and for a field that is not supported."""
    if name not in table:
        removed = (
            " TRL has dropped it: prompts are never cut; filter your rows."
            if name == "max_prompt_length"
            else ""
        )
        raise ConfigError(
            f"{config} has no field '{name}' in TRL {TRL_VERSION}.{removed or nearest(name, table)}"
            " docs/from-trl.md lists all of them."
        )
    field = table[name]
    if field.how != "not supported" or value == field.default:
        return
    if value in NOTHING and field.default in NOTHING:
        return
    if name == "completion_only_loss" and value is True:
        return
    raise ConfigError(f"{config}({name}={value!r}) is not supported: {field.text}.")
