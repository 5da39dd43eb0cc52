"""What every loop does around its steps: restore, evaluate, record, save, print, stop. The order is here.

A loop brings its arithmetic:

    with running(config, console, header=header, fingerprint=fingerprint) as log:
        with Steps("SFT", config.run, config.eval, log, state, evaluate, on_step, console) as steps:
            for step in steps:
                ...                           # with steps.phase("train"): times a part
                steps.end(metrics, records)
        return steps.result
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, cast

from razona.config import EvalConfig, GRPOConfig, RunConfig, SFTConfig
from razona.config.sft import SFTEvalConfig
from razona.errors import CheckpointError, DifficultyError, NotFinite, RazonaError
from razona.run.checkpoint import load_checkpoint, newest_checkpoint, prune, save_checkpoint
from razona.run.console import Console
from razona.run.folder import Phases, RunFolder
from razona.run.progress import Progress, due
from razona.run.signals import Signals
from razona.types import Stateful

RESUME_HINT = "Resume with: the same command and --run.resume"
NOT_FINITE_AGAIN = (
    "A resumed run would come to the same step again: start a new one from that model, with a lower "
    "optimizer.learning_rate, or --model.precision fp32. If it is the first step, look at the loss function "
    "and at the model's weights."
)

Records = Sequence[Mapping[str, Any]]
Evaluate = Callable[[], tuple[Mapping[str, float], Records]]
"""Gives held-out ``eval/...`` figures, and the completions they were measured on (SFT has none)."""

OnStep = Callable[[int, Mapping[str, float], Records], bool]
"""Called after every step with its number, figures and completions (see `rollout_records`; SFT has none).
True ends the run after this step, as Ctrl-C does: it is saved."""


def keep_going(step: int, metrics: Mapping[str, float], records: Records) -> bool:
    """The `OnStep` of a run that nobody listens to."""
    return False


class Trained(Stateful, Protocol):
    """What a run trains, as far as it is known here."""

    @property
    def updates(self) -> int:
        """Optimizer updates so far."""

    def save(self, folder: Path) -> Path:
        """Writes it as a model, whole or not at all."""


@contextmanager
def running(
    config: GRPOConfig | SFTConfig,
    console: Console,
    *,
    header: str,
    fingerprint: Mapping[str, Any],
    resume_hint: str = RESUME_HINT,
) -> Iterator[RunFolder]:
    """The open folder of a run, config.json written or, on resume, compared (``fingerprint``: see
    `RunFolder.write_config`). In the end the folder is closed, whatever happened.
    """
    run = config.run
    log = RunFolder(run.output_dir, resume=run.resume, overwrite=run.overwrite, resume_hint=resume_hint)
    if log.moved is not None:
        console.note(f"{run.output_dir} held a run; it is now {log.moved}")
    log.write_config(config, header=header, **fingerprint)
    try:
        yield log
        log.close()
    except BaseException:
        with suppress(OSError):  # a full disk is said once
            log.close()
        raise


class Steps:
    """The steps of a run that are still to do: iterate over it, and `end` each one.

    ``state`` is what a checkpoint holds, by name; its ``policy`` is what is saved as the model. Entered, it
    gives each its state back where the run is resumed. However it is left, ``model`` in the run folder then
    holds the weights of the last finished update, and what raised says which these are.
    """

    def __init__(
        self,
        title: str,
        run: RunConfig,
        evaluation: EvalConfig | SFTEvalConfig,
        log: RunFolder,
        state: Mapping[str, Stateful],
        evaluate: Evaluate | None,
        on_step: OnStep,
        console: Console,
    ) -> None:
        self.title, self.run, self.log, self.console = title, run, log, console
        self.every, self.best_metric = evaluation.every, evaluation.best_metric or "eval/reward"
        self.evaluate, self.on_step = evaluate, on_step
        self.progress = Progress()
        self.policy = cast(Trained, state["policy"])
        self.state = {**state, "log": log, "progress": self.progress}
        self.phase = Phases()
        self.metrics: Mapping[str, float] = {}
        self._signals = Signals(console)
        self._stopping = False
        self._stack = ExitStack()

    def __enter__(self) -> Steps:
        restore(self.log, self.state, self.console)
        self._begin()
        self._stack.enter_context(self._signals)
        self._stack.push(self._close)  # without the progress bar, and still safe from a first signal
        bar = self.console.progress(self.title, self.run.num_steps, self.progress.step)
        self._advance = self._stack.enter_context(bar)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, where)

    def __iter__(self) -> Iterator[int]:
        """The numbers of the steps, from 0; or from where the run was."""
        while self.progress.step < self.run.num_steps and not self._stopping:
            self._begin()
            yield self._step
            assert self.progress.step == self._step + 1, "the loop did not end this step: steps.end(metrics)"

    def _begin(self) -> None:
        self._step, self._updates = self.progress.step, self.policy.updates

    def end(self, metrics: Mapping[str, float], records: Records = ()) -> None:
        """What follows the last update of a step, whatever the loop; ``records`` are its completions."""
        self.progress.step += 1
        step, last = self.progress.step, self.progress.step == self.run.num_steps
        held_out: Records = ()
        if self.evaluate is not None and (last or due(step, self.every)):
            with self.phase("eval"):
                figures, held_out = self.evaluate()
            metrics = {**metrics, **figures}
            self.progress.update_best(metrics, self.best_metric, lower=self.best_metric == "eval/loss")
        self.metrics = metrics
        self.log.log(step, metrics)
        self.log.log_rollouts(records)
        # Asked once: what stops here is saved here.
        self._stopping = bool(self.on_step(step, metrics, records) or last or self._signals.received)
        seconds = self.phase.pop()
        self.log.log_timings(step, seconds)  # before the checkpoint, which says where the file ends
        if self._stopping or self.progress.is_best or due(step, self.run.save_every):
            with self.phase("checkpoint"):
                self._save()
        if held_out:
            self.console.samples(f"step {step}: held-out completions", held_out[:3])
        self.console.metrics(step, self.run.num_steps, {**metrics, "seconds": sum(seconds.values())})
        if records and due(step, self.run.print_every):
            alike = [record for record in records if record["prompt_id"] == records[0]["prompt_id"]]
            self.console.samples(f"step {step}: completions of one prompt", alike[:3])
        self._advance()

    @property
    def result(self) -> dict[str, Any]:
        """The last step's figures, and how the run ended: the signal's name where one ended it."""
        interrupted = self.progress.step < self.run.num_steps
        return {
            **self.metrics,
            "step": self.progress.step,
            "interrupted": interrupted,
            "signal": self._signals.received if interrupted else None,
            "run": str(self.log.path),
            "best_step": self.progress.best_step,
        }

    def _save(self) -> None:
        """A checkpoint named after the step, and the model in ``best`` where it is the best; then old
        checkpoints go, the best one apart."""
        progress, folder = self.progress, self.log.checkpoints
        if progress.is_best:  # first: a run killed in between comes to this step again
            self.policy.save(self.log.path / "best")
        save_checkpoint(folder, _name(progress.step), self.state, meta={"step": progress.step})
        protected = [] if progress.best_step is None else [_name(progress.best_step)]
        prune(folder, self.run.keep_checkpoints, protected)

    def _close(self, _: object, error: BaseException | None, where: object) -> None:
        """Saves the model. Says where everything is; after an error, in it, what is kept."""
        if error is None:
            self.policy.save(self.log.path / "model")
            self._say_where_it_is()
            return
        kept = self._what_is_kept(error)
        if isinstance(error, SystemExit):  # exit code 0 would look like a run that has ended
            raise RazonaError(
                f"step {self._step + 1}: {_place(error)} ended the program (SystemExit: {error.code}). Raise "
                f"an error instead, or return True from on_step to end a run after a step. {kept}"
            ) from error
        if isinstance(error, RazonaError):
            error.args = (f"step {self._step + 1}: {str(error).rstrip('.')}. {kept}",)
        elif hasattr(error, "add_note"):
            error.add_note(f"step {self._step + 1}: {kept}")
        else:  # Python 3.10
            self.console.note(f"step {self._step + 1}: {kept}")

    def _what_is_kept(self, error: BaseException) -> str:
        """Saves the model. Says of which update it is, which checkpoint is the newest, and how to go on."""
        done = self.policy.updates - self._updates
        weights = "The weights before it"
        if self.progress.step > self._step:
            weights = "The weights after it"
        elif done and not isinstance(error, NotFinite):  # which is before the update that it is about
            weights = f"The weights after {done} update{'s' if done > 1 else ''} of it"
        try:
            kept = f"{weights} are in {self.policy.save(self.log.path / 'model')}"
        except (OSError, RuntimeError, RazonaError) as failure:  # the disk is full
            kept = f"{weights} could not be saved ({failure})"
        path, _ = newest_checkpoint(self.log.checkpoints)
        kept += f"; the newest checkpoint is {path}." if path else "; there is no checkpoint yet."
        if isinstance(error, NotFinite):
            return f"{kept} {NOT_FINITE_AGAIN}"
        return (
            kept if path is None or isinstance(error, DifficultyError) else f"{kept} {self.log.resume_hint}"
        )

    def _say_where_it_is(self) -> None:
        progress, path, say = self.progress, self.log.path, self.console.print
        interrupted, name = self.result["interrupted"], self.result["signal"]
        by = f" by {name}" if name else ""
        say(f"{'stopped' if interrupted else 'done'}{by} after step {progress.step}.")
        say(f"  model        {path / 'model'}  (transformers loads it; razona generate --model that folder)")
        say(f"  figures      {path / 'metrics.jsonl'}, every completion in rollouts.jsonl")
        say(f"  checkpoints  {self.log.checkpoints}")
        if progress.best_step is not None:
            say(f"  best         {path / 'best'}, of step {progress.best_step} ({progress.best_value:.4g})")
        if interrupted:
            say(self.log.resume_hint)


def restore(log: RunFolder, state: Mapping[str, Stateful], console: Console) -> None:
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


def _name(step: int) -> str:
    return f"step-{step:06d}"


def _place(error: BaseException) -> str:
    """The function that raised, with its file and line."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.name} ({frame.filename}, line {frame.lineno})"
