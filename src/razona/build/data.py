"""From a configuration to rows, prompts and the notes that they give rise to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from razona.build.model import max_context
from razona.config import (
    DataConfig,
)
from razona.data import Demonstration, Rows, build_prompts, load_rows, with_gold
from razona.errors import ConfigError, DataError
from razona.models import LoadedModel
from razona.run.console import Console
from razona.tasks import gsm8k
from razona.types import Prompt, Sampling


def load_table(given: Any, data: DataConfig, console: Console) -> Rows:
    """``given`` (see `load_rows`) with the gold answers where ``data.gold`` says; what was dropped is
    printed.
    """
    try:
        rows = load_rows(given, split=data.split)
    except DataError as error:
        if given != gsm8k.HUB_ID:
            raise
        raise DataError(
            "--task gsm8k was given no --data, so the hub was asked, and it did not answer. Give the file: "
            f"--data train.jsonl, rows with a question and an answer that ends in #### 72. {error}"
        ) from error
    if data.gold:
        rows, notices = with_gold(rows, data.gold, no_gold=data.no_gold)
        for notice in notices:
            console.note(notice)
    return rows


def refuse_gold(data: DataConfig) -> None:
    """ConfigError where a command that scores nothing is given a gold answer."""
    for option, value, unset in (("task", data.task, "none"), ("gold", data.gold, "")):
        if value != unset:
            raise ConfigError(
                f"data.{option} = {value!r} belongs to commands that sample and score; SFT imitates the "
                f"column data.completion_column = {data.completion_column!r}. Leave it out."
            )


def fitting_prompts(
    rows: Rows, loaded: LoadedModel, data: DataConfig, sampling: Sampling, console: Console
) -> tuple[Prompt, ...]:
    """The rows that fit the model beside a completion, as prompts; what was dropped is printed."""
    prompts = build_prompts(
        rows,
        loaded.tokenizer,
        data,
        max_context=max_context(loaded.model),
        reserve=sampling.max_completion_length,
    )
    for notice in prompts.notices:
        console.note(notice)
    return prompts.prompts


def overlap_notice(
    training: Sequence[Prompt | Demonstration], held_out: Sequence[Prompt | Demonstration]
) -> str | None:
    """What to print when prompts, or whole demonstrations, are trained on and held out too: None when there
    are none.
    """
    trained = {prompt.token_ids for prompt in training}
    count = sum(prompt.token_ids in trained for prompt in held_out)
    if not count:
        return None
    what = "prompts" if isinstance(held_out[0], Prompt) else "rows"
    return (
        f"{count} of the {len(held_out)} held-out {what} are training {what} too: for these, eval/... "
        "figures say what was learned by heart. Hold out rows that are not trained on."
    )
