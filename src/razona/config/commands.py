"""Options of the commands that train nothing of the user's: generate, eval, select, merge, push, demo."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from razona.config.common import DataConfig, ModelConfig, resumable
from razona.types import Sampling


@dataclass(frozen=True)
class GenerateConfig:
    """Sample completions for prompts, given as text or as a data set."""

    prompts: tuple[str, ...] = ()
    """Prompts as text; --prompt may be repeated."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=lambda: DataConfig(shuffle=False))
    sampling: Sampling = field(default_factory=lambda: Sampling(group_size=1))
    num_prompts: int = 0
    """Rows of the data set to use, the first ones or, with data.shuffle, any; 0: all."""
    seed: int = 0
    output: str = ""
    """A .jsonl file for the completions, not there yet; empty: they are printed."""


@dataclass(frozen=True)
class EvaluateConfig:
    """Score a model's completions on a data set with reward functions; means come with error bars."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=lambda: DataConfig(shuffle=False))
    rewards: tuple[str, ...] = ()
    """format, exact_answer, length, path/to/file.py:function, package.module:function or model:FOLDER."""
    sampling: Sampling = field(default_factory=lambda: Sampling(group_size=1))
    num_prompts: int = 0
    """Rows of the data set to use, the first ones or, with data.shuffle, any; 0: all."""
    seed: int = 0
    output: str = ""
    """A .jsonl file for completions and scores, not there yet; empty: none is written."""
    reward_timeout: float = 60.0
    """Seconds a reward function may take per call."""


@dataclass(frozen=True)
class SelectConfig:
    """Keep the rows of a data set whose prompts the model answers right neither always nor never."""

    SHORT_FLAGS: ClassVar[dict[str, str]] = {"--samples": "--sampling.group-size", "--out": "--output"}

    by: tuple[str, str] = resumable(("pass-rate", "0.2..0.8"))
    """What to select by, and the range that is kept, bounds included."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=lambda: DataConfig(shuffle=False))
    reward: str = "exact_answer"
    """The reward function that says what passes: a built-in one, or path/to/file.py:function."""
    pass_above: float = 0.0
    """A completion passes when the reward is above this."""
    sampling: Sampling = field(default_factory=Sampling)
    num_prompts: int = 0
    """Rows of the data set to use, the first ones or, with data.shuffle, any; 0: all."""
    seed: int = 0
    output: str = resumable("")
    """A .jsonl file for the rows that are kept. What is measured goes to OUTPUT.rates.jsonl on the way, from
    which a second start goes on."""
    prompts_per_chunk: int = resumable(32)
    """Prompts sampled between two writes."""
    reward_timeout: float = resumable(60.0)
    """Seconds the reward function may take per call."""


@dataclass(frozen=True)
class MergeConfig:
    """Make one model of a LoRA adapter and its base: razona merge runs/first."""

    adapter: str = ""
    """The folder of a run with LoRA, or of an adapter."""
    output: str = ""
    """Where to write the model, not there yet; empty: merged, beside the adapter."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Of the weights written; the sum is taken in fp32 in any case."""


@dataclass(frozen=True)
class PushConfig:
    """Upload the model of a run to the hub, with a card made from it: razona push runs/first me/model."""

    folder: str = ""
    """The folder of a run, or of a model within it (runs/first/merged)."""
    repo: str = ""
    """OWNER/NAME on the hub, made if it is not there; NAME alone is yours."""
    best: bool = False
    """The model of the best held-out step, best/, in place of the last one."""
    private: bool = False
    """Only you can see the repository. One that is there and public is refused."""
    license: str = ""
    """For the card, as the hub spells it: apache-2.0; empty: none is claimed, unless the base's is known."""


@dataclass(frozen=True)
class DemoConfig:
    """Train the bundled 135M model on two-digit addition: 32 demonstrations, then GRPO, beside a control."""

    seed: int = 0
    output_dir: str = "runs/demo"
    cold_start_steps: int = 16
    """SFT steps on the demonstrations before GRPO."""
    grpo_steps: int = 36
    """GRPO steps; the control goes on with SFT for the same time."""
    eval_prompts: int = 200
    """Held-out prompts; no number pair of them is in the demonstrations."""
