"""How hard prompts are for a model: the share of its answers that pass, and a source that leaves out the
others.

A group whose completions all pass, or all fail, has advantage 0 and teaches nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from razona.config import GRPOConfig, PassRule
from razona.data import PromptSource
from razona.errors import DataError
from razona.rewards import BoundReward, pass_reward
from razona.rollout.collect import completion_seeds, passes, score_groups
from razona.run.console import Console
from razona.types import Engine, Prompt, Sampling

CHUNK = 64  # prompts sampled at a time, so that something can be said in between
Z95 = 1.959963984540054


def wilson(passes: int, count: int) -> tuple[float, float]:
    """The 95 % interval of a share (Wilson 1927): honest at 0 and 1 too. Nothing counted: all is possible.

    >>> [round(bound, 3) for bound in wilson(4, 8)], [round(bound, 3) for bound in wilson(0, 8)]
    ([0.215, 0.785], [0.0, 0.324])
    """
    if not count:
        return 0.0, 1.0
    share, z2 = passes / count, Z95**2 / count
    centre = (share + z2 / 2) / (1 + z2)
    half = Z95 * math.sqrt(share * (1 - share) / count + z2 / (4 * count)) / (1 + z2)
    # the bounds of none and of all, without their rounding
    return (centre - half if passes else 0.0), (centre + half if passes < count else 1.0)


@dataclass(frozen=True, slots=True)
class PassRate:
    """How many of a prompt's ``count`` scored completions passed; ``cut`` is how many were cut off."""

    prompt_id: int
    passes: int
    count: int
    cut: int

    @property
    def rate(self) -> float:
        """The share that passed; nan when the reward function scored none."""
        return self.passes / self.count if self.count else math.nan


class Band(NamedTuple):
    """The pass rates that are kept, bounds included."""

    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.low:g}..{self.high:g}"

    def holds(self, rate: PassRate) -> bool:
        return self.low <= rate.rate <= self.high


def measure(
    engine: Engine,
    prompts: Sequence[Prompt],
    reward: BoundReward,
    *,
    sampling: Sampling,
    rule: PassRule,
    seed: int,
    step: int,
    reward_timeout: float,
) -> list[PassRate]:
    """The pass rate of each prompt, of the completions that pass by ``rule``; one that cannot be scored does
    not count."""
    seeds = completion_seeds(prompts, sampling.group_size, seed=seed, step=step)
    groups = engine.generate(prompts, sampling, seeds=seeds)
    values = score_groups(groups, [reward], timeout=reward_timeout)[..., 0]  # [P, G]
    return [
        PassRate(
            group.prompt.id,
            passes=int(passes(row, rule).sum()),
            count=int((~row.isnan()).sum()),
            cut=sum(c.finish_reason == "length" for c in group.completions),
        )
        for group, row in zip(groups, values, strict=True)
    ]


@dataclass(frozen=True)
class Tally:
    """Prompts by difficulty. ``impossible`` ones, of the too hard, never passed."""

    kept: int
    too_easy: int
    too_hard: int
    impossible: int
    unscored: int
    pass_rate: float
    """The mean."""
    truncated: float
    """Share of the completions that were cut off."""

    @classmethod
    def of(cls, rates: Sequence[PassRate], band: Band, *, samples: int) -> Tally:
        """``samples`` completions were drawn for each."""
        scored = [rate.rate for rate in rates if rate.count]
        return cls(
            kept=sum(map(band.holds, rates)),
            too_easy=sum(rate > band.high for rate in scored),
            too_hard=sum(rate < band.low for rate in scored),
            impossible=sum(rate == 0 < band.low for rate in scored),
            unscored=len(rates) - len(scored),
            pass_rate=sum(scored) / len(scored) if scored else math.nan,
            truncated=sum(rate.cut for rate in rates) / (samples * len(rates)),
        )

    def describe(self, band: Band) -> str:
        """The counts in one line."""
        total = self.kept + self.too_easy + self.too_hard + self.unscored
        unscored = f", {self.unscored} that the reward cannot score" if self.unscored else ""
        return (
            f"{self.kept} of {total} prompts kept (pass rate in {band}), {self.too_easy} too easy, "
            f"{self.too_hard} too hard, of which {self.impossible} impossible (never passed){unscored}; "
            f"mean pass rate {self.pass_rate:.3g}"
        )

    def cure(self) -> str:
        """What to do where nothing is kept."""
        if self.unscored > self.too_easy + self.too_hard:
            return "The reward function abstains: look at the column it compares with."
        if self.too_easy > self.too_hard:
            return "They are too easy for this model: take harder prompts, or raise the highest pass rate."
        if self.truncated > 0.5:
            return (
                f"{self.truncated:.0%} of the completions were cut off before they answered: raise "
                "sampling.max_completion_length first."
            )
        return (
            "They are too hard for this model: take easier prompts, a better model (razona sft on worked "
            "answers is a start), or lower the lowest pass rate. If it should be able to, read completions "
            "(razona generate): perhaps the reward does not see the answer."
        )


class DifficultyFilter(PromptSource[Prompt]):
    """A source that skips the prompts which are too easy or too hard by their last measurement. The order of
    the others, and so what a checkpoint needs to hold of it, stays that of the whole."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        config: GRPOConfig,
        reward: BoundReward,
        console: Console,
    ) -> None:
        super().__init__(prompts, seed=config.run.seed, shuffle=config.data.shuffle)
        self.config, self.reward, self.console = config, reward, console
        self.options = config.objective.difficulty
        self.band = Band(self.options.min_pass_rate, self.options.max_pass_rate)
        self.left_out: frozenset[int] = frozenset()

    def describe(self) -> str:
        """What the run's header says of it."""
        every = self.options.filter_every
        when = f"before step 1 and every {every} steps" if every else "once, before step 1"
        return (
            f"filter: only prompts whose completions pass ({self.reward.name} above "
            f"{self.options.pass_above:g}) at a rate in {self.band}; {self.options.filter_samples} samples "
            f"of each of the {len(self.prompts)} prompts, {when}"
        )

    def take(self, n: int) -> list[Prompt]:
        """The next ``n`` prompts that are not left out."""
        taken: list[Prompt] = []
        while len(taken) < n:
            taken += [prompt for prompt in super().take(1) if prompt.id not in self.left_out]
        return taken

    def measure(self, engine: Engine, step: int) -> dict[str, float]:
        """Samples every prompt with the present weights and decides anew which are left out. DataError when
        all would be. Its seeds are not those of a step's own rollouts: chosen by one, evaluated by the other.
        """
        total, samples, config = len(self.prompts), self.options.filter_samples, self.config
        sampling = replace(config.sampling, group_size=samples)
        self.console.print(f"measuring the pass rates of {total} prompts, {samples} samples each")
        advance = self.console.progress_lines("pass rates", total)
        rates: list[PassRate] = []
        for first in range(0, total, CHUNK):
            rates += measure(
                engine,
                self.prompts[first : first + CHUNK],
                self.reward,
                sampling=sampling,
                rule=self.options,
                seed=config.run.seed,
                step=-2 - step,  # -1 is the held-out evaluation's
                reward_timeout=config.reward_timeout,
            )
            advance(len(rates) - first)
        tally = Tally.of(rates, self.band, samples=samples)
        self.console.print(f"before step {step + 1}: {tally.describe(self.band)}")
        if not tally.kept:
            raise DataError(
                f"Before step {step + 1} no prompt is of middle difficulty: {tally.describe(self.band)}. "
                f"{tally.cure()} The bounds are --min-pass-rate and --max-pass-rate."
            )
        self.left_out = frozenset(rate.prompt_id for rate in rates if not self.band.holds(rate))
        if tally.kept < config.prompts_per_step:
            self.console.note(
                f"{tally.kept} prompts are left and a step takes {config.prompts_per_step}: every step sees "
                "some of them more than once."
            )
        return {f"difficulty/{name}": float(value) for name, value in asdict(tally).items()}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "left_out": sorted(self.left_out)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.left_out = frozenset(state["left_out"])


def make_source(
    config: GRPOConfig, prompts: Sequence[Prompt], rewards: Sequence[BoundReward], console: Console
) -> PromptSource[Prompt]:
    """The prompts in the order of the run; of middle difficulty only where the configuration says so. Raises
    ConfigError where it cannot be told which reward says what passes."""
    options = config.objective.difficulty
    if not options.filters:
        return PromptSource(prompts, seed=config.run.seed, shuffle=config.data.shuffle)
    reward = pass_reward(rewards, options.pass_reward, option="objective.difficulty.pass-reward")
    source = DifficultyFilter(prompts, config, reward, console)
    console.print(source.describe())
    return source


def refilter(
    source: PromptSource[Prompt],
    engine: Engine,
    step: int,
    phases: Callable[[str], AbstractContextManager[Any]],
) -> dict[str, float]:
    """Measures a source of prompts of middle difficulty when that is due, and returns the figures of it."""
    if not isinstance(source, DifficultyFilter):
        return {}
    every = source.options.filter_every
    if step and (not every or step % every):
        return {}
    with phases("filter"):
        return source.measure(engine, step)
