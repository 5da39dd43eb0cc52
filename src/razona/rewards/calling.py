"""Calling functions that may be plain or coroutine functions, with a time limit, from any thread.

What a function raises is the outcome of its call, sys.exit() too: it must not end the program.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, TimeoutError as FutureTimeoutError
from typing import Any


class TimedOut(Exception):
    """Not raised: the outcome of a call that took too long."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"no answer within {seconds:g} s")
        self.seconds = seconds


def call(function: Callable[..., Any], arguments: dict[str, Any], timeout: float | None) -> Any:
    """What the function returned, or the exception it raised, or a TimedOut."""
    return call_all([(function, arguments)], timeout)[0]


def call_all(calls: Sequence[tuple[Callable[..., Any], dict[str, Any]]], timeout: float | None) -> list[Any]:
    """The outcome of each call. Coroutine functions all run meanwhile; plain ones run one after another."""
    running = {
        i: asyncio.run_coroutine_threadsafe(_limited(function, arguments, timeout), _loop())
        for i, (function, arguments) in enumerate(calls)
        if is_async(function)
    }
    outcomes: list[Any] = [None] * len(calls)
    for i, (function, arguments) in enumerate(calls):
        if i not in running:
            outcomes[i] = _call_plain(function, arguments, timeout)
    for i, future in running.items():
        # A second more than the coroutine gets: only one that blocks the loop needs it.
        outcomes[i] = _outcome(future, None if timeout is None else timeout + 1.0, timeout)
    return outcomes


def is_async(function: Any) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    return any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))


def _call_plain(function: Callable[..., Any], arguments: dict[str, Any], timeout: float | None) -> Any:
    future: Future[Any] = Future()

    def work() -> None:
        try:
            answer = function(**arguments)
            # A generator does its work, and fails, when it is read.
            future.set_result(list(answer) if isinstance(answer, Iterator) else answer)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and timeout is None:  # of this thread, not the function's
                raise
            future.set_result(error)

    if timeout is None:
        work()
    else:
        threading.Thread(target=work, name="razona-reward", daemon=True).start()
    return _outcome(future, timeout, timeout)


async def _limited(function: Callable[..., Any], arguments: dict[str, Any], timeout: float | None) -> Any:
    """asyncio.wait, not wait_for: a TimeoutError of the function's own stays one, and a coroutine that will
    not be cancelled is not waited for."""
    task = asyncio.ensure_future(_caught(function, arguments))
    done, _ = await asyncio.wait({task}, timeout=timeout)
    if not done:
        task.cancel()
        return TimedOut(timeout or 0.0)
    return task.result()


async def _caught(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """What the coroutine function returned or raised: a SystemExit of a task ends the event loop."""
    try:
        return await function(**arguments)
    except BaseException as error:
        return error


def _outcome(future: Future[Any], wait: float | None, timeout: float | None) -> Any:
    try:
        return future.result(wait)
    except FutureTimeoutError:
        return TimedOut(timeout or 0.0)


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """One event loop in a thread, for the life of the process: clients that functions keep stay usable."""
    loop = asyncio.new_event_loop()

    def serve() -> None:
        while True:  # a SystemExit in a task that a function started comes out here
            with contextlib.suppress(BaseException):
                loop.run_forever()

    threading.Thread(target=serve, name="razona-rewards", daemon=True).start()
    return loop
