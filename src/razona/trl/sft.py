"""TRL's SFTTrainer: its fields become razona's configuration, its arguments those of one run."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from transformers.trainer_utils import TrainOutput

from razona.build.model import make_policy
from razona.config import SFTConfig as Config
from razona.data import load_rows
from razona.errors import DataError
from razona.run.console import Console
from razona.train import sft
from razona.trl.args import SFTConfig
from razona.trl.base import RESUME_HINT, Trainer
from razona.trl.checks import check_args, check_evaluation, check_names
from razona.trl.fields import TRL_VERSION
from razona.trl.figures import eval_figures
from razona.trl.translate import sft_config

REFUSED = {
    "optimizer_cls_and_kwargs": "is not supported: the optimizer is AdamW. Leave it out",
    "data_collator": "is not supported: rows are packed as they are. Leave it out",
    "compute_loss_func": "is not supported: the loss is nll. Leave it out",
    "compute_metrics": "is not supported. Leave it out, and read eval_loss of evaluate()",
    "preprocess_logits_for_metrics": "is not supported: logits of a whole batch are never made. Leave it out",
    "formatting_func": "is not supported. Map your rows to columns prompt and completion, or messages",
}


class SFTTrainer(Trainer):
    """Trains ``model``, a name or a transformers model, on ``train_dataset``: columns ``prompt`` and
    ``completion``, of which the completion is trained; or ``messages``, of which the assistant's turns are;
    or ``text``, which is trained whole.
    """

    args: SFTConfig

    def __init__(
        self,
        model: Any,
        args: SFTConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        callbacks: Sequence[Any] | None = None,
        peft_config: Any = None,
        console: Console | None = None,
        **others: Any,
    ) -> None:
        check_names("SFTTrainer", others, REFUSED)
        args = SFTConfig() if args is None else args
        check_args(args, SFTConfig)
        if train_dataset is None:
            raise DataError("SFTTrainer without train_dataset: there is nothing to imitate. Give rows.")
        check_evaluation(args, eval_dataset)
        self.train_dataset, self.eval_dataset = load_rows(train_dataset), eval_dataset
        super().__init__(
            model,
            args,
            processing_class=processing_class,
            callbacks=callbacks,
            peft_config=peft_config,
            console=console,
        )

    def train(self, resume_from_checkpoint: bool | str | os.PathLike[str] | None = None) -> TrainOutput:
        """One run. True, or the path of the newest checkpoint, resumes the one in ``output_dir``."""
        self.args.check()
        config = self._config(resume=self._resuming(resume_from_checkpoint))
        self.console.print(f"razona.trl: {self.args!r}, and the rest as in TRL {TRL_VERSION}")
        return self._train(
            config,
            lambda: sft.run(
                config,
                console=self.console,
                rows=self.train_dataset,
                eval_rows=self.eval_dataset if self.args.eval_strategy != "no" else None,
                model=self._loaded,
                on_step=self._on_step,
                resume_hint=RESUME_HINT,
            ),
            num_rows=len(self.train_dataset),
            per_step=1,
            rows_per_step=config.rows_per_step,
        )

    def evaluate(self, eval_dataset: Any = None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """Mean loss, token accuracy and entropy over the trained tokens of held-out rows; they go to the log
        too.
        """
        rows = self.eval_dataset if eval_dataset is None else eval_dataset
        if rows is None:
            raise DataError(
                "evaluate() without eval_dataset: there is nothing to evaluate on. Give held-out rows."
            )
        if isinstance(rows, Mapping):  # several data sets, each under its name
            parts = [self.evaluate(part, f"{metric_key_prefix}_{name}") for name, part in rows.items()]
            return {name: value for part in parts for name, value in part.items()}
        config = self._config(resume=False)
        evaluator = sft.make_evaluator(config, self._loaded, load_rows(rows), self.console)
        assert evaluator is not None
        policy = make_policy(self._loaded, config.model, config.optimizer, total_updates=1)
        try:
            figures = eval_figures(evaluator(policy), metric_key_prefix)
        finally:
            policy.release()
        self._log(figures)
        self._emit("on_evaluate", metrics=figures)
        return figures

    def _config(self, *, resume: bool) -> Config:
        config = sft_config(
            self.args,
            num_rows=len(self.train_dataset),
            resume=resume,
            evaluates=self.args.eval_strategy != "no",
        )
        return replace(config, model=replace(config.model, name=self._loaded.name))
