"""TRL's GRPOTrainer: its fields become razona's configuration, its arguments those of one run."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers.trainer_utils import TrainOutput

from razona.build.model import make_engine, make_policy
from razona.build.objective import make_evaluator
from razona.config import ModelConfig
from razona.data import load_rows
from razona.errors import ConfigError, DataError
from razona.run.console import Console
from razona.run.folder import json_line
from razona.train import grpo
from razona.trl.args import GRPOConfig
from razona.trl.base import RESUME_HINT, Trainer
from razona.trl.batch_sizes import updates_per_rollout
from razona.trl.checks import check_args, check_evaluation, check_names
from razona.trl.fields import TRL_VERSION
from razona.trl.figures import eval_figures
from razona.trl.rewards import RewardLogs, reward_functions
from razona.trl.translate import grpo_config

REFUSED = {
    "tools": "is not supported: completions call no tools. Leave it out",
    "rollout_func": "is not supported: the trained model itself samples. Leave it out",
    "environment_factory": "is not supported: completions are one turn. Leave it out",
    "compute_metrics": "is not there in TRL either. Give a reward function, with weight 0 in reward_weights",
}


class GRPOTrainer(Trainer):
    """Trains ``model``, a name or a transformers model, with ``reward_funcs`` on prompts.

    ``reward_funcs``: functions, names or models of sequence classifiers, one or a list of these.
    """

    args: GRPOConfig

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: Sequence[Any] | None = None,
        peft_config: Any = None,
        console: Console | None = None,
        **others: Any,
    ) -> None:
        check_names("GRPOTrainer", others, REFUSED)
        args = GRPOConfig() if args is None else args
        check_args(args, GRPOConfig)
        if reward_funcs is None or reward_funcs == []:
            raise ConfigError(
                "GRPOTrainer without reward_funcs: there is nothing to learn from. Give a function."
            )
        if train_dataset is None:
            raise DataError(
                "GRPOTrainer without train_dataset: there are no prompts. Give rows with a column 'prompt'."
            )
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
        self._reward_logs = RewardLogs()
        self.reward_funcs = reward_functions(
            reward_funcs,
            reward_processing_classes,
            self._reward_logs,
            lambda: self.state,
            device=self.model.device,
        )

    def train(self, resume_from_checkpoint: bool | str | os.PathLike[str] | None = None) -> TrainOutput:
        """One run. True, or the path of the newest checkpoint, resumes the one in ``output_dir``."""
        self.args.check()
        resume = self._resuming(resume_from_checkpoint)
        config = self._config(resume=resume)
        self.console.print(f"razona.trl: {self.args!r}, and the rest as in TRL {TRL_VERSION}")
        self._reward_logs.pop()
        return self._train(
            config,
            lambda: grpo.run(
                config,
                console=self.console,
                rows=self.train_dataset,
                eval_rows=self.eval_dataset if self.args.eval_strategy != "no" else None,
                reward_fns=self.reward_funcs,
                model=self._loaded,
                on_step=self._on_step,
                resume_hint=RESUME_HINT,
            ),
            num_rows=len(self.train_dataset),
            per_step=updates_per_rollout(self.args),
            rows_per_step=config.prompts_per_step,
        )

    def evaluate(self, eval_dataset: Any = None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """Mean rewards on held-out rows, under TRL's names; they go to the log too."""
        rows = self.eval_dataset if eval_dataset is None else eval_dataset
        if rows is None:
            raise DataError(
                "evaluate() without eval_dataset: there is nothing to evaluate on. Give held-out rows."
            )
        if isinstance(rows, Mapping):  # several data sets, each under its name
            parts = [self.evaluate(part, f"{metric_key_prefix}_{name}") for name, part in rows.items()]
            return {name: value for part in parts for name, value in part.items()}
        config = self._config(resume=False, evaluates=True)
        config = replace(config, eval=replace(config.eval, best_metric=""))
        evaluator = make_evaluator(
            config, self._loaded, load_rows(rows), self.reward_funcs, (), self.console, ()
        )
        assert evaluator is not None
        policy = make_policy(self._loaded, config.model, config.optimizer, total_updates=1)
        try:
            figures = eval_figures(
                evaluator(make_engine(policy, self._loaded, self.console)), metric_key_prefix
            )
        finally:
            policy.release()
        self._reward_logs.pop()
        self._log(figures)
        self._emit("on_evaluate", metrics=figures)
        return figures

    def _config(self, *, resume: bool, evaluates: bool | None = None) -> Any:
        config = grpo_config(
            self.args,
            num_rows=len(self.train_dataset),
            resume=resume,
            evaluates=self.args.eval_strategy != "no" if evaluates is None else evaluates,
        )
        model: ModelConfig = replace(config.model, name=self._loaded.name)
        return replace(config, model=model)

    def _extra_figures(self, step: int) -> dict[str, float]:
        metrics, extra = self._reward_logs.pop()
        if extra:
            with (Path(self.args.output_dir) / "run" / "extra.jsonl").open("ab") as file:
                file.write(json_line({"step": step, **extra}))
        return metrics
