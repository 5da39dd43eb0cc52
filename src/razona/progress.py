"""Where a run stands: its step, its best checkpoint, how it is saved, resumed, interrupted and ended."""

from __future__ import annotations

import math
import signal
from collections.abc import Mapping
from types import FrameType
from typing import Any

from razona.checkpoint import load_checkpoint, newest_checkpoint, prune, save_checkpoint
from razona.config import GRPOConfig, SFTConfig
from razona.console import Console
from razona.log import RunFolder


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

    def judge(self, metrics: Mapping[str, float], name: str) -> None:
        """Remembers the step if ``metrics[name]`` is the highest so far: the first of equals, never a nan."""
        value = metrics[name]
        if not math.isnan(value) and (self.best_value is None or value > self.best_value):
            self.best_value, self.best_step = value, self.step

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "best_value": self.best_value, "best_step": self.best_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.best_value, self.best_step = state["step"], state["best_value"], state["best_step"]


class Interrupt:
    """Within it the first Ctrl-C only sets ``wanted``, so that a step ends and is saved; the second one is
    the usual.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.wanted = False
        self._former: Any = None

    def __enter__(self) -> Interrupt:
        try:
            self._former = signal.signal(signal.SIGINT, self._handle)
        except ValueError:  # not in the main thread, where signals do not arrive anyway
            self._former = None
        return self

    def __exit__(self, *_: object) -> None:
        if self._former is not None:
            signal.signal(signal.SIGINT, self._former)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.wanted:
            raise KeyboardInterrupt
        self.wanted = True
        self.console.note(
            "finishing this step, then saving. Ctrl-C again to stop at once (resume from the last save)."
        )


def open_run(config: GRPOConfig | SFTConfig, console: Console, *, model: str, fingerprint: str) -> RunFolder:
    """The run folder, with config.json written or, on resume, compared."""
    log = RunFolder(config.run.output_dir, resume=config.run.resume, overwrite=config.run.overwrite)
    if log.moved is not None:
        console.note(f"{config.run.output_dir} held a run; it is now {log.moved}")
    log.write_config(config, model=model, data_fingerprint=fingerprint)
    return log


def restore(log: RunFolder, state: Mapping[str, Any], console: Console) -> None:
    """Gives every object the state of the newest whole checkpoint, where there is one."""
    path, notices = newest_checkpoint(log.checkpoints)
    for notice in notices:
        console.note(notice)
    if path is not None:
        load_checkpoint(path, state)
        console.note(f"resumed from {path.name}")


def save_run(log: RunFolder, state: Mapping[str, Any], progress: Progress, *, keep: int) -> None:
    """A checkpoint named after the step; then old ones go, the best one apart."""
    save_checkpoint(log.checkpoints, _name(progress.step), state, meta={"step": progress.step})
    protected = [] if progress.best_step is None else [_name(progress.best_step)]
    prune(log.checkpoints, keep, protected)


def finish(log: RunFolder, progress: Progress, result: dict[str, Any], console: Console) -> dict[str, Any]:
    """Says where everything is; returns the result of the run."""
    log.close()
    console.print(f"{'stopped' if result['interrupted'] else 'done'} after step {progress.step}.")
    console.print(
        f"  model        {log.path / 'model'}  (transformers loads it; razona generate --model that folder)"
    )
    console.print(f"  figures      {log.path / 'metrics.jsonl'}, every completion in rollouts.jsonl")
    console.print(f"  checkpoints  {log.checkpoints}")
    if progress.best_step is not None:
        console.print(f"  best         {_name(progress.best_step)}, {progress.best_value:.4g}")
    if result["interrupted"]:
        console.print("go on with: the same command and --run.resume")
    return {**result, "run": str(log.path), "best_step": progress.best_step}


def _name(step: int) -> str:
    return f"step-{step:06d}"
