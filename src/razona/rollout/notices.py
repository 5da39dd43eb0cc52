"""What a user should know about a step that taught nothing."""

from __future__ import annotations

from collections.abc import Mapping

from razona.run.console import Console

NOTHING_TRAINED = (
    "every completion was cut off, and the overlong filter takes their loss: nothing was trained. Raise "
    "sampling.max_completion_length, or check that the model's stop tokens are the right ones."
)
ZERO_STD_EVERY = 10


class NothingLearned:
    """Says of a step that it trained nothing; or that its rewards taught nothing, which it says at most once
    in ``ZERO_STD_EVERY`` steps.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.said: int | None = None

    def __call__(self, step: int, metrics: Mapping[str, float]) -> None:
        if not metrics["trained_tokens"]:
            self.console.note(f"step {step}: {NOTHING_TRAINED}")
            return
        if metrics["frac_zero_std"] < 1 or (self.said is not None and step - self.said < ZERO_STD_EVERY):
            return
        self.said = step
        cut = metrics["truncated"] == 1
        cause = (
            "Every completion was cut off: raise sampling.max_completion_length, or see whether the model "
            "ever ends its answers."
            if cut
            else "If this goes on, read completions in rollouts.jsonl: is it a reward that cannot see "
            "the answer, a task too hard or too easy, or are the completions all alike?"
        )
        self.console.note(
            f"step {step}: in every group all rewards are equal (mean {metrics['reward']:.4g}), so no "
            f"completion is better than another and the rewards teach nothing. {cause}"
        )
