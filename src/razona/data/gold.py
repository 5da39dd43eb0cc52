"""The gold answer out of a longer text: ``answer:after('####')``. A few words, read here, never evaluated.

    [NAME=]COLUMN[:after('TEXT')][:number]

``after('TEXT')`` takes what follows the last TEXT; ``number`` takes the commas out of ``1,234`` and lets
nothing pass that is no number. Space around the result is always taken off. The reward functions get the
result as NAME, ``answer`` unless another is given.
"""

from __future__ import annotations

import re
from typing import Any, Literal, NamedTuple

from razona.data.rows import Rows
from razona.errors import ConfigError, DataError, nearest

ALLOWED = (
    "[NAME=]COLUMN, then any of :after('TEXT') and :number, for example answer:after('####') or "
    "label=solution:after('####'):number"
)
_HEAD = re.compile(r"(?:(?P<name>[^=:'\"()]*)=)?(?P<column>[^=:'\"()]+)")
_STEP = re.compile(r":\s*(?:after\(\s*(?P<text>'[^']+'|\"[^\"]+\")\s*\)|(?P<number>number))\s*")
_NUMBER = re.compile(r"-?(\d+(\.\d*)?|\.\d+)")


class Gold(NamedTuple):
    """A gold expression: ``steps`` are the texts of ``after``, None for ``number``."""

    name: str
    column: str
    steps: tuple[str | None, ...]

    def of(self, value: Any) -> str | None:
        """The gold in a cell; None where there is none.

        >>> parse_gold("answer:after('####'):number").of("2 + 2 = 4 #### 1,234")
        '1234'
        """
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        text = "" if value is None else str(value)
        for step in self.steps:
            if step is None:
                text = text.strip().removeprefix("$").replace(",", "").strip()
                text = text if _NUMBER.fullmatch(text) else ""
            else:
                text = text.rpartition(step)[2] if step in text else ""
        return text.strip() or None


def parse_gold(expression: str) -> Gold:
    """Reads an expression. Raises ConfigError saying what may be written, and where it went wrong."""
    head = _HEAD.match(expression)
    if head is None:
        raise ConfigError(f"--gold {expression!r} names no column. Write {ALLOWED}.")
    name, column = (head["name"] or "answer").strip(), head["column"].strip()
    if not name.isidentifier():
        raise ConfigError(
            f"--gold {expression!r}: {name!r} cannot be the name of a reward function's parameter. "
            f"Write {ALLOWED}."
        )
    steps: list[str | None] = []
    at = head.end()
    while at < len(expression):
        step = _STEP.match(expression, at)
        if step is None:
            strip = expression[at:].lstrip(": ").startswith("strip")
            hint = " Space around the result is taken off without a word for it." if strip else ""
            raise ConfigError(
                f"--gold {expression!r} cannot be read from {expression[at:]!r} on.{hint} Write {ALLOWED}."
            )
        steps.append(None if step["number"] else step["text"][1:-1])
        at = step.end()
    return Gold(name, column, tuple(steps))


def with_gold(
    rows: Rows, expression: str, *, no_gold: Literal["drop", "error"] = "error"
) -> tuple[Rows, tuple[str, ...]]:
    """The rows with the gold in its column, and lines to print.

    A column that stood under that name stays as ``original_NAME``. A row without a gold is refused, with a
    DataError, or dropped and counted.
    """
    gold = parse_gold(expression)
    if gold.column not in rows.columns:
        raise DataError(
            f"--gold {expression!r}: {rows.name} has no column {gold.column!r}. Its columns: "
            f"{', '.join(rows.columns)}.{nearest(gold.column, rows.columns)} Write {ALLOWED}."
        )
    original = f"original_{gold.name}"
    if gold.name in rows.columns and original in rows.columns:
        raise DataError(
            f"--gold {expression!r}: {rows.name} has a column {gold.name!r}, which would be kept as "
            f"{original!r}, and a column of that name too. Give the gold another name: "
            f"NAME={expression.rpartition('=')[2] if '=' in expression else expression}."
        )
    kept: list[tuple[int, dict[str, Any]]] = []
    for index, row in enumerate(rows):
        found = gold.of(row[gold.column])
        if found is None and no_gold == "error":
            raise DataError(
                f"{rows.where(index)} has no gold: {_missing(gold)} in its {gold.column!r}, which is "
                f"{str(row[gold.column])[-80:]!r}. Correct the row, or leave such rows out with "
                "--data.no-gold drop."
            )
        if found is not None:
            before = {original: row.pop(gold.name)} if gold.name in row else {}
            kept.append((rows.number(index), {**row, **before, gold.name: found}))
    if not kept:
        raise DataError(
            f"--gold {expression!r}: none of the {len(rows)} rows of {rows.name} has a gold; row 0 has "
            f"{str(rows[0][gold.column])[-80:]!r} in its {gold.column!r}. Write {ALLOWED}."
        )
    return rows.with_rows(kept), _notices(
        rows, gold, expression, [row[gold.name] for _, row in kept], original
    )


def _notices(rows: Rows, gold: Gold, expression: str, found: list[str], original: str) -> tuple[str, ...]:
    notices = [f"gold: {gold.name!r} is {expression} of {rows.name}, {found[0]!r} in its first row"]
    if gold.name in rows.columns:
        notices[0] += f"; what {gold.name!r} was stays as {original!r}"
    if len(found) < len(rows):
        notices.append(
            f"{len(rows) - len(found)} of {len(rows)} rows dropped: no gold ({_missing(gold)} in "
            f"{gold.column!r})."
        )
    commas = [text for text in found if "," in text and _NUMBER.fullmatch(text.replace(",", ""))]
    if commas:
        notices.append(
            f"{len(commas)} golds are numbers with commas, such as {commas[0]!r}, and an answer is right "
            f"only if it has them too. {expression}:number takes them out."
        )
    return tuple(notices)


def _missing(gold: Gold) -> str:
    """What a row without a gold lacks."""
    texts = [f"no {step!r} with something after it" for step in gold.steps if step is not None]
    return " or ".join([*texts, *(["no number"] if None in gold.steps else [])]) or "nothing"
