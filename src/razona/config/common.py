"""The parts that every loop's configuration is made of.

No torch here: `razona grpo --help` must answer at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

BUNDLED_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


def resumable(default: Any) -> Any:
    """A field that may change when a run is resumed; every other one must be as it was."""
    return field(default=default, metadata={"resume": True})


@dataclass(frozen=True)
class ModelConfig:
    """Which model, and in which numbers it computes."""

    name: str = BUNDLED_MODEL
    """A hub id, a folder (of a model, or of a LoRA adapter), a .gguf file, or the bundled default."""
    precision: Literal["bf16", "fp32", "pure_bf16"] = "bf16"
    """bf16: bf16 compute with fp32 masters. fp32: everything. pure_bf16: small updates are rounded away."""
    device: str = "auto"
    """auto takes CUDA where there is one."""
    load_in_4bit: bool = False
    """The decoder's linear layers in 4 bits (NF4 of bitsandbytes), frozen: to sample from, or to train an
    adapter on."""
    trust_remote_code: bool = False
    """Run Python code that a hub repository brings."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    kernels: Literal["auto", "plain"] = "auto"
    """auto: fast kernels of razona's own where they fit the model. plain: transformers' and peft's modules as
    they are."""


@dataclass(frozen=True)
class LoRAConfig:
    """A low-rank adapter that is trained instead of the model's own weights."""

    r: int = 0
    """Rank of a fresh adapter; 0: none, every weight is trained. A good learning rate is about 10 times that
    of full training."""
    alpha: int = 32
    """The adapter's product is scaled by alpha / r."""
    rslora: bool = False
    """Scaled by alpha / sqrt(r) instead."""
    target_modules: tuple[str, ...] = ()
    """Names of the linear layers that get one; empty: all of the decoder but the head."""
    adapter: str = ""
    """An adapter folder to go on with, on model.name as its base; the reference is then the adapter as it is
    there. A model.name that is such a folder says the same, with the base it was trained on."""


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
    max_prompt_length: int | None = None
    """Tokens a prompt may have, in SFT what stands before the first trained token; None allows what the model
    can hold."""
    too_long: Literal["drop", "error"] = "drop"
    """What happens to a row that does not fit; drops are counted and printed."""
    shuffle: bool = True
    """A new order in every epoch, from the seed."""


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and its learning rate."""

    learning_rate: float = 1e-6
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up; linear and cosine fall towards 0, which comes after the last update."""
    warmup_steps: int = 0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm; 0 leaves them."""


@dataclass(frozen=True)
class EvalConfig:
    """Held-out evaluation during training."""

    data: str = ""
    """Held-out rows, read like the training data; empty: no evaluation."""
    every: int = resumable(0)
    """Steps between evaluations; 0: only after the last step."""
    rewards: tuple[str, ...] = ()
    """Reward functions for evaluation, never summed into the training reward; empty: those of training."""
    samples: int = 1
    """Completions per held-out prompt."""
    temperature: float = 1.0
    """0 is greedy."""
    best_metric: str = ""
    """The step with the highest value of this eval/... metric is kept as best/; empty: eval/reward."""


@dataclass(frozen=True)
class RunConfig:
    """The run folder and its clock."""

    output_dir: str = resumable("runs/razona")
    num_steps: int = resumable(100)
    """Optimizer rounds: one rollout each in GRPO, one batch each in SFT."""
    seed: int = 0
    save_every: int = resumable(0)
    """Steps between checkpoints; 0: only at the end and on Ctrl-C."""
    keep_checkpoints: int = resumable(2)
    """Newest checkpoints to keep, the best one apart."""
    print_every: int = resumable(10)
    """Steps between printed sample completions; 0: never."""
    resume: bool = resumable(False)
    """Go on from the newest whole checkpoint in output_dir."""
    overwrite: bool = resumable(False)
    """Start anew in an output_dir that holds a run; the old one is moved aside, not deleted."""
