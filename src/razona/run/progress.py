"""Where a run stands: its step, its best checkpoint, how it is saved, resumed, interrupted and ended."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from razona.config import GRPOConfig, SFTConfig
from razona.errors import CheckpointError, DifficultyError, NotFinite
from razona.policy import Policy
from razona.run.checkpoint import load_checkpoint, newest_checkpoint, prune, save_checkpoint
from razona.run.console import Console
from razona.run.folder import RunFolder

RESUME_HINT = "Resume with: the same command and --run.resume"
ZERO_STD_NOTE_STEPS = 10

OnStep = Callable[[int, Mapping[str, float], Sequence[Mapping[str, Any]]], bool]
"""Called after every step with its number, figures and completions (see `rollout_records`; SFT has none).
True ends the run after this step, as Ctrl-C does: it is saved."""


def keep_going(step: int, metrics: Mapping[str, float], records: Sequence[Mapping[str, Any]]) -> bool:
    """The `OnStep` of a run that nobody listens to."""
    return False


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
            "finishing this step, then saving. Ctrl-C again stops at once, and leaves the last save as it is."
        )


@contextmanager
def keeping_the_weights(log: RunFolder, progress: Progress, policy: Policy) -> Iterator[None]:
    """What ends a run from within, a loss or gradient that is not finite or prompts that teach nothing, says
    the step and what is kept. The weights, which are those before it, are written to ``model``.
    """
    try:
        yield
    except (NotFinite, DifficultyError) as error:
        model = policy.save(log.path / "model")
        path, _ = newest_checkpoint(log.checkpoints)
        kept = f"the newest checkpoint is {path}" if path else "there is no checkpoint yet"
        again = (
            " A resumed run would come to the same step again: start a new one from that model, with a lower "
            "optimizer.learning_rate, or --model.precision fp32. If it is the first step, look at the loss "
            "function and at the model's weights."
        )
        raise type(error)(
            f"step {progress.step + 1}: {str(error).rstrip('.')}. The weights before it are in {model}; "
            f"{kept}.{again if isinstance(error, NotFinite) else ''}"
        ) from error


class ZeroStdNote:
    """Says that a step's rewards taught nothing: at most once in ``ZERO_STD_NOTE_STEPS`` steps."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.said: int | None = None

    def __call__(self, step: int, metrics: Mapping[str, float]) -> None:
        if metrics["frac_zero_std"] < 1 or (self.said is not None and step - self.said < ZERO_STD_NOTE_STEPS):
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


def open_run(config: GRPOConfig | SFTConfig, console: Console, **fingerprint: Any) -> RunFolder:
    """The run folder, with config.json written or, on resume, compared; ``fingerprint``: see
    `RunFolder.write_config`.
    """
    log = RunFolder(config.run.output_dir, resume=config.run.resume, overwrite=config.run.overwrite)
    if log.moved is not None:
        console.note(f"{config.run.output_dir} held a run; it is now {log.moved}")
    log.write_config(config, **fingerprint)
    return log


def restore(log: RunFolder, state: Mapping[str, Any], console: Console) -> None:
    """On resume, gives every object the state of the newest whole checkpoint. CheckpointError where there is
    none, but records of steps, which starting over would wipe.
    """
    if not log.resume:
        return
    path, notices = newest_checkpoint(log.checkpoints)
    if path is None and log.recorded_steps:
        raise CheckpointError(
            f"{log.path} holds the records of {log.recorded_steps} steps and no checkpoint to resume from: "
            f"{' '.join(notices) or 'none was written.'} Start anew with --run.overwrite, which moves this "
            "run aside, or give another --run.output-dir. --run.save-every writes checkpoints on the way."
        )
    for notice in notices:
        console.note(notice)
    if path is None:
        console.note(f"nothing to resume in {log.path}: starting at step 0")
        return
    load_checkpoint(path, state)
    console.note(f"resumed from {path.name}")


def save_run(log: RunFolder, state: Mapping[str, Any], progress: Progress, *, keep: int) -> None:
    """A checkpoint named after the step, and the model in ``best`` where it is the best; then old checkpoints
    go, the best one apart."""
    if progress.is_best:  # first: a run killed in between comes to this step again
        policy: Policy = state["policy"]
        policy.save(log.path / "best")
    save_checkpoint(log.checkpoints, _name(progress.step), state, meta={"step": progress.step})
    protected = [] if progress.best_step is None else [_name(progress.best_step)]
    prune(log.checkpoints, keep, protected)


def finish(
    log: RunFolder,
    progress: Progress,
    result: dict[str, Any],
    console: Console,
    *,
    resume_hint: str = RESUME_HINT,
) -> dict[str, Any]:
    """Says where everything is, and ``resume_hint`` when interrupted; returns the result of the run."""
    log.close()
    console.print(f"{'stopped' if result['interrupted'] else 'done'} after step {progress.step}.")
    console.print(
        f"  model        {log.path / 'model'}  (transformers loads it; razona generate --model that folder)"
    )
    console.print(f"  figures      {log.path / 'metrics.jsonl'}, every completion in rollouts.jsonl")
    console.print(f"  checkpoints  {log.checkpoints}")
    if progress.best_step is not None:
        console.print(
            f"  best         {log.path / 'best'}, of step {progress.best_step} ({progress.best_value:.4g})"
        )
    if result["interrupted"]:
        console.print(resume_hint)
    return {**result, "run": str(log.path), "best_step": progress.best_step}


def _name(step: int) -> str:
    return f"step-{step:06d}"
