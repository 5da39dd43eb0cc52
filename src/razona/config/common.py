"""The parts that every loop's configuration is made of.

No torch here: `razona grpo --help` must answer at once.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from razona.config.check import Given
from razona.errors import ConfigError
from razona.types import at_least, ranged

BUNDLED_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


def resumable(default: Any) -> Any:
    """A field that may change when a run is resumed; every other one must be as it was. ``default``: the
    value, or a field of `ranged` or `at_least`.
    """
    ranged_one = isinstance(default, dataclasses.Field)
    value, metadata = (default.default, default.metadata) if ranged_one else (default, {})
    return field(default=value, metadata={**metadata, "resume": True})


@dataclass(frozen=True)
class PassRule:
    """What counts as right, for the configurations that ask; `razona.rollout.collect.passes` applies it."""

    pass_reward: str = ""
    """The reward function that says what passes, by its name; empty: the only one, or exact_answer."""
    pass_above: float = 0.0
    """A completion passes when that reward is above this."""


@dataclass(frozen=True)
class ModelConfig:
    """Which model, and in which numbers it computes."""

    name: str = ranged(BUNDLED_MODEL, "not empty", bool)
    """A hub id, a folder (of a model, or of a LoRA adapter), a .gguf file, or the bundled default."""
    precision: Literal["auto", "bf16", "fp32", "pure_bf16"] = "auto"
    """auto: bf16 where this machine is fast in it, else fp32; the run's header says which. bf16: bf16
    compute with fp32 masters. fp32: everything. pure_bf16: small updates are rounded away."""
    device: str = "auto"
    """auto takes CUDA where there is one."""
    load_in_4bit: bool = False
    """The decoder's linear layers in 4 bits (NF4 of bitsandbytes), frozen: to sample from, or to train an
    adapter on."""
    trust_remote_code: bool = False
    """Run Python code that a hub repository brings."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""


@dataclass(frozen=True)
class LoRAConfig:
    """A low-rank adapter that is trained instead of the model's own weights."""

    r: int = at_least(0, default=0, note="0: no adapter")
    """Rank of a fresh adapter; 0: none, every weight is trained. A good learning rate is about 10 times that
    of full training."""
    alpha: int = at_least(1, default=32)
    """The adapter's product is scaled by alpha / r."""
    rslora: bool = False
    """Scaled by alpha / sqrt(r) instead."""
    target_modules: tuple[str, ...] = ()
    """Names of the linear layers that get one; empty: all of the decoder but the head."""
    adapter: str = ""
    """An adapter folder to go on with, on model.name as its base; the reference is then the adapter as it is
    there. A model.name that is such a folder says the same, with the base it was trained on."""

    def check(self, given: Given) -> None:
        if self.r and self.adapter:
            raise ConfigError(
                f"lora.r = {self.r} and lora.adapter = {self.adapter!r}: a fresh adapter, and one that has "
                "its own rank. Give one of them."
            )

    def check_fresh(self) -> None:
        """ConfigError for options of a fresh adapter where none is made: they would be ignored."""
        given = {name: getattr(self, name) for name in ("alpha", "rslora", "target_modules")}
        ignored = [f"lora.{name} = {v!r}" for name, v in given.items() if v != getattr(LoRAConfig, name)]
        if ignored and not self.r:
            raise ConfigError(
                f"{' and '.join(ignored)}: but lora.r is 0, no fresh adapter to make. Give --lora.r 16."
            )


@dataclass(frozen=True)
class DataConfig:
    """Where rows come from and how they become prompts."""

    path: str = ""
    """A .jsonl, .json, .csv or .parquet file, or a hub id."""
    task: Literal["none", "gsm8k"] = "none"
    """A task fills in what is left out: path, prompt_column, gold, system, and the rewards."""
    split: str = "train"
    """Split of a hub data set."""
    prompt_column: str = "prompt"
    """Column that holds the prompt: a string or a list of messages."""
    completion_column: str = "completion"
    """Column that holds the answer to imitate (SFT only)."""
    text_column: str = "text"
    """Column of plain texts, every token of which is trained (SFT only, where no other column fits)."""
    rename: dict[str, str] = field(default_factory=dict)
    """Columns to rename before use, old=new, so that they fit a reward function's parameters."""
    gold: str = ""
    """Where the gold answer is: answer:after('####') makes it the column answer, before any renaming; put
    NAME= in front for another column, :number behind for 1,234 as 1234."""
    no_gold: Literal["drop", "error"] = "error"
    """What happens to a row without a gold answer; drops are counted and printed."""
    system: str | None = None
    """System prompt put before every prompt; it makes string prompts conversational."""
    max_prompt_length: int | None = at_least(1, default=None)
    """Tokens a prompt may have, in SFT what stands before the first trained token; None allows what the model
    can hold."""
    too_long: Literal["drop", "error"] = "drop"
    """What happens to a row that does not fit; drops are counted and printed."""
    shuffle: bool = True
    """A new order in every epoch, from the seed."""


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and its learning rate."""

    learning_rate: float = at_least(0, default=1e-6)
    """Step size of AdamW; a LoRA wants about 10 times that of full training."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up; linear and cosine fall towards 0, which comes after the last update."""
    warmup_steps: int = at_least(0, default=0)
    """Updates over which the learning rate rises from 0."""
    betas: tuple[float, float] = ranged(
        (0.9, 0.999), "two numbers, at least 0 and below 1", lambda v: all(0 <= b < 1 for b in v)
    )
    eps: float = ranged(1e-8, "above 0", lambda v: v > 0)
    weight_decay: float = at_least(0, default=0.0)
    max_grad_norm: float = at_least(0, default=1.0, note="0 leaves gradients as they are")
    """Gradients are scaled down to this norm; 0 leaves them."""


@dataclass(frozen=True)
class EvalConfig:
    """Held-out evaluation during training."""

    data: str = ""
    """Held-out rows, read like the training data; empty: no evaluation."""
    every: int = resumable(at_least(0, default=0, note="0: only after the last step"))
    """Steps between evaluations; 0: only after the last step."""
    rewards: tuple[str, ...] = ()
    """Reward functions for evaluation, never summed into the training reward; empty: those of training."""
    samples: int = at_least(1, default=1)
    """Completions per held-out prompt."""
    temperature: float = at_least(0, default=1.0)
    """0 is greedy."""
    best_metric: str = ranged("", "the name of an eval/... series", lambda v: not v or v.startswith("eval/"))
    """The step with the highest value of this eval/... metric is kept as best/; empty: eval/reward."""

    def check(self, given: Given) -> None:
        check_held_out(self, given)
        if self.temperature == 0 and self.samples > 1:
            raise ConfigError(
                f"eval.samples = {self.samples} at eval.temperature = 0: greedy completions of a prompt are "
                "all the same. Set eval.samples = 1, or a temperature above 0."
            )


@dataclass(frozen=True)
class RunConfig:
    """The run folder and its clock."""

    output_dir: str = resumable(ranged("runs/razona", "not empty", bool))
    """Everything a run writes is there."""
    num_steps: int = resumable(at_least(1, default=100))
    """Optimizer rounds: one rollout each in GRPO, one batch each in SFT."""
    seed: int = at_least(0, default=0)
    """Of the order of the rows, of every completion and of a fresh adapter."""
    save_every: int = resumable(at_least(0, default=0, note="0: only at the end"))
    """Steps between checkpoints; 0: only at the end and on Ctrl-C."""
    keep_checkpoints: int = resumable(at_least(1, default=2))
    """Newest checkpoints to keep, the best one apart."""
    print_every: int = resumable(at_least(0, default=10, note="0: never"))
    """Steps between printed sample completions; 0: never."""
    resume: bool = resumable(False)
    """Go on from the newest whole checkpoint in output_dir."""
    overwrite: bool = resumable(False)
    """Start anew in an output_dir that holds a run; the old one is moved aside, not deleted."""

    def check(self, given: Given) -> None:
        if self.resume and self.overwrite:
            raise ConfigError(
                "run.resume and run.overwrite exclude each other: go on with the run, or start anew."
            )


def check_held_out(config: Any, given: Given) -> None:
    """ConfigError for options of an ``eval`` table without held-out rows: they would be ignored."""
    values = {field: getattr(config, field.name) for field in dataclasses.fields(config)}
    changed = [f"eval.{field.name} = {v!r}" for field, v in values.items() if v != field.default]
    if changed and not config.data and given.eval_rows is False:
        raise ConfigError(
            f"{' and '.join(changed)}: but eval.data is empty, nothing to evaluate on. "
            "Give --eval-data FILE, or eval_rows from Python."
        )


def check_warmup(optimizer: OptimizerConfig, updates: int) -> None:
    """ConfigError for a warm-up of more than the run's ``updates``."""
    if optimizer.warmup_steps > updates:
        raise ConfigError(
            f"optimizer.warmup_steps = {optimizer.warmup_steps} is more than the run has updates, "
            f"{updates}: the learning rate would never be reached. Warm up for fewer steps."
        )
