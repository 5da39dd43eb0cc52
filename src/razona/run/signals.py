"""The signals that end a run: Ctrl-C, SIGTERM of a batch queue, SIGHUP of a terminal that closes."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

from razona.run.console import Console


class Signalled(KeyboardInterrupt):
    """What a second signal raises, as Ctrl-C does by itself; ``name`` is the signal's."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name


class Signals:
    """Within it the first SIGINT, SIGTERM or SIGHUP only sets ``received``, so that a step ends and is saved;
    the second one raises Signalled.

    Handlers belong to the main thread: in another one it does nothing.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.received: str | None = None
        self._former: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is not threading.main_thread():
            return self
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            former = signal.getsignal(number)
            # None: not Python's to replace. Ignored: nohup wants it so; but a script's shell ignores SIGINT
            # for all that it starts with &, and kill -INT is still meant.
            if former is None or (former is signal.SIG_IGN and number != signal.SIGINT):
                continue
            self._former[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, former in self._former.items():
            signal.signal(number, former)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.received:
            raise Signalled(name)
        self.received = name
        try:
            self.console.note(
                f"{name}: finishing this step, then saving. A second signal (Ctrl-C) stops at once, and no "
                "checkpoint has this step."
            )
        except OSError:  # the terminal has gone: what is printed from here on must not end the step
            self.console.mute()
        except RuntimeError:  # it came in the middle of a line, which cannot be written into
            pass
