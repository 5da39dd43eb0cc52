"""What both trainers have around a run: the model, callbacks, the log, saving and uploading."""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import TrainerControl, TrainerState
from transformers.trainer_utils import TrainOutput

from razona.commands.push import CARD, open_repo, upload
from razona.errors import ConfigError
from razona.models.quant import write_record
from razona.models.save import declare_widest
from razona.report.card import model_card
from razona.run.console import Console
from razona.trl.arguments import Arguments
from razona.trl.checks import INSTEAD
from razona.trl.figures import eval_figures, mean_of, training_figures
from razona.trl.model import given_model
from razona.trl.run_folder import load_best, logged_steps, resumes
from razona.trl.translate import every

RESUME_HINT = "Resume with: trainer.train(resume_from_checkpoint=True)"
EVENTS_ASKED = ("should_save", "should_evaluate", "should_log", "should_epoch_stop")


class Trainer:
    """One model and the runs on it. ``state`` and ``control`` are those of transformers."""

    def __init__(
        self,
        model: Any,
        args: Arguments,
        *,
        processing_class: Any,
        callbacks: Sequence[Any] | None,
        peft_config: Any,
        console: Console | None,
    ) -> None:
        args.check()
        self.args = args
        self.console = console or Console()
        self.state = TrainerState()
        self.control = TrainerControl()
        self.callbacks = [
            callback() if isinstance(callback, type) else callback for callback in callbacks or ()
        ]
        loaded = given_model(model, processing_class, args, peft_config, self.console)
        self._loaded = replace(loaded, notices=())  # they are said, and need not be again in every run
        self._unlogged: list[dict[str, float]] = []
        self._losses: list[dict[str, float]] = []
        self._emit("on_init_end")

    @property
    def model(self) -> Any:
        """The trained model, in fp32 after training."""
        return self._loaded.model

    @property
    def processing_class(self) -> Any:
        return self._loaded.tokenizer

    def add_callback(self, callback: Any) -> None:
        """One more `transformers.TrainerCallback`, a class or an object."""
        self.callbacks.append(callback() if isinstance(callback, type) else callback)

    def remove_callback(self, callback: Any) -> None:
        """Takes one away again: the object, or every one of the class."""
        others = [c for c in self.callbacks if c is not callback and type(c) is not callback]
        if len(others) == len(self.callbacks):
            raise ConfigError(f"there is no callback {callback!r} to remove.")
        self.callbacks = others

    def log(self, logs: Mapping[str, float]) -> None:
        """One more entry in ``state.log_history``; callbacks hear it."""
        self._log(logs)

    def is_world_process_zero(self) -> bool:
        """True: there is one process."""
        return True

    def __getattr__(self, name: str) -> Any:
        known = INSTEAD.get(name)
        more = f": {known}." if known else ". docs/from-trl.md lists what there is."
        raise AttributeError(f"razona's {type(self).__name__} has no '{name}'{more}")

    def save_model(self, output_dir: str | None = None) -> None:
        """The model and its tokenizer or processor, for plain transformers; None: to ``args.output_dir``."""
        folder = Path(output_dir or self.args.output_dir)
        if (folder / "checkpoints").is_dir():
            raise ConfigError(
                f"{folder} is the folder of a run, with its own config.json. Give another folder."
            )
        self.model.save_pretrained(folder)
        if hasattr(self.model, "peft_config"):
            write_record(self.model, folder)
        else:
            declare_widest(self.model, folder)
        (self._loaded.processor or self._loaded.tokenizer).save_pretrained(folder)

    def push_to_hub(
        self,
        commit_message: str = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        *,
        dataset_name: str | None = None,
        tags: str | Sequence[str] | None = None,
    ) -> Any:
        """Uploads the model with its card to ``hub_model_id``, as `razona push` does, in one commit; returns
        huggingface_hub's CommitInfo. Raises HubError where the hub refuses it.
        """
        if not blocking:
            raise ConfigError("push_to_hub(blocking=False) is not supported: it uploads, then returns.")
        options = self._repo() | {name: v for name, v in (("token", token), ("revision", revision)) if v}
        with tempfile.TemporaryDirectory() as folder:
            self.save_model(folder)
            return upload(
                Path(folder),
                card=lambda repo: self._card(Path(folder), repo, dataset_name, tags),
                console=self.console,
                message=commit_message,
                **options,
            ).commit

    def create_model_card(
        self,
        model_name: str | None = None,
        dataset_name: str | None = None,
        tags: str | Sequence[str] | None = None,
    ) -> None:
        """Writes the card that `push_to_hub` uploads to ``args.output_dir``, as README.md."""
        folder, name = Path(self.args.output_dir), model_name or self._repo()["repo"]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CARD).write_text(self._card(folder, name, dataset_name, tags), encoding="utf-8")

    def _repo(self) -> dict[str, Any]:
        """Where an upload goes, as options of `razona.commands.push`."""
        args = self.args
        name = args.hub_model_id or Path(args.output_dir).absolute().name
        return {
            "repo": name,
            "private": args.hub_private_repo,
            "token": args.hub_token,
            "revision": args.hub_revision,
        }

    def _card(
        self, folder: Path, repo: str, dataset_name: str | None, tags: str | Sequence[str] | None
    ) -> str:
        """Made from the run of this trainer, where there was one."""
        run = self._run_folder if self.state.global_step else None
        return model_card(
            folder, run, repo,
            best=self.args.load_best_model_at_end and self.state.best_global_step is not None,
            tags=[tags] if isinstance(tags, str) else list(tags or ()),
            dataset=dataset_name or "", name=self._loaded.name,
        )  # fmt: skip

    # The course of a run.

    def _train(
        self,
        config: Any,
        run: Callable[[], dict[str, Any]],
        *,
        num_rows: int,
        per_step: int,
        rows_per_step: int,
    ) -> TrainOutput:
        """Runs, with the events around it; ``per_step`` updates are one step of the run."""
        args, steps = self.args, config.run.num_steps
        self._per_step, self._steps, self._save_every = per_step, steps, config.run.save_every
        self._per_epoch = max(1, num_rows // rows_per_step)
        self._log_every = every(args.logging_strategy, args.logging_steps, per_step, self._per_epoch, steps)
        self._first, self._to_report = True, False
        self._unlogged, self._losses = [], []
        self.control = TrainerControl()
        self.state = TrainerState(
            max_steps=steps * per_step,
            num_train_epochs=math.ceil(steps / self._per_epoch),
            logging_steps=args.logging_steps,
            train_batch_size=args.per_device_train_batch_size,
        )
        if args.push_to_hub:  # what would be refused is refused before the training, not after it
            open_repo(**self._repo())
        started = time.time()
        for event in ("on_train_begin", "on_epoch_begin", "on_step_begin"):
            self._emit(event)
        result = run()
        self._saved()
        loss = mean_of(self._losses).get("loss") or 0.0
        runtime, updates = time.time() - started, self.state.global_step
        metrics = {
            "train_runtime": runtime,
            "train_samples_per_second": updates * args.per_device_train_batch_size
            * args.gradient_accumulation_steps / runtime,
            "train_steps_per_second": updates / runtime,
            "train_loss": loss,
        }  # fmt: skip
        self._log(metrics)
        if args.load_best_model_at_end:
            load_best(self.model, Path(result["run"]) / "best")
        self._emit("on_train_end")
        if args.push_to_hub:
            self.push_to_hub()
        return TrainOutput(self.state.global_step, loss, metrics)

    def _on_step(self, step: int, metrics: Mapping[str, float], records: Sequence[Mapping[str, Any]]) -> bool:
        """The `OnStep` of a run: log and events. True where a callback wants the run to end."""
        if self._first:
            self._first = False
            self._replay(step)
        self._saved()
        self._log_step(step, metrics, records)
        ends = step == self._steps or self.control.should_training_stop
        if ends or step % self._per_epoch == 0:
            self._emit("on_epoch_end")
        self._to_report = ends or bool(self._save_every and step % self._save_every == 0)
        if not ends:
            if step % self._per_epoch == 0:
                self._emit("on_epoch_begin")
            self._emit("on_step_begin")
        return bool(self.control.should_training_stop)

    def _log_step(
        self, step: int, metrics: Mapping[str, float], records: Sequence[Mapping[str, Any]]
    ) -> None:
        """One step in the log."""
        self.state.global_step, self.state.epoch = step * self._per_step, step / self._per_epoch
        self._losses.append({"loss": metrics["loss"]})
        self.state.num_input_tokens_seen += int(metrics["tokens"] + metrics.get("prompt_tokens", 0))
        self._unlogged.append(training_figures(metrics, records) | self._extra_figures(step))
        self._emit("on_step_end")
        first = step == 1 and self.args.logging_first_step
        if self._log_every and (step % self._log_every == 0 or first):
            self._log(mean_of(self._unlogged) | {"num_tokens": float(self.state.num_input_tokens_seen)})
            self._unlogged = []
        if evaluated := eval_figures(metrics):
            self._log(evaluated)
            self._emit("on_evaluate", metrics=evaluated)
            self._update_best(evaluated)

    def _extra_figures(self, step: int) -> dict[str, float]:
        """Figures that are not the loop's."""
        return {}

    def _saved(self) -> None:
        """Fires for a checkpoint that was written after the last event."""
        if self._to_report:
            self._emit("on_save")
        self._to_report = False

    def _log(self, figures: Mapping[str, float | None]) -> None:
        entry = {**figures, "epoch": self.state.epoch, "step": self.state.global_step}
        self.state.log_history.append(entry)
        self._emit("on_log", logs=dict(figures))

    def _update_best(self, evaluated: Mapping[str, float]) -> None:
        """Remembers the best evaluation, as the run does."""
        metric = self.args.metric_for_best_model
        if metric is None:
            return
        value, best = (
            evaluated[metric if metric.startswith("eval_") else f"eval_{metric}"],
            self.state.best_metric,
        )
        if math.isnan(value):
            return
        if best is None or (value > best if self.args.greater_is_better else value < best):
            self.state.best_metric, self.state.best_global_step = value, self.state.global_step
            self.state.best_model_checkpoint = f"{self.args.output_dir}/run/best"

    def _replay(self, step: int) -> None:
        """On resume, the log of the steps before ``step``, without events."""
        callbacks, self.callbacks = self.callbacks, []
        for number, metrics, records in logged_steps(self._run_folder, before=step):
            self._log_step(number, metrics, records)
        self.callbacks = callbacks

    @property
    def _run_folder(self) -> Path:
        return Path(self.args.output_dir) / "run"

    def _resuming(self, resume_from_checkpoint: bool | str | os.PathLike[str] | None) -> bool:
        given = resume_from_checkpoint
        return resumes(self.args.resume_from_checkpoint if given is None else given, self._run_folder)

    def _emit(self, event: str, **more: Any) -> None:
        for callback in self.callbacks:
            answer = getattr(callback, event)(
                self.args, self.state, self.control,
                model=self.model, processing_class=self.processing_class, **more,
            )  # fmt: skip
            self.control = answer or self.control
            asked = [name for name in EVENTS_ASKED if getattr(self.control, name)]
            if asked:
                raise ConfigError(
                    f"the callback {type(callback).__name__} set control.{asked[0]} in {event}, and of "
                    "control only should_training_stop is supported. Set logging_steps, eval_steps and "
                    "save_steps instead."
                )
