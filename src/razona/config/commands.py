"""Options of the commands that train nothing of the user's: generate, eval, select, merge, push, demo."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from razona.config.check import Given
from razona.config.common import DataConfig, ModelConfig, PassRule, resumable
from razona.errors import ConfigError
from razona.types import Sampling, at_least, ranged

_MODEL = "model.name model.device model.precision model.load_in_4bit"
_SAMPLING = (
    "sampling.group_size sampling.max_completion_length sampling.temperature sampling.top_p sampling.top_k"
)


@dataclass(frozen=True)
class GenerateConfig:
    """Sample completions for prompts, given as text or as a data set."""

    HELP: ClassVar[dict[str, str]] = {
        "model": _MODEL,
        "prompts": "prompts data.path data.prompt_column data.system num_prompts",
        "sampling": _SAMPLING,
        "result": "output seed",
    }

    prompts: tuple[str, ...] = ()
    """Prompts as text; --prompt may be repeated."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=lambda: DataConfig(shuffle=False))
    sampling: Sampling = field(default_factory=lambda: Sampling(group_size=1))
    num_prompts: int = at_least(0, default=0, note="0: all")
    """Rows of the data set to use, the first ones or, with data.shuffle, any; 0: all."""
    seed: int = at_least(0, default=0)
    """Of every completion, and of a shuffled order."""
    output: str = ""
    """A .jsonl file for the completions, not there yet; empty: they are printed."""

    def check(self, given: Given) -> None:
        if self.prompts and self.data.path:
            raise ConfigError(
                f"prompts ({len(self.prompts)}) and data.path = {self.data.path!r} are both given, and one "
                "would be left out. Give --prompt or --data."
            )


@dataclass(frozen=True)
class EvaluateConfig:
    """Score a model's completions on a data set with reward functions; means come with error bars."""

    HELP: ClassVar[dict[str, str]] = {
        "model": _MODEL,
        "prompts and rewards": "data.path data.prompt_column data.system data.task rewards num_prompts",
        "sampling": _SAMPLING,
        "result": "output seed",
    }

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=lambda: DataConfig(shuffle=False))
    rewards: tuple[str, ...] = ()
    """format, exact_answer, length, path/to/file.py:function, package.module:function or model:FOLDER."""
    sampling: Sampling = field(default_factory=lambda: Sampling(group_size=1))
    num_prompts: int = at_least(0, default=0, note="0: all")
    """Rows of the data set to use, the first ones or, with data.shuffle, any; 0: all."""
    seed: int = at_least(0, default=0)
    """Of every completion, and of a shuffled order."""
    output: str = ""
    """A .jsonl file for completions and scores, not there yet; empty: none is written."""
    reward_timeout: float = ranged(60.0, "above 0 seconds", lambda v: v > 0)
    """Seconds a reward function may take per call."""


@dataclass(frozen=True)
class SelectConfig(PassRule):
    """Keep the rows of a data set whose prompts the model answers right neither always nor never."""

    HELP: ClassVar[dict[str, str]] = {
        "model": _MODEL,
        "prompts and what passes": "data.path data.prompt_column data.gold data.system num_prompts "
        "pass_reward pass_above",
        "sampling": _SAMPLING,
        "result": "by output seed",
    }
    SHORT_FLAGS: ClassVar[dict[str, str]] = {
        "--samples": "--sampling.group-size",
        "--out": "--output",
        "--reward": "--pass-reward",
    }

    pass_reward: str = "exact_answer"
    """The reward function that says what passes: a built-in one, or path/to/file.py:function."""
    by: tuple[str, str] = resumable(("pass-rate", "0.2..0.8"))
    """What to select by, and the range that is kept, bounds included."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=lambda: DataConfig(shuffle=False))
    sampling: Sampling = field(default_factory=Sampling)
    num_prompts: int = at_least(0, default=0, note="0: all")
    """Rows of the data set to use, the first ones or, with data.shuffle, any; 0: all."""
    seed: int = at_least(0, default=0)
    """Of every completion, and of a shuffled order."""
    output: str = resumable("")
    """A .jsonl file for the rows that are kept. What is measured goes to OUTPUT.rates.jsonl on the way, from
    which a second start goes on."""
    prompts_per_chunk: int = resumable(at_least(1, default=32))
    """Prompts sampled between two writes."""
    reward_timeout: float = resumable(ranged(60.0, "above 0 seconds", lambda v: v > 0))
    """Seconds the reward function may take per call."""

    def check(self, given: Given) -> None:
        _ = self.pass_rates
        if self.sampling.temperature == 0 and self.sampling.group_size > 1:
            raise ConfigError(
                "sampling.temperature = 0: greedy completions of a prompt are all the same, so that every "
                "pass rate would be 0 or 1. Give the temperature that you train with, such as 1."
            )

    @property
    def pass_rates(self) -> tuple[float, float]:
        """The lowest and the highest that are kept: ``("pass-rate", "0.2..0.8")`` says 0.2 and 0.8. Raises
        ConfigError."""
        what, text = self.by
        if what.replace("_", "-") != "pass-rate":
            raise ConfigError(
                f"--by {what}: rows are selected by pass-rate only. Write --by pass-rate 0.2..0.8."
            )
        match = re.fullmatch(r"\s*([\d.]+?)\s*\.\.\s*([\d.]+)\s*", text)
        try:
            low, high = map(float, match.groups()) if match else (1.0, 0.0)
        except ValueError:
            low, high = 1.0, 0.0
        if not 0 <= low <= high <= 1:
            raise ConfigError(
                f"--by pass-rate {text!r} is no range of rates. Write the lowest and the highest that are "
                "kept, between 0 and 1, with two dots between them: 0.2..0.8."
            )
        return low, high


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

    seed: int = at_least(0, default=0)
    """Of everything that is drawn."""
    output_dir: str = "runs/demo"
    """Where the three runs are written."""
    cold_start_steps: int = at_least(1, default=16)
    """SFT steps on the demonstrations before GRPO."""
    grpo_steps: int = at_least(1, default=36)
    """GRPO steps; the control goes on with SFT for the same time."""
    eval_prompts: int = ranged(200, "at least 2: an error bar needs two", lambda v: v >= 2)
    """Held-out prompts; no number pair of them is in the demonstrations."""
