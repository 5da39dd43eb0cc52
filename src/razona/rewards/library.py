"""The reward functions that come along: format, exact answer, length, overlong punishment.

Each factory returns a function of the reward protocol. They score strings and messages alike.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from razona.errors import RewardError

_FORMAT = re.compile(r"\s*<think>(?P<thought>.*)</think>\s*\S", re.DOTALL)


def completion_text(completion: Any) -> str:
    """The text of a completion: a string, or messages, of which the last one counts.

    >>> completion_text([{"role": "assistant", "content": "72"}])
    '72'
    """
    if isinstance(completion, str):
        return completion
    try:
        text = completion[-1]["content"]
    except (TypeError, LookupError):
        text = None
    if not isinstance(text, str):
        raise RewardError(
            f"A completion is a string or a list of messages with a content, and this is {completion!r:.80}."
        )
    return text


def extract_answer(text: str) -> str | None:
    """What follows the first ``</think>``, without the space around it; None when there is none or it is
    empty.

    >>> extract_answer("<think>48 + 24</think> 72")
    '72'
    """
    return text.partition("</think>")[2].strip() or None


def think_format(min_characters: int = 1) -> Callable[..., list[float]]:
    """1.0 for ``<think>...</think>`` followed by an answer, else 0.0.

    Each tag must occur once, the opening one first, with at least ``min_characters`` that are not space
    between them: the empty ``<think></think> 72`` gets 0.0.
    """

    def one(text: str) -> float:
        match = _FORMAT.match(text)
        once = text.count("<think>") == 1 and text.count("</think>") == 1
        return float(match is not None and once and len("".join(match["thought"].split())) >= min_characters)

    def format(completions: Sequence[Any]) -> list[float]:
        return [one(completion_text(c)) for c in completions]

    return format


def exact_answer(column: str = "answer", score: float = 1.0) -> Callable[..., list[float | None]]:
    """``score`` when the answer after ``</think>`` is the value of ``column``, letter by letter, else 0.0.

    Space around either does not count. It abstains (None) where the column is empty or nan. Numbers are
    compared as they are written: 72 and 72.0 in the column are "72".
    """

    def exact_answer(completions: Sequence[Any], **columns: Sequence[Any]) -> list[float | None]:
        return [
            None if gold is None else score * (extract_answer(completion_text(c)) == gold)
            for c, gold in zip(completions, map(_written, columns[column]), strict=True)
        ]

    # What `bind` reads: the column is known only here.
    by_name = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = inspect.Signature([inspect.Parameter(name, by_name) for name in ("completions", column)])
    exact_answer.__signature__ = signature  # type: ignore[attr-defined]
    return exact_answer


def length(target: int = 128) -> Callable[..., list[float]]:
    """1.0 at ``target`` tokens (the stop token counts), falling evenly to 0.0 at none and at twice as many,
    and never below: an unbounded penalty drives a model into the length limit."""
    if target < 1:
        raise RewardError(f"length(target={target}): the target is a number of tokens, at least 1.")

    def length(completion_ids: Sequence[Sequence[int]]) -> list[float]:
        return [max(0.0, 1.0 - abs(len(ids) - target) / target) for ids in completion_ids]

    return length


def soft_overlong(max_completion_length: int, cache: int) -> Callable[..., list[float]]:
    """DAPO's soft overlong punishment (arXiv 2503.14476 section 3.4), to be added to a reward of correctness.

    0 up to ``max_completion_length - cache`` tokens (the stop token counts), from there evenly down to -1 at
    ``max_completion_length``, and -1 beyond. ``cache`` 0: -1 beyond the limit, else 0. It always scores: a
    completion that no other function can score then has a reward, its punishment.

    >>> soft_overlong(8, cache=4)(completion_ids=[[1] * 4, [1] * 6, [1] * 8])
    [0.0, -0.5, -1.0]
    """
    if max_completion_length < 1 or not 0 <= cache <= max_completion_length:
        raise RewardError(
            f"soft_overlong({max_completion_length}, {cache}): the punishment starts cache tokens before "
            "max_completion_length. Give a cache of 0 to max_completion_length."
        )

    def one(tokens: int) -> float:
        if tokens > max_completion_length:
            return -1.0
        return -max(0, tokens - (max_completion_length - cache)) / max(1, cache)

    def soft_overlong(completion_ids: Sequence[Sequence[int]]) -> list[float]:
        return [one(len(ids)) for ids in completion_ids]

    return soft_overlong


def _written(gold: Any) -> str | None:
    if isinstance(gold, float) and math.isnan(gold):  # an empty cell, as a table reader has it
        return None
    if isinstance(gold, float) and gold.is_integer():
        gold = int(gold)
    return None if gold is None else str(gold).strip() or None
