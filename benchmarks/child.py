"""What the measured processes share: options, a clock that splits a step by phase, the line they print."""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from cases import CASES

PHASES = ("generate", "reward", "train", "optimizer")


@dataclass
class StepClock:
    """Seconds per step and phase. Phases may nest: the inner one's time is not the outer one's.

    Time outside every `phase` belongs to the optimizer: clipping, update, zeroing, and what the loop does
    around them.
    """

    steps: list[dict[str, float]] = field(default_factory=list)
    _phase: str = "optimizer"
    _since: float = 0.0

    def start_step(self) -> None:
        self.steps.append(dict.fromkeys(PHASES, 0.0))
        self._since = time.perf_counter()

    def end_step(self) -> None:
        self._switch(self._phase)
        self.steps[-1]["step"] = sum(self.steps[-1].values())

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        outer = self._phase
        self._switch(name)
        try:
            yield
        finally:
            self._switch(outer)

    def _switch(self, to: str) -> None:
        now = time.perf_counter()
        self.steps[-1][self._phase] += now - self._since
        self._phase, self._since = to, now


def arguments(*extra: str) -> argparse.Namespace:
    """Options of a measured process; `extra` names switches of its own."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, help="folder with the model and its tokenizer")
    parser.add_argument("--case", required=True, choices=sorted(CASES))
    parser.add_argument("--steps", type=int, required=True, help="measured steps, after one to warm up")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--lora", type=int, default=0, help="rank of a LoRA on all linear layers; 0: none")
    for name in extra:
        parser.add_argument(name, action="store_true")
    return parser.parse_args()


def report(clock: StepClock, prompt_tokens: list[int], completion_tokens: list[int]) -> None:
    """Print the measured steps, the lengths of the last step's prompts and completions, the peak in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    line = {
        "steps": clock.steps[1:],
        "prompt_tokens": sorted(prompt_tokens),
        "completion_tokens": sorted(completion_tokens),
        "peak_rss": peak,
    }
    print(json.dumps(line), flush=True)
