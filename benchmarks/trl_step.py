"""TRL's GRPO step, timed. Runs under TRL's own interpreter (trl-constraints.txt); imports nothing of razona.

Without switches TRL runs at its defaults: fp32 weights, bf16 autocast, gradient checkpointing, 8 sequences a
micro-batch. `--pure-bf16` loads bf16 weights and turns autocast and checkpointing off.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from typing import Any

import torch
from cases import CASES, LORA_ALPHA, Case, reward
from child import StepClock, arguments, report
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class TimedTrainer(GRPOTrainer):
    """GRPOTrainer with a clock around its phases; what it computes is untouched."""

    clock: StepClock
    prompt_tokens: list[int]
    completion_tokens: list[int]

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.clock.phase("train"):
            return super().training_step(*args, **kwargs)

    def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> Any:
        with self.clock.phase("reward"):
            return super()._generate_and_score_completions(*args, **kwargs)

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        with self.clock.phase("generate"):
            result = super()._generate(*args, **kwargs)
        prompt_ids, completion_ids = result[:2]
        self.prompt_tokens = [len(ids) for ids in prompt_ids]
        self.completion_tokens = [len(ids) for ids in completion_ids]
        return result


class StepEnds(TrainerCallback):
    """Tells the clock where a step begins and ends."""

    def __init__(self, clock: StepClock) -> None:
        self.clock = clock

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.clock.start_step()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.clock.end_step()


def score(completions: list[Any], **columns: Any) -> list[float]:
    return reward([messages[0]["content"] for messages in completions])


def config_for(case: Case, steps: int, output_dir: str, *, pure_bf16: bool) -> GRPOConfig:
    sequences = len(case.questions) * case.group_size
    options: dict[str, Any] = {}
    if pure_bf16:
        options = {"bf16": False, "gradient_checkpointing": False, "model_init_kwargs": {"dtype": "bfloat16"}}
    return GRPOConfig(
        output_dir=output_dir,
        use_cpu=True,  # without it bf16, TRL's default, is refused on a machine without an accelerator
        per_device_train_batch_size=min(8, sequences),  # 8 is the default
        gradient_accumulation_steps=max(1, sequences // 8),
        num_generations=case.group_size,
        max_completion_length=case.length,
        generation_kwargs={"min_new_tokens": case.length},  # no stop token before the last position
        max_steps=steps,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        **options,
    )


def adapter(rank: int) -> Any:
    """A LoRA on all linear layers of the decoder, as razona puts it; None for rank 0."""
    if not rank:
        return None
    from peft import LoraConfig

    return LoraConfig(r=rank, lora_alpha=LORA_ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")


def main() -> None:
    options = arguments("--pure-bf16")
    torch.set_num_threads(options.threads)
    case = CASES[options.case]
    clock = StepClock()
    # The last line of stdout is the result; TRL and transformers log to stdout as well.
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        trainer = TimedTrainer(
            model=options.model,
            reward_funcs=score,
            args=config_for(case, options.steps + 1, folder, pure_bf16=options.pure_bf16),
            train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in case.prompts]),
            callbacks=[StepEnds(clock)],
            peft_config=adapter(options.lora),
        )
        trainer.clock = clock
        trainer.train()
    report(clock, trainer.prompt_tokens[:: case.group_size], trainer.completion_tokens)


if __name__ == "__main__":
    main()
