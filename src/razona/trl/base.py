"""What both trainers have around a run: the model, callbacks, the log, saving and uploading."""

from __future__ import annotations

import json
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

from razona.checkpoint import newest_checkpoint
from razona.config import LoRAConfig
from razona.console import Console
from razona.errors import CheckpointError, ConfigError, ModelError
from razona.models import LoadedModel, hand_in
from razona.models.quant import write_record
from razona.setup import load_model, or_bundled
from razona.trl.args import Arguments
from razona.trl.figures import eval_figures, mean_of, training_figures
from razona.trl.translate import every, model_config

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
        self._loaded = given_model(model, processing_class, args, peft_config, self.console)
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
        (self._loaded.processor or self._loaded.tokenizer).save_pretrained(folder)

    def push_to_hub(self, commit_message: str = "Model trained with razona", **options: Any) -> Any:
        """Uploads the model to ``hub_model_id``; returns what huggingface_hub's upload does. ``options`` are
        those of `huggingface_hub.HfApi.upload_folder`.
        """
        from huggingface_hub import HfApi

        args, api = self.args, HfApi(token=self.args.hub_token)
        name = args.hub_model_id or Path(args.output_dir).absolute().name
        repo = api.create_repo(name, private=args.hub_private_repo, exist_ok=True).repo_id
        with tempfile.TemporaryDirectory() as folder:
            self.save_model(folder)
            options = {"revision": args.hub_revision, **options}
            return api.upload_folder(
                repo_id=repo, folder_path=folder, commit_message=commit_message, **options
            )

    # What a run tells.

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
        started = time.time()
        for event in ("on_train_begin", "on_epoch_begin", "on_step_begin"):
            self._emit(event)
        result = run()
        self._saved()
        loss = mean_of(self._losses).get("loss") or 0.0
        metrics = {"train_runtime": time.time() - started, "train_loss": loss}
        self._log(metrics)
        if args.load_best_model_at_end:
            self._load_best(Path(result["run"]))
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
        self._note(step, metrics, records)
        ends = step == self._steps or self.control.should_training_stop
        if ends or step % self._per_epoch == 0:
            self._emit("on_epoch_end")
        self._to_report = ends or bool(self._save_every and step % self._save_every == 0)
        if not ends:
            if step % self._per_epoch == 0:
                self._emit("on_epoch_begin")
            self._emit("on_step_begin")
        return bool(self.control.should_training_stop)

    def _note(self, step: int, metrics: Mapping[str, float], records: Sequence[Mapping[str, Any]]) -> None:
        """One step in the log."""
        self.state.global_step, self.state.epoch = step * self._per_step, step / self._per_epoch
        self._losses.append({"loss": metrics["loss"]})
        self._unlogged.append(training_figures(metrics, records) | self._extra_figures(step))
        self._emit("on_step_end")
        first = step == 1 and self.args.logging_first_step
        if self._log_every and (step % self._log_every == 0 or first):
            self._log(mean_of(self._unlogged))
            self._unlogged = []
        if evaluated := eval_figures(metrics):
            self._log(evaluated)
            self._emit("on_evaluate", metrics=evaluated)
            self._judge(evaluated)

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

    def _judge(self, evaluated: Mapping[str, float]) -> None:
        """Remembers the best evaluation, as the run does."""
        metric = self.args.metric_for_best_model
        if metric is None:
            return
        value = evaluated[metric if metric.startswith("eval_") else f"eval_{metric}"]
        if self.state.best_metric is None or value > self.state.best_metric:
            self.state.best_metric, self.state.best_global_step = value, self.state.global_step
            self.state.best_model_checkpoint = f"{self.args.output_dir}/run/best"

    def _replay(self, step: int) -> None:
        """On resume, the log of the steps before ``step``, from the files of the run, without events."""
        if step == 1:
            return
        folder = Path(self.args.output_dir) / "run"
        by_step: dict[int, list[dict[str, Any]]] = {}
        if (folder / "rollouts.jsonl").exists():
            for record in _lines(folder / "rollouts.jsonl"):
                by_step.setdefault(record["step"], []).append(record)
        callbacks, self.callbacks = self.callbacks, []
        for line in _lines(folder / "metrics.jsonl"):
            if (number := line.pop("step")) < step:
                self._note(number, line, by_step.get(number, ()))
        self.callbacks = callbacks

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

    def _load_best(self, run: Path) -> None:
        from transformers import AutoModelForCausalLM

        if (run / "best").is_dir():
            best = AutoModelForCausalLM.from_pretrained(run / "best", dtype="auto")
            self.model.load_state_dict(best.state_dict())

    def _resuming(self, resume_from_checkpoint: bool | str | os.PathLike[str] | None) -> bool:
        """Whether to go on; a path must be that of the newest checkpoint of ``output_dir``, or above it."""
        if resume_from_checkpoint is None:
            resume_from_checkpoint = self.args.resume_from_checkpoint
        if not resume_from_checkpoint:
            return False
        run = Path(self.args.output_dir).absolute() / "run"
        newest, _ = newest_checkpoint(run / "checkpoints")
        if newest is None:
            raise CheckpointError(
                f"resume_from_checkpoint={resume_from_checkpoint!r}: {run} holds no checkpoint. Leave it "
                "out to start anew, or set output_dir to that of the run to go on with."
            )
        if resume_from_checkpoint is not True:
            path = Path(resume_from_checkpoint).absolute()
            if path not in (newest, *newest.parents[:3]):
                raise CheckpointError(
                    f"resume_from_checkpoint={str(resume_from_checkpoint)!r} is not the newest checkpoint, "
                    f"{newest}. A run goes on from its newest one: pass True, or delete the later ones."
                )
        return True


def given_model(
    model: Any, processing_class: Any, args: Arguments, peft_config: Any, console: Console
) -> LoadedModel:
    """The model by name or as an object, with its tokenizer, and with an adapter where one is asked for."""
    config = replace(model_config(args), name=model) if isinstance(model, str) else model_config(args)
    if isinstance(model, str):
        lora = _lora(peft_config, args)
        loaded = or_bundled(
            lambda name: load_model(replace(config, name=name), console, **lora), config.name, console
        )
        return loaded if processing_class is None else hand_in(loaded.model, processing_class, loaded.name)
    name = str(getattr(model.config, "_name_or_path", "") or "handed in")
    if processing_class is None:
        from transformers import AutoTokenizer

        try:
            processing_class = AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError) as error:
            raise ModelError(
                "a model object without processing_class, and there is no tokenizer under its name "
                f"'{name}'. Pass processing_class=tokenizer."
            ) from error
    return load_model(
        config, console, given=hand_in(model, processing_class, name), **_lora(peft_config, args)
    )


def _lora(peft_config: Any, args: Arguments) -> dict[str, Any]:
    """``peft_config`` as options of `load_model`."""
    if peft_config is None:
        return {}
    for name, off in LORA_OFF.items():
        if (value := getattr(peft_config, name, off)) != off:
            raise ConfigError(f"peft_config.{name} = {value!r} is not supported. Leave it at {off!r}.")
    targets = peft_config.target_modules
    if isinstance(targets, str) and targets != "all-linear":
        raise ConfigError(
            f"peft_config.target_modules = {targets!r} is a pattern. Give a list of layer names."
        )
    names = () if targets == "all-linear" else tuple(sorted(targets or PEFT_TARGETS))
    options = {"alpha": peft_config.lora_alpha, "rslora": peft_config.use_rslora, "target_modules": names}
    return {"lora": LoRAConfig(r=peft_config.r, **options), "seed": args.seed}


PEFT_TARGETS = ("q_proj", "v_proj")  # what peft takes for Llama and its kin where none are named
LORA_OFF: dict[str, Any] = {
    "bias": "none",
    "modules_to_save": None,
    "use_dora": False,
    "init_lora_weights": True,
    "layers_to_transform": None,
    "exclude_modules": None,
    "rank_pattern": {},
    "alpha_pattern": {},
}
"""Options of `peft.LoraConfig` that have no place here. Dropout is off in any case."""


def check_names(trainer: str, given: Mapping[str, Any], why: Mapping[str, str]) -> None:
    """ConfigError for keywords that the trainer does not have, and for those it has, but that cannot work."""
    for name, value in given.items():
        if name not in why:
            raise TypeError(f"{trainer} has no argument '{name}'")
        if value is not None and value != (None, None) and value != []:
            raise ConfigError(f"{trainer}({name}=...) {why[name]}.")


def _lines(path: Path) -> list[dict[str, Any]]:
    """A JSONL file of a run; null is nan, as it was before it was written."""

    def number(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        return {key: math.nan if value is None else value for key, value in pairs}

    return [
        json.loads(line, object_pairs_hook=number) for line in path.read_text(encoding="utf-8").splitlines()
    ]
