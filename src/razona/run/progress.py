"""How far a run is: its step, and its best one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


class Progress:
    """Steps done, and the best value of the held-out metric with the step it was reached at."""

    def __init__(self) -> None:
        self.step = 0
        self.best_value: float | None = None
        self.best_step: int | None = None

    @property
    def is_best(self) -> bool:
        """The present step is the best so far."""
        return self.best_step is not None and self.best_step == self.step

    def update_best(self, metrics: Mapping[str, float], name: str, *, lower: bool = False) -> None:
        """Remembers the step if ``metrics[name]`` is the highest so far, or the lowest: the first of equals,
        never a nan.
        """
        value, best = metrics[name], self.best_value
        if not math.isnan(value) and (best is None or (value < best if lower else value > best)):
            self.best_value, self.best_step = value, self.step

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "best_value": self.best_value, "best_step": self.best_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.best_value, self.best_step = state["step"], state["best_value"], state["best_step"]


def due(step: int, every: int) -> bool:
    """Whether what happens ``every`` so many steps does at ``step``; 0: never."""
    return every > 0 and step % every == 0
