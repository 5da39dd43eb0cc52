"""What a trainer is asked for that it does not have, or that cannot work: each with what to do instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from razona.errors import ConfigError
from razona.trl.arguments import Arguments

INSTEAD = {
    "accelerator": "there is one process; what accelerator.print would print is printed by print",
    "tokenizer": "it is called processing_class, as in TRL",
    "hub_model_id": "push_to_hub() prints where the model is, and returns it",
    "predict": "razona.commands.generate and razona eval sample and score",
    "ref_model": "the reference is the trained model with other weights (docs/run-folder.md)",
}
"""Attributes that scripts for TRL may ask for, and what there is."""


REFUSED = {
    "tokenizer": "is called processing_class: write processing_class=tokenizer, as in TRL",
    "optimizers": "is not supported: the optimizer is AdamW. Leave it out; set learning_rate",
    "quantization_config": "is not supported. Leave it out",
}
"""Arguments of both trainers that cannot work, and why."""


def check_args(args: Any, cls: type[Arguments]) -> None:
    """ConfigError for a configuration that is another trainer's, or no one's here."""
    if not isinstance(args, cls):
        raise ConfigError(
            f"args is a {type(args).__module__}.{type(args).__name__}, and the fields that count here are "
            f"those of razona.trl.{cls.__name__}. Import that and make one."
        )


def check_evaluation(args: Arguments, eval_dataset: Any) -> None:
    """ConfigError for an evaluation without rows, for one on several data sets, and for a best model that is
    never measured.
    """
    if args.eval_strategy != "no" and isinstance(eval_dataset, Mapping):
        raise ConfigError(
            f"eval_strategy = {args.eval_strategy!r} with several data sets as eval_dataset "
            f"({', '.join(eval_dataset)}): a run is evaluated on one. Give one of them, and the others to "
            "trainer.evaluate(...)."
        )
    if args.eval_strategy != "no" and eval_dataset is None:
        raise ConfigError(
            f"eval_strategy = {args.eval_strategy!r} without eval_dataset: there is nothing to evaluate "
            "on. Give held-out rows, or leave it out."
        )
    if args.metric_for_best_model is not None and args.eval_strategy == "no":
        raise ConfigError(
            f"metric_for_best_model = {args.metric_for_best_model!r} with eval_strategy = 'no': it is "
            "never measured. Set eval_strategy='steps' and eval_steps."
        )


def check_names(trainer: str, given: Mapping[str, Any], refused: Mapping[str, str]) -> None:
    """ConfigError for keywords that the trainer does not have, and for those it has, but that cannot work:
    ``refused`` are its own.
    """
    why = {**REFUSED, **refused}
    for name, value in given.items():
        if name not in why:
            raise TypeError(f"{trainer} has no argument '{name}'")
        if value is not None and value != (None, None) and value != []:
            raise ConfigError(f"{trainer}({name}=...) {why[name]}.")
