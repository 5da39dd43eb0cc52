"""TRL's SFTTrainer: its fields become razona's configuration, its arguments those of one run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers.trainer_utils import TrainOutput

from razona.batch import collate_demonstrations, needed
from razona.config import SFTConfig as Config
from razona.console import Console
from razona.data import Rows, build_demonstrations, load_rows
from razona.errors import DataError
from razona.losses.supervised import negative_log_likelihood
from razona.losses.weights import masked_sum, per_token
from razona.setup import make_policy
from razona.train import sft
from razona.trl.args import SFTConfig
from razona.trl.base import Trainer, check_names
from razona.trl.fields import TRL_VERSION
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
    """Trains ``model``, a name or a transformers model, on the answers in ``train_dataset``: columns
    ``prompt`` and ``completion``, or ``messages``, of which the assistant's turns are trained.
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
        if train_dataset is None:
            raise DataError("SFTTrainer without train_dataset: there is nothing to imitate. Give rows.")
        self.train_dataset, self.eval_dataset = _rows(train_dataset), eval_dataset
        super().__init__(
            model,
            args,
            processing_class=processing_class,
            callbacks=callbacks,
            peft_config=peft_config,
            console=console,
        )

    def train(self, resume_from_checkpoint: bool | str | os.PathLike[str] | None = None) -> TrainOutput:
        """One run. True, or the path of the newest checkpoint, goes on with the one in ``output_dir``."""
        config = self._config(resume=self._resuming(resume_from_checkpoint))
        self.console.print(f"razona.trl: {self.args!r}, and the rest as in TRL {TRL_VERSION}")
        return self._train(
            config,
            lambda: sft.run(
                config,
                console=self.console,
                rows=self.train_dataset,
                model=self._loaded,
                on_step=self._on_step,
            ),
            num_rows=len(self.train_dataset),
            per_step=1,
            rows_per_step=config.rows_per_step,
        )

    @torch.no_grad()
    def evaluate(self, eval_dataset: Any = None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """Mean loss over the trained tokens of held-out rows; it goes to the log too."""
        rows = self.eval_dataset if eval_dataset is None else eval_dataset
        if rows is None:
            raise DataError(
                "evaluate() without eval_dataset: there is nothing to evaluate on. Give held-out rows."
            )
        config = self._config(resume=False)
        found = build_demonstrations(
            _rows(rows),
            self.processing_class,
            config.data,
            max_length=config.max_length,
            stop_token_ids=self._loaded.stop_token_ids,
        )
        policy = make_policy(self._loaded, config.model, config.optimizer, total_updates=1)
        batch = collate_demonstrations([(d.token_ids, d.loss_mask) for d in found.demonstrations])
        loss = 0.0
        try:
            for micro in batch.to(policy.device).weighted(per_token).split(config.tokens_per_microbatch):
                logprobs = policy.logprobs(micro, temperature=1.0)
                loss += masked_sum(
                    negative_log_likelihood(logprobs, micro.loss_mask), needed(micro.weights)
                ).item()
        finally:
            policy.release()
        figures = {f"{metric_key_prefix}_loss": loss}
        self._log(figures)
        self._emit("on_evaluate", metrics=figures)
        return figures

    def _config(self, *, resume: bool) -> Config:
        config = sft_config(self.args, num_rows=len(self.train_dataset), resume=resume)
        return replace(config, model=replace(config.model, name=self._loaded.name))


def _rows(data: Any) -> Rows:
    rows = load_rows(data)
    if "text" in rows.columns and not {"messages", "completion"} & set(rows.columns):
        raise DataError(
            f"{rows.name} has a column 'text', plain text without a prompt, and only answers are trained. "
            "Give columns prompt and completion, or messages."
        )
    return rows
