"""Configuration of the SFT loop."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from razona.config.check import Given
from razona.config.common import (
    DataConfig,
    LoRAConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    check_held_out,
    check_warmup,
    resumable,
)
from razona.types import at_least, ranged


@dataclass(frozen=True)
class SFTEvalConfig:
    """Held-out loss during training."""

    data: str = ""
    """Held-out rows, read like the training data; empty: no evaluation."""
    every: int = resumable(at_least(0, default=0, note="0: only after the last step"))
    """Steps between evaluations; 0: only after the last step."""
    best_metric: Literal["eval/loss", "eval/token_accuracy"] = "eval/loss"
    """The step with the lowest loss, or the highest accuracy, is kept as best/."""

    def check(self, given: Given) -> None:
        check_held_out(self, given)


@dataclass(frozen=True)
class SFTConfig:
    """Train on demonstrations: prompts with the answer to imitate, conversations, or plain texts."""

    HELP: ClassVar[dict[str, str]] = {
        "model": "model.name model.device model.precision lora.r",
        "demonstrations": "data.path data.prompt_column data.completion_column data.text_column data.system "
        "max_length",
        "learning": "rows_per_step optimizer.learning_rate optimizer.schedule optimizer.warmup_steps "
        "tokens_per_microbatch",
        "evaluation": "eval.data eval.every",
        "run": "run.num_steps run.output_dir run.seed run.save_every run.resume run.overwrite",
    }

    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(learning_rate=2e-5))
    eval: SFTEvalConfig = field(default_factory=SFTEvalConfig)
    run: RunConfig = field(default_factory=RunConfig)
    rows_per_step: int = at_least(1, default=8)
    """Demonstrations per optimizer step."""
    max_length: int = ranged(2048, "at least 2: a prompt token and a token to learn", lambda v: v >= 2)
    """Tokens a row may have, prompt and completion together; what is longer: see data.too_long."""
    tokens_per_microbatch: int = at_least(0, default=0, note="0: chosen by device")
    """Tokens per forward and backward pass; changes memory and speed, not the gradient. 0: 1,280 on a CPU,
    16,384 elsewhere."""

    def check(self, given: Given) -> None:
        check_warmup(self.optimizer, self.run.num_steps)
