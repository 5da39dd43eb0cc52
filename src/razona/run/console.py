"""What a run says on the terminal: lines, key figures, sample completions, progress with the time left."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, Any

import rich.console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

KEY_FIGURES = (
    "reward", "frac_zero_std", "loss", "grad_norm", "kl", "entropy", "completion_length", "truncated",
)  # fmt: skip
ENDINGS = {"length": " [cut off: max_completion_length]", "aborted": " [aborted]"}
PLAIN_SECONDS = 10.0
"""Without a terminal, a progress line is printed at most this often."""


class Console:
    """Prints to stdout, or to stderr in JSON mode, where the last line of stdout is one JSON object."""

    def __init__(
        self,
        json_mode: bool = False,
        *,
        file: IO[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.json_mode = json_mode
        self._clock = clock
        out = file or (sys.stderr if json_mode else sys.stdout)
        self._rich = rich.console.Console(
            file=out, width=None if out.isatty() else 110, highlight=False, markup=False, emoji=False
        )

    def print(self, text: str = "", *, style: str | None = None) -> None:
        """One line, or several; nothing in it is taken for markup."""
        self._rich.print(Text(text, style=style or ""), soft_wrap=True)

    def note(self, text: str) -> None:
        """Something the user should know but need not act on."""
        self.print(f"note: {text}", style="yellow")

    def mute(self) -> None:
        """Prints nothing from now on: the terminal has gone."""
        self._rich.file = rich.console.NULL_FILE

    def result(self, value: Mapping[str, Any]) -> None:
        """In JSON mode, the result as the last line of stdout; else nothing."""
        if self.json_mode:
            sys.stdout.write(json.dumps(value, allow_nan=False) + "\n")
            sys.stdout.flush()

    def metrics(
        self, step: int, num_steps: int, metrics: Mapping[str, float], keys: Sequence[str] = KEY_FIGURES
    ) -> None:
        """The key figures of a step in one line, with every eval/... figure and the seconds it took."""
        names = [key for key in keys if key in metrics] + [key for key in metrics if key.startswith("eval/")]
        names += ["seconds"] if "seconds" in metrics else []
        figures = "  ".join(f"{name} {metrics[name]:.4g}" for name in names)
        self.print(f"step {step:>{len(str(num_steps))}}/{num_steps}  {figures}")

    def samples(self, title: str, records: Sequence[Mapping[str, Any]], *, max_chars: int = 600) -> None:
        """A table of completions: records as ``razona.run.folder.rollout_records`` makes them."""
        table = Table(title=title, title_justify="left", show_lines=True, expand=True)
        table.add_column("prompt", ratio=2)
        table.add_column("completion", ratio=4)
        table.add_column("reward", no_wrap=True)
        for record in records:
            table.add_row(
                shorten(prompt_text(record["prompt"]), max_chars),
                shorten(record["completion"], max_chars) + ENDINGS.get(record["finish_reason"], ""),
                "\n".join(_reward_lines(record)),
            )
        self._rich.print(table)

    @contextmanager
    def progress(self, description: str, total: int, done: int = 0) -> Iterator[Callable[..., None]]:
        """Yields ``advance(n=1)``, from ``done``. A bar with the time left, or lines without a terminal."""
        if not self._rich.is_terminal:
            yield self.progress_lines(description, total, done)
            return
        columns = (
            TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(),
            TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
        )  # fmt: skip
        with Progress(*columns, console=self._rich) as bar:
            task = bar.add_task(description, total=total, completed=done)
            yield lambda n=1: bar.advance(task, n)

    def progress_lines(self, description: str, total: int, before: int = 0) -> Callable[..., None]:
        """``advance(n=1)`` that prints a line now and then; it may be used while a bar is shown."""
        start = said = self._clock()
        done = before

        def advance(n: int = 1) -> None:
            nonlocal done, said
            done += n
            now = self._clock()
            if done < total and now - said < PLAIN_SECONDS:
                return
            said = now
            left = max(0.0, (now - start) / max(1, done - before) * (total - done))
            elapsed = clock_text(now - start)
            self.print(f"{description} {done:.0f}/{total}  elapsed {elapsed}  left {clock_text(left)}")

        return advance


def prompt_text(prompt: str | list[dict[str, str]]) -> str:
    """A prompt as a person reads it: a string as it is, messages with who says them."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message['role']}: {message['content']}" for message in prompt)


def shorten(text: str, max_chars: int) -> str:
    """``text``, or its two ends when it is longer than ``max_chars``: the answer is at the end.

    Control characters, which would drive the terminal, are shown as a replacement character.
    """
    text = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
    if len(text) <= max_chars:
        return text
    half = max_chars // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters ...]\n{text[-half:]}"


def clock_text(seconds: float) -> str:
    """Seconds as minutes and seconds.

    >>> clock_text(75.4), clock_text(3675)
    ('1:15', '1:01:15')
    """
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def _reward_lines(record: Mapping[str, Any]) -> Iterator[str]:
    rewards: Mapping[str, float | None] = record["rewards"]
    if len(rewards) > 1:
        for name, value in rewards.items():
            yield f"{name} " + ("abstained" if value is None or value != value else f"{value:.3g}")
    total = record["reward"]
    yield "total " + ("none" if total is None or total != total else f"{total:.3g}")
    if record.get("advantage") is not None:
        yield f"advantage {record['advantage']:+.2f}"
